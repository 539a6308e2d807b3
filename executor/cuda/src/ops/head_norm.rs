//! Normalization of heads of queries and keys.

use dflop_device::ops::head_norm::{HeadColumns, HeadNorm};
use dflop_device::{Dtype, Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, same_type};
use crate::compiler::Source;
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};
use crate::kernels::Macros;

/// One warp for every head.
fn by_heads(heads: usize) -> Grid {
    Grid::blocks(heads.div_ceil(THREADS as usize / 32), THREADS)
}

/// Adds the number of all heads, and their columns.
fn with_columns(arguments: Arguments, heads: HeadColumns, all: usize) -> Arguments {
    let HeadColumns { first, heads, head_dim, stride } = heads;
    arguments.long(all).int(heads).int(head_dim).int(first).int(stride)
}

/// Checks shapes, and returns the number of all heads.
fn check(
    heads: HeadColumns,
    x: &Tensor<Cuda>,
    inverse: &Tensor<Cuda>,
    weight: Option<&Tensor<Cuda>>,
) -> usize {
    let all = heads.rows(x.len()) * heads.heads;
    assert_eq!(inverse.len(), all, "every head has its inverse");
    assert_eq!(inverse.dtype(), Dtype::F32, "inverses are `f32`");
    assert!(weight.is_none_or(|weight| weight.len() == heads.head_dim), "a weight for every column");
    assert!(weight.is_none_or(|weight| weight.dtype() == x.dtype()), "operands have one type");
    all
}

impl HeadNorm for Cuda {
    fn head_norm(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        epsilon: f64,
        x: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        let all = check(heads, x, inverse, weight);
        let macros = Macros::types(&[x.dtype()]);
        let arguments = Arguments::default().read_if(weight).write(x).write(inverse);
        let arguments = with_columns(arguments, heads, all).float(epsilon as f32).float(offset as f32);
        self.launch(Source::HeadNorm, "head_norm", macros, by_heads(all), arguments)
    }

    fn head_norm_backward(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        (x, inverse): (&Tensor<Self>, &Tensor<Self>),
        d: &mut Tensor<Self>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let all = check(heads, x, inverse, weight);
        assert_eq!(d.len(), x.len(), "shapes agree");
        let macros = Macros::types(&[same_type(&[x, d])]);
        // the gradient of the weight reads what the other kernel overwrites
        if let Some(d_weight) = d_weight {
            assert_eq!(d_weight.len(), heads.head_dim, "shapes agree");
            let parts = Parts::of(all);
            let mut sums = self.alloc_parts(parts.count, heads.head_dim)?;
            let arguments = Arguments::default().read(d).read(x).read(inverse).write(&mut sums);
            let arguments = with_columns(arguments, heads, all).int(parts.rows);
            let grid = parts.grid(heads.head_dim);
            self.launch(Source::HeadNorm, "head_norm_dw", macros, grid, arguments)?;
            self.finish_sums(parts.count, &sums, d_weight)?;
        }
        let arguments = Arguments::default().read_if(weight).read(x).read(inverse).write(d);
        let arguments = with_columns(arguments, heads, all).float(offset as f32);
        self.launch(Source::HeadNorm, "head_norm_dx", macros, by_heads(all), arguments)
    }
}
