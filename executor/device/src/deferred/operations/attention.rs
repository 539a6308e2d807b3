//! Queues rotations of heads and attention.

use super::super::Deferred;
use crate::deferred::queue::overwrite;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::ops::attention::{Attend, AttentionShape};
use crate::ops::attention_sinks::AttentionSinks;
use crate::ops::rope::{RopeShape, RopeTable, Rotate, Rotation};
use crate::runtime::{Runtime, Tensor};
use crate::segments::Segments;

impl<D: Device> Rotate for Deferred<D> {
    fn rope_angles(
        &self,
        table: &RopeTable,
        positions: &Tensor<Self>,
        tokens: usize,
    ) -> Result<(Tensor<Self>, Tensor<Self>)> {
        let len = tokens * table.frequencies.len();
        let (cos, sin) = (self.alloc_as(Dtype::F32, len)?, self.alloc_as(Dtype::F32, len)?);
        let table = table.clone();
        self.enqueue([positions], [&cos, &sin], move |inner, [positions], [cos, sin]| {
            let (computed_cos, computed_sin) = inner.rope_angles(&table, positions, tokens)?;
            overwrite(inner, &computed_cos, cos)?;
            overwrite(inner, &computed_sin, sin)
        })?;
        Ok((cos, sin))
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        x: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([cos, sin], [x], move |inner, [cos, sin], [x]| {
            inner.rope(rotation, shape, (cos, sin), x)
        })
    }
}

impl<D: Device> Attend for Deferred<D> {
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let (shape, host) = (*shape, segments.host().clone());
        let (reads, writes) = ([qkv, segments.starts()], [&*output, &*log_sums]);
        self.enqueue(reads, writes, move |inner, [qkv, _], [output, log_sums]| {
            let segments = Segments::of(inner, host)?;
            inner.attention(&shape, &segments, qkv, output, log_sums)
        })
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
    ) -> Result<Tensor<Self>> {
        let d_qkv = self.alloc(qkv.len())?;
        let (shape, host) = (*shape, segments.host().clone());
        let reads = [qkv, output, log_sums, d_output, segments.starts()];
        self.enqueue(reads, [&d_qkv], move |inner, [qkv, output, log_sums, d_output, _], [d_qkv]| {
            let segments = Segments::of(inner, host)?;
            let computed = inner.attention_backward(&shape, &segments, qkv, (output, log_sums), d_output)?;
            overwrite(inner, &computed, d_qkv)
        })?;
        Ok(d_qkv)
    }
}

impl<D: Device> AttentionSinks for Deferred<D> {
    fn attention_sinks(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let shape = *shape;
        self.enqueue([sinks], [&*output, &*log_sums], move |inner, [sinks], [output, log_sums]| {
            inner.attention_sinks(&shape, sinks, output, log_sums)
        })
    }

    fn attention_sinks_backward(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()> {
        let shape = *shape;
        let reads = [sinks, output, log_sums, d_output];
        self.enqueue(reads, [&*d_sinks], move |inner, [sinks, output, log_sums, d_output], [d_sinks]| {
            inner.attention_sinks_backward(&shape, sinks, (output, log_sums), d_output, d_sinks)
        })
    }
}
