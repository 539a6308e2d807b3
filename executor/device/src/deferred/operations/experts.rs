//! Queues weights of experts.

use super::super::Deferred;
use crate::device::Device;
use crate::error::Result;
use crate::ops::experts::{ExpertWeightShape, Experts};
use crate::runtime::Tensor;

impl<D: Device> Experts for Deferred<D> {
    fn expert_weights(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        weights: &mut Tensor<Self>,
    ) -> Result<()> {
        let shape = *shape;
        self.enqueue([logits, chosen], [weights], move |inner, [logits, chosen], [weights]| {
            inner.expert_weights(&shape, logits, chosen, weights)
        })
    }

    fn expert_weights_backward(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        d_weights: &Tensor<Self>,
        d_logits: &mut Tensor<Self>,
    ) -> Result<()> {
        let shape = *shape;
        self.enqueue([logits, chosen, d_weights], [d_logits], move |inner, [x, chosen, d], [d_logits]| {
            inner.expert_weights_backward(&shape, x, chosen, d, d_logits)
        })
    }

    fn row_products(
        &self,
        columns: usize,
        tokens: &Tensor<Self>,
        rows: &Tensor<Self>,
        places: &Tensor<Self>,
        products: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([tokens, rows, places], [products], move |inner, [tokens, rows, places], [products]| {
            inner.row_products(columns, tokens, rows, places, products)
        })
    }
}
