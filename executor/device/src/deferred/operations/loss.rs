//! Queues losses.

use std::ops::Range;

use super::super::Deferred;
use crate::device::Device;
use crate::error::Result;
use crate::ops::cross_entropy::CrossEntropy;
use crate::ops::vocab_parallel_cross_entropy::{VocabParallelCrossEntropy, VocabularyPart};
use crate::runtime::Tensor;

impl<D: Device> CrossEntropy for Deferred<D> {
    fn cross_entropy(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([targets], [logits, loss], move |inner, [targets], [logits, loss]| {
            inner.cross_entropy(logits, (targets, range), scale, loss)
        })
    }
}

impl<D: Device> VocabParallelCrossEntropy for Deferred<D> {
    fn partial_softmax(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &mut Tensor<Self>,
    ) -> Result<()> {
        let part = part.clone();
        self.enqueue([targets], [logits, parts], move |inner, [targets], [logits, parts]| {
            inner.partial_softmax(logits, (targets, range), &part, parts)
        })
    }

    fn join_softmax(
        &self,
        exponentials: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &Tensor<Self>,
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let part = part.clone();
        self.enqueue(
            [targets, parts],
            [exponentials, loss],
            move |inner, [targets, parts], [exponentials, loss]| {
                inner.join_softmax(exponentials, (targets, range), &part, parts, scale, loss)
            },
        )
    }
}
