//! Forward of attention, parallel over tiles of queries; a tile writes its rows for all heads.

use rayon::prelude::*;

use super::parallel::{max, vectorized};
use super::{AttentionShape, HostSegments, Tile, grown, scores};
use crate::ops::gemm::{GemmShape, MatrixLayout, gemm};
use crate::ops::real::Real;

/// Writes the output, `[tokens, heads * head_dim]`, and the log-sum-exp of every row, `[tokens, heads]`.
///
/// # Panics
/// If shapes do not agree.
pub fn forward<F: Real>(
    shape: &AttentionShape,
    segments: &HostSegments,
    qkv: &[F],
    output: &mut [F],
    log_sums: &mut [F],
) {
    shape.check(segments, qkv, output, log_sums);
    let mut tasks = Vec::new();
    let (mut output, mut log_sums) = (output, log_sums);
    for &tile in segments.tiles() {
        let (rows, rest) = output.split_at_mut(tile.rows() * shape.output());
        let (sums, rest_of_sums) = log_sums.split_at_mut(tile.rows() * shape.heads);
        (output, log_sums) = (rest, rest_of_sums);
        tasks.push((tile, rows, sums));
    }
    // tiles near the end of a segment have more keys: let threads steal single tiles
    tasks.into_par_iter().with_max_len(1).for_each_init(Vec::new, |buffer, (tile, rows, sums)| {
        for head in 0..shape.heads {
            run(shape, tile, head, qkv, buffer, rows, sums);
        }
    });
}

/// Processes one head of a tile.
fn run<F: Real>(
    shape: &AttentionShape,
    tile: Tile,
    head: usize,
    qkv: &[F],
    buffer: &mut Vec<F>,
    output: &mut [F],
    log_sums: &mut [F],
) {
    let keys = tile.keys(shape.is_causal);
    let weights = grown(buffer, tile.rows() * keys);
    scores(shape, tile, head, qkv, weights);
    vectorized(
        #[inline(always)]
        || {
            for (row, weights) in weights.chunks_mut(keys).enumerate() {
                let (visible, unseen) = weights.split_at_mut(tile.visible(row, shape.is_causal));
                log_sums[row * shape.heads + head] = softmax(visible);
                // masked entries take part in the product with the values
                unseen.fill(F::ZERO);
            }
        },
    );
    let (_, _, value) = shape.columns(head);
    let sizes = GemmShape { rows: tile.rows(), columns: shape.head_dim, inner: keys };
    let values = (qkv, MatrixLayout::rows(shape.row()).at(tile.segment.0 * shape.row() + value));
    let target = MatrixLayout::rows(shape.output()).at(head * shape.head_dim);
    gemm(1, sizes, F::ONE, (weights, MatrixLayout::rows(keys)), values, F::ZERO, (output, target));
}

/// Turns scores into probabilities and returns their log-sum-exp.
#[inline(always)]
fn softmax<F: Real>(row: &mut [F]) -> F {
    let most = max(row);
    for value in row.iter_mut() {
        *value = (*value - most).exp();
    }
    let sum = super::parallel::sum(row);
    let inverse = F::ONE / sum;
    for value in row.iter_mut() {
        *value *= inverse;
    }
    most + F::from_f64(libm::log(sum.to_f64()))
}
