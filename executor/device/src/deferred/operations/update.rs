//! Queues norms of gradients and updates of weights.

use std::ops::Range;

use super::super::Deferred;
use super::Written;
use crate::device::Device;
use crate::error::Result;
use crate::ops::adamw::{AdamW, AdamWState, DecayRange, Update};
use crate::runtime::Tensor;

impl<D: Device> Update for Deferred<D> {
    fn sums_of_squares(&self, tensors: &[(&Tensor<Self>, usize)], into: &mut Tensor<Self>) -> Result<()> {
        let (reads, places): (Vec<&Tensor<Self>>, Vec<usize>) = tensors.iter().copied().unzip();
        self.enqueue_lists(&reads, &[into], move |inner, reads, writes| {
            let tensors: Vec<(&Tensor<D>, usize)> = reads.iter().copied().zip(places).collect();
            inner.sums_of_squares(&tensors, writes[0])
        })
    }

    fn clip_factor(
        &self,
        figures: &Tensor<Self>,
        squares: Range<usize>,
        norm_max: Option<f64>,
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([figures], [into], move |inner, [figures], [into]| {
            inner.clip_factor(figures, squares, norm_max, into)
        })
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        decays: &[DecayRange],
        clip: &Tensor<Self>,
        weights: &mut Tensor<Self>,
        gradients: &Tensor<Self>,
        state: AdamWState<'_, Self>,
    ) -> Result<()> {
        let AdamWState { master, mean, square } = state;
        let has_master = master.is_some();
        let writes: Vec<&Tensor<Self>> =
            [&*weights, &*mean, &*square].into_iter().chain(master.as_deref()).collect();
        let (adamw, decays) = (*adamw, decays.to_vec());
        self.enqueue_lists(&[clip, gradients], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (weights, mean, square) = (written.next(), written.next(), written.next());
            let master = has_master.then(|| written.next());
            let state = AdamWState { master, mean, square };
            inner.adamw(&adamw, &decays, reads[0], weights, reads[1], state)
        })
    }
}
