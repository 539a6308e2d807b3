//! Attention backward pass, parallel over segments and key heads.
//!
//! Each task owns its key and value gradients and the gradients of every query that reads them. Sums run over
//! the heads in the group and over tiles in order.

use rayon::prelude::*;

use super::mask::{Mask, Span};
use super::parallel::{chunk_rows, has_fused, vectorized};
use super::product::{LANES, ROWS, Rows, lanes_mut, store, times, transpose};
use super::{AttentionShape, HostSegments, Tile, grown, scores_stride};
use crate::ops::real::Real;

/// Inputs and outputs of the forward pass.
struct ForwardTensors<'a, F> {
    qkv: &'a [F],
    log_sums: &'a [F],
    d_output: &'a [F],
}

/// Writes query, key and value gradients, `[tokens, (heads + 2 * kv_heads) * head_dim]`.
///
/// - `(qkv, output, log_sums)`: forward inputs and outputs; `output` is not read
///
/// `scratch` has the same size as `d_qkv`: tasks write gradients there sequentially, before they are copied
/// into rows.
///
/// # Panics
/// If shapes do not match.
pub fn backward<F: Real>(
    shape: &AttentionShape,
    segments: &HostSegments,
    (qkv, output, log_sums): (&[F], &[F], &[F]),
    d_output: &[F],
    scratch: &mut [F],
    d_qkv: &mut [F],
) {
    shape.check(segments, qkv, output, log_sums);
    assert!(
        d_output.len() == output.len() && d_qkv.len() == qkv.len(),
        "gradients have the shapes of forward"
    );
    assert_eq!(scratch.len(), qkv.len(), "the scratch has room for all gradients");
    let width = (shape.group() + 2) * shape.head_dim;
    let mut tasks = Vec::new();
    let mut rest = &mut *scratch;
    for tiles in segments.tiles().chunk_by(|a, b| a.segment == b.segment) {
        let (start, end) = tiles[0].segment;
        // a task per key head, so that no two tasks add to the same gradient and sums keep one order
        for kv_head in 0..shape.kv_heads {
            let (mine, others) = rest.split_at_mut((end - start) * width);
            rest = others;
            tasks.push((tiles, kv_head, mine));
        }
    }
    let saved = ForwardTensors { qkv, log_sums, d_output };
    tasks.into_par_iter().with_max_len(1).for_each_init(
        Scratch::default,
        |scratch, (tiles, kv_head, gradients)| {
            if has_fused() {
                vectorized(
                    #[inline(always)]
                    || run_segment::<F, true>(shape, (segments, tiles), kv_head, &saved, scratch, gradients),
                );
            } else {
                run_segment::<F, false>(shape, (segments, tiles), kv_head, &saved, scratch, gradients);
            }
        },
    );
    deal_out(shape, segments.starts(), scratch, d_qkv);
}

/// Scratch memory for a thread.
#[derive(Default)]
struct Scratch<F> {
    /// Segment key panels.
    keys: Vec<[F; LANES]>,
    /// Head query panels, plain and transposed.
    queries: Vec<[F; LANES]>,
    queries_transposed: Vec<[F; LANES]>,
    /// Output gradient panels, plain and transposed.
    d_output: Vec<[F; LANES]>,
    d_output_transposed: Vec<[F; LANES]>,
    /// Log-sum-exp for each query.
    log_sums: Vec<F>,
    /// Probabilities and score gradients, `[keys, queries]`.
    weights: Vec<F>,
    d_scores: Vec<F>,
}

/// Processes the heads that share the keys of a segment.
#[inline(always)]
fn run_segment<F: Real, const IS_FUSED: bool>(
    shape: &AttentionShape,
    (segments, tiles): (&HostSegments, &[Tile]),
    kv_head: usize,
    saved: &ForwardTensors<'_, F>,
    scratch: &mut Scratch<F>,
    gradients: &mut [F],
) {
    gradients.fill(F::ZERO);
    let (start, end) = tiles[0].segment;
    let heads = kv_head * shape.group()..(kv_head + 1) * shape.group();
    let (_, key, _) = shape.columns(heads.start);
    let keys = Rows { values: &saved.qkv[start * shape.row() + key..], stride: shape.row() };
    keys.pack(end - start, shape.head_dim, &mut scratch.keys);
    for head in heads {
        for &tile in tiles {
            let mask = Mask::new(segments, tile, shape.is_causal);
            run::<F, IS_FUSED>(shape, (tile, &mask), head, saved, scratch, gradients);
        }
    }
}

/// Processes one head in a tile. `gradients` holds the query rows of the group, then key rows, then value
/// rows.
#[inline(always)]
fn run<F: Real, const IS_FUSED: bool>(
    shape: &AttentionShape,
    (tile, mask): (Tile, &Mask),
    head: usize,
    saved: &ForwardTensors<'_, F>,
    scratch: &mut Scratch<F>,
    gradients: &mut [F],
) {
    let (rows, dim) = (tile.rows(), shape.head_dim);
    prepare(shape, tile, head, saved, scratch);
    write_weights::<F, IS_FUSED>(shape, (tile, mask), head, saved.qkv, scratch);
    let width = scores_stride(rows);
    let weights = Rows { values: &scratch.weights[..mask.keys * width], stride: width };
    let d_scores = Rows { values: &scratch.d_scores[..mask.keys * width], stride: width };
    let stride = (shape.group() + 2) * dim;
    // keys in the segment before the first key that the tile sees
    let before = mask.first_key - tile.segment.0;
    let scale = F::from_f64(shape.scale);
    let of_values = (weights, &scratch.d_output[..], (shape.group() + 1) * dim, F::ONE);
    let of_keys = (d_scores, &scratch.queries[..], shape.group() * dim, scale);
    for (left, right, column, factor) in [of_values, of_keys] {
        for first in (0..mask.keys).step_by(ROWS) {
            let (count, (from, behind)) = (ROWS.min(mask.keys - first), mask.panels(first));
            let (from, behind) = (from * LANES, rows.min(behind * LANES));
            let left = left.block(first, mask.keys, rows);
            for (panel, right) in right.chunks_exact(rows).enumerate() {
                let block = times::<F, IS_FUSED>(&left, from, &right[from..behind]);
                let columns = LANES.min(dim - panel * LANES);
                let target = &mut gradients[(before + first) * stride + column + panel * LANES..];
                store(&block, (count, columns), (target, stride), |_, new, to| *to += new * factor);
            }
        }
    }
    let of_queries = (tile.start - tile.segment.0) * stride + head % shape.group() * dim;
    for (panel, keys) in scratch.keys.chunks_exact(tile.segment.1 - tile.segment.0).enumerate() {
        for first in (0..rows).step_by(ROWS) {
            let last = rows.min(first + ROWS) - 1;
            let visible = mask.visible(first, last);
            let d_scores = Rows { values: &scratch.d_scores[visible.start * width..], stride: width };
            let keys = &keys[before + visible.start..before + visible.end];
            let block = d_scores.transposed_times::<IS_FUSED>(first, keys);
            let columns = LANES.min(dim - panel * LANES);
            let target = &mut gradients[of_queries + first * stride + panel * LANES..];
            store(&block, (last + 1 - first, columns), (target, stride), |_, new, to| *to = new * scale);
        }
    }
}

/// Packs tile rows for one head.
#[inline(always)]
fn prepare<F: Real>(
    shape: &AttentionShape,
    tile: Tile,
    head: usize,
    saved: &ForwardTensors<'_, F>,
    scratch: &mut Scratch<F>,
) {
    let (rows, dim) = (tile.rows(), shape.head_dim);
    let (query, _, _) = shape.columns(head);
    let queries = Rows { values: &saved.qkv[tile.start * shape.row() + query..], stride: shape.row() };
    queries.pack(rows, dim, &mut scratch.queries);
    transpose((&scratch.queries, rows), dim, &mut scratch.queries_transposed);
    let d_output = &saved.d_output[tile.start * shape.output() + head * dim..];
    let d_outputs = Rows { values: d_output, stride: shape.output() };
    d_outputs.pack(rows, dim, &mut scratch.d_output);
    transpose((&scratch.d_output, rows), dim, &mut scratch.d_output_transposed);
    let log_sums = grown(&mut scratch.log_sums, scores_stride(rows));
    for (row, log_sum) in log_sums.iter_mut().enumerate().take(rows) {
        *log_sum = saved.log_sums[(tile.start + row) * shape.heads + head];
    }
}

/// Recomputes the unmasked probabilities, and computes their gradients.
#[inline(always)]
fn write_weights<F: Real, const IS_FUSED: bool>(
    shape: &AttentionShape,
    (tile, mask): (Tile, &Mask),
    head: usize,
    qkv: &[F],
    scratch: &mut Scratch<F>,
) {
    let (dim, stride) = (shape.head_dim, shape.row());
    let (_, key, value) = shape.columns(head);
    let scale = F::from_f64(shape.scale);
    let visible = |column: usize| Rows { values: &qkv[mask.first_key * stride + column..], stride };
    let (keys, values) = (visible(key), visible(value));
    let width = scores_stride(tile.rows());
    let weights = grown(&mut scratch.weights, mask.keys * width);
    let d_weights = grown(&mut scratch.d_scores, mask.keys * width);
    for first in (0..mask.keys).step_by(ROWS) {
        let count = ROWS.min(mask.keys - first);
        let (keys, values) = (keys.block(first, mask.keys, dim), values.block(first, mask.keys, dim));
        let queries = scratch.queries_transposed.chunks_exact(dim);
        let panels = queries.zip(scratch.d_output_transposed.chunks_exact(dim)).enumerate();
        let (first_panel, behind) = mask.panels(first);
        for (panel, (queries, d_output)) in panels.take(behind).skip(first_panel) {
            let log_sums = lanes_mut(&mut scratch.log_sums, panel * LANES);
            let mut block = times::<F, IS_FUSED>(&keys, 0, queries);
            for (row, scores) in block.iter_mut().enumerate() {
                for lane in 0..LANES {
                    scores[lane] = (scores[lane] * scale - log_sums[lane]).exp();
                }
                if mask.hides(first + row, panel) {
                    mask.hide(first + row, panel, scores, F::ZERO);
                }
            }
            let at = first * width + panel * LANES;
            store(&block, (count, LANES), (&mut weights[at..], width), |_, new, to| *to = new);
            let mut block = times::<F, IS_FUSED>(&values, 0, d_output);
            for (row, d_weights) in block.iter_mut().enumerate() {
                if mask.hides(first + row, panel) {
                    mask.hide(first + row, panel, d_weights, F::ZERO);
                }
            }
            store(&block, (count, LANES), (&mut d_weights[at..], width), |_, new, to| *to = new);
        }
    }
    for panel in 0..tile.rows().div_ceil(LANES) {
        softmax_backward(panel, mask.written(panel), (weights, d_weights), width);
    }
}

/// Turns the probability gradients of a panel into score gradients: `dS = P (dP - rowsum(P dP))`.
///
/// The sum equals the product of output and output gradient, `rowsum(dO O)`. Computing it from the same terms
/// as the differences makes common parts cancel: a component common to all keys, such as a bias, must not
/// change a query gradient.
#[inline(always)]
fn softmax_backward<F: Real>(panel: usize, keys: Span, (weights, d_weights): (&[F], &mut [F]), width: usize) {
    let (weights, d_weights) = (&weights[keys.start * width..], &mut d_weights[keys.start * width..]);
    let rows = || weights.chunks_exact(width).take(keys.end - keys.start).map(|row| &row[panel * LANES..]);
    let mut sums = [F::ZERO; LANES];
    for (weights, d_weights) in rows().zip(d_weights.chunks_exact(width)) {
        let weights: &[F; LANES] = weights.first_chunk().expect("a whole panel");
        let d_weights: &[F; LANES] = d_weights[panel * LANES..].first_chunk().expect("a whole panel");
        for lane in 0..LANES {
            sums[lane] += weights[lane] * d_weights[lane];
        }
    }
    for (weights, d_weights) in rows().zip(d_weights.chunks_exact_mut(width)) {
        let weights: &[F; LANES] = weights.first_chunk().expect("a whole panel");
        let d_weights = lanes_mut(d_weights, panel * LANES);
        for lane in 0..LANES {
            d_weights[lane] = weights[lane] * (d_weights[lane] - sums[lane]);
        }
    }
}

/// Copies gradients from task order into rows.
fn deal_out<F: Real>(shape: &AttentionShape, segments: &[u32], scratch: &[F], d_qkv: &mut [F]) {
    let (dim, group, stride) = (shape.head_dim, shape.group(), shape.row());
    let width = (group + 2) * dim;
    let rows = chunk_rows(stride);
    d_qkv.par_chunks_mut(rows * stride).enumerate().for_each(|(chunk, d_qkv)| {
        let first = chunk * rows;
        let mut segment = segments.partition_point(|&start| start as usize <= first) - 1;
        for (token, row) in (first..).zip(d_qkv.chunks_mut(stride)) {
            while segments[segment + 1] as usize <= token {
                segment += 1;
            }
            let (start, end) = (segments[segment] as usize, segments[segment + 1] as usize);
            for kv_head in 0..shape.kv_heads {
                let at = start * stride + (kv_head * (end - start) + token - start) * width;
                let (queries, keys_values) = scratch[at..at + width].split_at(group * dim);
                row[kv_head * group * dim..][..group * dim].copy_from_slice(queries);
                let (_, key, value) = shape.columns(kv_head * group);
                row[key..][..dim].copy_from_slice(&keys_values[..dim]);
                row[value..][..dim].copy_from_slice(&keys_values[dim..]);
            }
        }
    });
}
