//! Queues heads of latent attention.

use super::super::Deferred;
use crate::device::Device;
use crate::error::Result;
use crate::ops::bias::Columns;
use crate::ops::latent_heads::{LatentHeads, LatentShape};
use crate::runtime::Tensor;

impl<D: Device> LatentHeads for Deferred<D> {
    fn latent_heads(
        &self,
        shape: &LatentShape,
        [queries, keys_values]: [&Tensor<Self>; 2],
        (rotated, columns): (&Tensor<Self>, Columns),
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        qkv: &mut Tensor<Self>,
    ) -> Result<()> {
        let (shape, reads) = (*shape, [queries, keys_values, rotated, cos, sin]);
        self.enqueue(reads, [qkv], move |inner, [queries, keys_values, rotated, cos, sin], [qkv]| {
            inner.latent_heads(&shape, [queries, keys_values], (rotated, columns), (cos, sin), qkv)
        })
    }

    fn latent_heads_backward(
        &self,
        shape: &LatentShape,
        d_qkv: &Tensor<Self>,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        [d_queries, d_keys_values]: [&mut Tensor<Self>; 2],
        (d_rotated, columns): (&mut Tensor<Self>, Columns),
    ) -> Result<()> {
        let (shape, writes) = (*shape, [&*d_queries, &*d_keys_values, &*d_rotated]);
        self.enqueue([d_qkv, cos, sin], writes, move |inner, [d_qkv, cos, sin], [dq, dkv, dr]| {
            inner.latent_heads_backward(&shape, d_qkv, (cos, sin), [dq, dkv], (dr, columns))
        })
    }
}
