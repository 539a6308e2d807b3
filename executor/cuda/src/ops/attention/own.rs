//! Attention kernels in this crate: tensor cores for bf16 and common head widths, general kernels for the
//! rest.
//!
//! Row owners write the row gradients, so that sums have one order; scores are computed twice for it.

use dflop_device::ops::attention::AttentionShape;
use dflop_device::{Dtype, Result, Segments, Tensor};

use super::super::same_type;
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Head widths that the tensor core kernels are compiled for.
const TENSOR_CORE_HEADS: [usize; 5] = [64, 72, 80, 96, 128];
/// Maximum head width in the general kernels.
const HEAD_MAX: usize = 256;
/// Number of rows in a block.
const BLOCK_ROWS: usize = 64;
/// Number of threads in a tensor core block: a warp for every 16 rows.
const TENSOR_CORE_THREADS: u32 = 128;
const GENERAL_THREADS: u32 = 256;
/// Shared memory in bytes that key owners need for the log sums and dots in two steps with 32 queries.
const KEYS_EXTRA_BYTES: u32 = 2 * 2 * 32 * 4;

/// Minimum number of key owners per tile, below which the query heads for a key head are divided.
const OWNERS_MIN: usize = 16;
/// Number of elements per thread that adds parts.
const PARTS_WIDTH: u32 = 8;

/// Kernels for one attention.
struct Kernels {
    has_tensor_cores: bool,
    macros: Macros,
    /// Shared memory in bytes for four row blocks, with padding against bank conflicts.
    shared_bytes: u32,
}

impl Kernels {
    /// Chooses kernels by type, head width, and whether rows can be copied 16 bytes at a time.
    fn of(shape: &AttentionShape, segments: &Segments<Cuda>, dtype: Dtype, rows: &[&Tensor<Cuda>]) -> Self {
        let (head, has_ranges) = (shape.head_dim, segments.ranges().is_some());
        let is_aligned = rows.iter().all(|tensor| tensor.is_aligned());
        if dtype == Dtype::Bf16 && TENSOR_CORE_HEADS.contains(&head) && is_aligned {
            let stride = head.next_multiple_of(16) + 8;
            let shared_bytes = (4 * BLOCK_ROWS * stride * Dtype::Bf16.bytes()) as u32;
            let macros = Macros::default().number("HEAD", head as u32).ranges(has_ranges);
            return Self { has_tensor_cores: true, macros, shared_bytes };
        }
        assert!((1..=HEAD_MAX).contains(&head), "heads of 1 to {HEAD_MAX} columns, found {head}");
        let macros = Macros::types(&[dtype]).ranges(has_ranges);
        Self { has_tensor_cores: false, macros, shared_bytes: 0 }
    }

    /// Returns a grid with a block for every row block and head.
    fn grid(&self, blocks: usize, heads: usize, extra_bytes: u32) -> Grid {
        let threads = if self.has_tensor_cores { TENSOR_CORE_THREADS } else { GENERAL_THREADS };
        let shared_bytes = if self.has_tensor_cores { self.shared_bytes + extra_bytes } else { 0 };
        Grid { shared_bytes, ..Grid::blocks(blocks, threads).by(heads) }
    }

    /// Adds the last arguments that all kernels take.
    fn arguments(
        &self,
        first: Arguments,
        shape: &AttentionShape,
        segments: &Segments<Cuda>,
        owners: Owners,
    ) -> Arguments {
        let counts = first.read(segments.blocks()).int(segments.block_count());
        let heads = counts.int(shape.heads).int(shape.kv_heads);
        let heads = if self.has_tensor_cores { heads } else { heads.int(shape.head_dim) };
        // key ranges for all queries, then query ranges for all keys
        let first =
            if owners == Owners::Queries { 0 } else { 2 * segments.host().rows() * Dtype::U32.bytes() };
        let ranges = segments.ranges().map_or(0, |ranges| ranges.address() + first as u64);
        heads.float(shape.scale as f32).int(usize::from(shape.is_causal)).address(ranges)
    }
}

/// Rows whose results a kernel writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owners {
    Queries,
    Keys,
}

/// Returns the number of parts into which the query heads for a key head are divided when computing the key
/// head gradients: few key heads would otherwise leave processors idle.
///
/// It depends only on head counts, so that a segment has the same bits whether or not it is packed with other
/// segments.
fn splits(shape: &AttentionShape) -> usize {
    let group = shape.heads / shape.kv_heads;
    let is_enough = |splits: &usize| group.is_multiple_of(*splits) && shape.kv_heads * splits >= OWNERS_MIN;
    (1..=group).find(is_enough).unwrap_or(group)
}

/// Checks the shapes in a forward pass.
pub(super) fn check(
    shape: &AttentionShape,
    segments: &Segments<Cuda>,
    qkv: &Tensor<Cuda>,
    output: &Tensor<Cuda>,
    log_sums: &Tensor<Cuda>,
) -> Dtype {
    let tokens = segments.host().rows();
    assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads), "heads share keys evenly");
    assert_eq!(qkv.len(), tokens * shape.row(), "segments end with the tokens");
    assert_eq!(output.len(), tokens * shape.output(), "the output has a row for every token");
    assert_eq!(log_sums.len(), tokens * shape.heads, "every row of every head has its sum");
    assert_eq!(log_sums.dtype(), Dtype::F32, "sums are `f32`");
    same_type(&[qkv, output])
}

impl Cuda {
    /// Queues the forward pass.
    pub(super) fn own_attention(
        &self,
        dtype: Dtype,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let kernels = Kernels::of(shape, segments, dtype, &[qkv, output]);
        let grid = kernels.grid(segments.block_count(), shape.heads, 0);
        let arguments = Arguments::default().read(qkv).write(output).write(log_sums);
        let arguments = kernels.arguments(arguments, shape, segments, Owners::Queries);
        let (source, name) = if kernels.has_tensor_cores {
            (Source::AttentionForward, "attention_forward")
        } else {
            (Source::AttentionGeneral, "attention_forward_general")
        };
        self.launch(source, name, kernels.macros, grid, arguments)
    }

    /// Queues the backward pass.
    pub(super) fn own_attention_backward(
        &self,
        dtype: Dtype,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        (qkv, output, log_sums): (&Tensor<Self>, &Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_qkv: &mut Tensor<Self>,
    ) -> Result<()> {
        let kernels = Kernels::of(shape, segments, dtype, &[qkv, output, d_output]);
        let mut dots = self.allocate(Dtype::F32, log_sums.len())?;
        let (source, queries, keys) = if kernels.has_tensor_cores {
            (Source::AttentionBackward, "attention_backward_queries", "attention_backward_keys")
        } else {
            let names = ("attention_backward_queries_general", "attention_backward_keys_general");
            (Source::AttentionGeneral, names.0, names.1)
        };
        let arguments = Arguments::default().read(qkv).read(output).read(log_sums).read(d_output);
        let arguments = arguments.write(&mut dots).write(d_qkv);
        let arguments = kernels.arguments(arguments, shape, segments, Owners::Queries);
        let grid = kernels.grid(segments.block_count(), shape.heads, 0);
        self.launch(source, queries, kernels.macros, grid, arguments)?;
        let first = Arguments::default().read(qkv).read(log_sums).read(d_output).read(&dots).write(d_qkv);
        if !kernels.has_tensor_cores {
            let arguments = kernels.arguments(first, shape, segments, Owners::Keys);
            let grid = kernels.grid(segments.block_count(), shape.kv_heads, 0);
            return self.launch(source, keys, kernels.macros, grid, arguments);
        }
        let splits = splits(shape);
        let elements = 2 * segments.host().rows() * shape.kv_heads * shape.head_dim;
        let mut parts = self.allocate(Dtype::F32, if splits == 1 { 0 } else { splits * elements })?;
        let first = first.write(&mut parts).int(splits);
        let arguments = kernels.arguments(first, shape, segments, Owners::Keys);
        let grid = kernels.grid(segments.block_count(), shape.kv_heads * splits, KEYS_EXTRA_BYTES);
        self.launch(source, keys, kernels.macros, grid, arguments)?;
        if splits == 1 {
            return Ok(());
        }
        let arguments = Arguments::default().read(&parts).write(d_qkv).long(elements).int(splits);
        let arguments = arguments.int(shape.heads).int(shape.kv_heads).float(shape.scale as f32);
        let grid = Grid::elements(elements, PARTS_WIDTH);
        self.launch(source, "attention_backward_parts", kernels.macros, grid, arguments)
    }
}
