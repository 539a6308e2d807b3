//! Query and key head normalization.

use dflop_device::ops::head_norm::{HeadColumns, HeadNorm};
use dflop_device::{Dtype, Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, own_columns, same_type, width};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Returns a grid with a warp for every head.
fn by_heads(heads: usize) -> Grid {
    Grid::blocks(heads.div_ceil(THREADS as usize / 32), THREADS)
}

/// Adds the total number of heads, and the head columns.
fn with_columns(arguments: Arguments, heads: HeadColumns, all: usize) -> Arguments {
    let HeadColumns { first, heads, head_dim, stride } = heads;
    arguments.long(all).int(heads).int(head_dim).int(first).int(stride)
}

/// Checks shapes, and returns the total number of heads.
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
        assert!(d_weight.as_ref().is_none_or(|d_weight| d_weight.len() == heads.head_dim), "shapes agree");
        let Some(walk) = self.walk_heads(heads, all, weight, x, d) else {
            return self.wide_head_norm_backward((heads, all), (weight, offset), (x, inverse), d, d_weight);
        };
        let parts = walk.blocks;
        let mut sums = d_weight.as_ref().map(|_| self.alloc_parts(parts, heads.head_dim)).transpose()?;
        let arguments = Arguments::default().read_if(weight).read(x).read(inverse).write(d);
        let arguments = with_columns(arguments.write_if(sums.as_mut()), heads, all).float(offset as f32);
        let (grid, arguments) = (Grid::blocks(parts, THREADS), arguments.int(walk.lanes));
        self.launch(Source::HeadNormBackward, "head_norm_backward", walk.macros, grid, arguments)?;
        let Some((sums, d_weight)) = sums.zip(d_weight) else { return Ok(()) };
        self.finish_sums(parts, &sums, d_weight)
    }
}

/// Minimum number of heads per group of threads that iterates over heads, unless there are fewer: each block
/// writes sums.
const WALK_HEADS_MIN: usize = 8;
/// Number of blocks per multiprocessor that iterate over heads.
const WALK_BLOCKS: usize = 3;

/// Pass over heads, in which several lanes of a warp share each head.
struct Walk {
    macros: Macros,
    blocks: usize,
    lanes: usize,
}

impl Cuda {
    /// Returns as many blocks as run at once; none if heads are too wide for warp registers.
    fn walk_heads(
        &self,
        heads: HeadColumns,
        all: usize,
        weight: Option<&Tensor<Self>>,
        x: &Tensor<Self>,
        d: &Tensor<Self>,
    ) -> Option<Walk> {
        let dtype = same_type(&[x, d]);
        // a number is a multiple of 8 if its lowest bits are zeros; the combined number tests all three at
        // once
        let run = heads.head_dim | heads.first | heads.stride;
        let tensors: Vec<_> = [x, d].into_iter().chain(weight).collect();
        let macros = Macros::types(&[dtype, dtype]).number("WIDTH", width(run, &tensors));
        let lanes = heads.head_dim.div_ceil(own_columns(macros)).next_power_of_two();
        let groups = (THREADS as usize).checked_div(lanes).filter(|_| lanes <= 32)?;
        let at_once = self.shared().context.processors() as usize * WALK_BLOCKS;
        Some(Walk { macros, blocks: at_once.min(all.div_ceil(groups * WALK_HEADS_MIN)), lanes })
    }

    /// Computes gradients for heads with more columns than warp registers hold, in a separate pass for each
    /// gradient.
    fn wide_head_norm_backward(
        &self,
        (heads, all): (HeadColumns, usize),
        (weight, offset): (Option<&Tensor<Self>>, f64),
        (x, inverse): (&Tensor<Self>, &Tensor<Self>),
        d: &mut Tensor<Self>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let macros = Macros::types(&[same_type(&[x, d])]);
        // the weight gradient reads values that the other kernel overwrites
        if let Some(d_weight) = d_weight {
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
