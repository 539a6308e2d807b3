//! Latent attention heads.

use dflop_device::ops::bias::Columns;
use dflop_device::ops::latent_heads::{LatentHeads, LatentShape};
use dflop_device::{Dtype, Result, Tensor};

use super::{THREADS, same_type};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Checks shapes, and returns the number of tokens.
fn tokens(
    shape: &LatentShape,
    qkv: usize,
    [queries, keys_values]: [usize; 2],
    (rotated, columns): (usize, Columns),
    (cos, sin): (&Tensor<Cuda>, &Tensor<Cuda>),
) -> usize {
    let tokens = qkv / shape.row();
    let fits = qkv == tokens * shape.row()
        && queries == tokens * shape.heads * shape.head_dim()
        && keys_values == tokens * shape.keys_values()
        && rotated == tokens * columns.stride
        && columns.first + shape.rotated <= columns.stride
        && shape.value <= shape.head_dim()
        && cos.len() == tokens * (shape.rotated / 2);
    assert!(fits && cos.len() == sin.len(), "every token has a row");
    assert_eq!(same_type(&[cos, sin]), Dtype::F32, "angles are `f32`");
    tokens
}

/// Adds head sizes, and the columns of the rotated part.
fn with_sizes(arguments: Arguments, shape: &LatentShape, columns: Columns) -> Arguments {
    let arguments = arguments.int(shape.heads).int(shape.plain).int(shape.rotated).int(shape.value);
    arguments.int(columns.first).int(columns.stride)
}

fn macros(shape: &LatentShape, dtype: Dtype) -> Macros {
    Macros::types(&[dtype]).number("INTERLEAVED", u32::from(shape.is_interleaved))
}

impl LatentHeads for Cuda {
    fn latent_heads(
        &self,
        shape: &LatentShape,
        [queries, keys_values]: [&Tensor<Self>; 2],
        (rotated, columns): (&Tensor<Self>, Columns),
        angles: (&Tensor<Self>, &Tensor<Self>),
        qkv: &mut Tensor<Self>,
    ) -> Result<()> {
        let inputs = [queries.len(), keys_values.len()];
        let tokens = tokens(shape, qkv.len(), inputs, (rotated.len(), columns), angles);
        let macros = macros(shape, same_type(&[queries, keys_values, rotated, qkv]));
        let arguments = Arguments::default().read(queries).read(keys_values).read(rotated);
        let arguments = arguments.read(angles.0).read(angles.1).write(qkv);
        let (arguments, grid) = (with_sizes(arguments, shape, columns), Grid::blocks(tokens, THREADS));
        self.launch(Source::LatentHeads, "latent_heads", macros, grid, arguments)
    }

    fn latent_heads_backward(
        &self,
        shape: &LatentShape,
        d_qkv: &Tensor<Self>,
        angles: (&Tensor<Self>, &Tensor<Self>),
        [d_queries, d_keys_values]: [&mut Tensor<Self>; 2],
        (d_rotated, columns): (&mut Tensor<Self>, Columns),
    ) -> Result<()> {
        let d_inputs = [d_queries.len(), d_keys_values.len()];
        let tokens = tokens(shape, d_qkv.len(), d_inputs, (d_rotated.len(), columns), angles);
        let macros = macros(shape, same_type(&[d_qkv, d_queries, d_keys_values, d_rotated]));
        let arguments = Arguments::default().read(d_qkv).read(angles.0).read(angles.1);
        let arguments = arguments.write(d_queries).write(d_keys_values).write(d_rotated);
        let (arguments, grid) = (with_sizes(arguments, shape, columns), Grid::blocks(tokens, THREADS));
        self.launch(Source::LatentHeads, "latent_heads_backward", macros, grid, arguments)
    }
}
