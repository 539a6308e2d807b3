//! Backward of attention, parallel over segments and key heads.
//!
//! A task owns the gradients of its keys and values and of all queries that read them. Sums run over the
//! heads of the group and over tiles in order.

use rayon::prelude::*;

use super::parallel::{chunk_rows, dot, vectorized};
use super::{AttentionShape, HostSegments, Tile, grown, scores};
use crate::ops::gemm::{GemmShape, MatrixLayout, gemm};
use crate::ops::real::Real;

/// Inputs and outputs of the forward pass.
struct ForwardTensors<'a, F> {
    qkv: &'a [F],
    output: &'a [F],
    log_sums: &'a [F],
    d_output: &'a [F],
}

/// Writes the gradients of queries, keys and values, `[tokens, (heads + 2 * kv_heads) * head_dim]`.
///
/// - `(qkv, output, log_sums)`: inputs and outputs of the forward pass
///
/// `scratch` has the size of `d_qkv`: tasks write their gradients there one after another, before they are
/// copied into rows.
///
/// # Panics
/// If shapes do not agree.
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
    let saved = ForwardTensors { qkv, output, log_sums, d_output };
    tasks.into_par_iter().with_max_len(1).for_each_init(
        || (Vec::new(), Vec::new()),
        |buffers, (tiles, kv_head, gradients)| {
            gradients.fill(F::ZERO);
            for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
                for &tile in tiles {
                    run(shape, tile, head, &saved, buffers, gradients);
                }
            }
        },
    );
    deal_out(shape, segments.starts(), scratch, d_qkv);
}

/// Processes one head of a tile. Rows of `gradients` hold the group's queries, then the keys, then the
/// values.
fn run<F: Real>(
    shape: &AttentionShape,
    tile: Tile,
    head: usize,
    saved: &ForwardTensors<'_, F>,
    (weights, d_weights): &mut (Vec<F>, Vec<F>),
    gradients: &mut [F],
) {
    let (dim, group, keys) = (shape.head_dim, shape.group(), tile.keys(shape.is_causal));
    let weights = grown(weights, tile.rows() * keys);
    let d_weights = grown(d_weights, tile.rows() * keys);
    let (query, key, value) = shape.columns(head);
    let (rows, outputs) = (MatrixLayout::rows(shape.row()), MatrixLayout::rows(shape.output()));
    let first = tile.segment.0 * shape.row();
    let d_output = (saved.d_output, outputs.at(tile.start * shape.output() + head * dim));
    scores(shape, tile, head, saved.qkv, weights);
    let sizes = GemmShape { rows: tile.rows(), columns: keys, inner: dim };
    let values = (saved.qkv, rows.transposed().at(first + value));
    gemm(1, sizes, F::ONE, d_output, values, F::ZERO, (d_weights, MatrixLayout::rows(keys)));
    vectorized(
        #[inline(always)]
        || softmax_backward(shape, tile, head, saved, weights, d_weights),
    );

    let width = (group + 2) * dim;
    let target = MatrixLayout::rows(width);
    let scale = F::from_f64(shape.scale);
    let by_key = GemmShape { rows: keys, columns: dim, inner: tile.rows() };
    let of_keys = MatrixLayout::rows(keys).transposed();
    gemm(1, by_key, F::ONE, (weights, of_keys), d_output, F::ONE, (gradients, target.at((group + 1) * dim)));
    let queries = (saved.qkv, rows.at(tile.start * shape.row() + query));
    gemm(1, by_key, scale, (d_weights, of_keys), queries, F::ONE, (gradients, target.at(group * dim)));
    let by_query = GemmShape { rows: tile.rows(), columns: dim, inner: keys };
    let of_queries = target.at((tile.start - tile.segment.0) * width + head % group * dim);
    let keys_of = (saved.qkv, rows.at(first + key));
    gemm(
        1,
        by_query,
        scale,
        (d_weights, MatrixLayout::rows(keys)),
        keys_of,
        F::ZERO,
        (gradients, of_queries),
    );
}

/// Turns scores into probabilities, and their gradients into gradients of scores:
/// `dS = P (dP - rowsum(dO O))`.
#[inline(always)]
fn softmax_backward<F: Real>(
    shape: &AttentionShape,
    tile: Tile,
    head: usize,
    saved: &ForwardTensors<'_, F>,
    weights: &mut [F],
    d_weights: &mut [F],
) {
    let keys = tile.keys(shape.is_causal);
    for (row, (weights, d_weights)) in weights.chunks_mut(keys).zip(d_weights.chunks_mut(keys)).enumerate() {
        let visible = tile.visible(row, shape.is_causal);
        let token = tile.start + row;
        let log_sum = saved.log_sums[token * shape.heads + head];
        let of_head = token * shape.output() + head * shape.head_dim..;
        let of_head = of_head.start..of_head.start + shape.head_dim;
        let along = dot(&saved.d_output[of_head.clone()], &saved.output[of_head]);
        for (weight, d_weight) in weights[..visible].iter_mut().zip(&mut d_weights[..visible]) {
            *weight = (*weight - log_sum).exp();
            *d_weight = *weight * (*d_weight - along);
        }
        // masked entries take part in the products below
        weights[visible..].fill(F::ZERO);
        d_weights[visible..].fill(F::ZERO);
    }
}

/// Copies gradients from the order of tasks into rows.
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
