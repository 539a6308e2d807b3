//! Attention forward pass, parallel over query tiles; a tile writes rows for all heads.

use rayon::prelude::*;

use super::mask::{Mask, Span};
use super::parallel::{has_fused, larger, vectorized};
use super::product::{LANES, ROWS, Rows, lanes_mut, store, times, transpose};
use super::{AttentionShape, HostSegments, Tile, grown, scores_stride};
use crate::ops::real::Real;

/// Number of keys whose weights are summed before the partial sum is added to the total.
const SUMMED_KEYS: usize = 64;

/// Writes the output, `[tokens, heads * head_dim]`, and the log-sum-exp for every row, `[tokens, heads]`.
///
/// # Panics
/// If shapes do not match.
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
    // tiles near the segment end have more keys: let threads steal single tiles
    tasks.into_par_iter().with_max_len(1).for_each_init(Scratch::default, |scratch, (tile, rows, sums)| {
        if has_fused() {
            vectorized(
                #[inline(always)]
                || run::<F, true>(shape, (segments, tile), qkv, scratch, rows, sums),
            );
        } else {
            run::<F, false>(shape, (segments, tile), qkv, scratch, rows, sums);
        }
    });
}

/// Scratch memory for a thread.
#[derive(Default)]
struct Scratch<F> {
    /// Head query panels, plain and transposed.
    queries: Vec<[F; LANES]>,
    queries_transposed: Vec<[F; LANES]>,
    /// Value panels.
    values: Vec<[F; LANES]>,
    /// Scores, then weights, `[keys, queries]`.
    scores: Vec<F>,
    /// Weight sums per query.
    sums: Vec<F>,
}

/// Processes a tile.
#[inline(always)]
fn run<F: Real, const IS_FUSED: bool>(
    shape: &AttentionShape,
    (segments, tile): (&HostSegments, Tile),
    qkv: &[F],
    scratch: &mut Scratch<F>,
    output: &mut [F],
    log_sums: &mut [F],
) {
    let mask = &Mask::new(segments, tile, shape.is_causal);
    let (rows, dim, stride) = (tile.rows(), shape.head_dim, shape.row());
    for head in 0..shape.heads {
        let (query, key, value) = shape.columns(head);
        let visible = |column: usize| Rows { values: &qkv[mask.first_key * stride + column..], stride };
        if head.is_multiple_of(shape.group()) {
            visible(value).pack(mask.keys, dim, &mut scratch.values);
        }
        let queries = Rows { values: &qkv[tile.start * stride + query..], stride };
        queries.pack(rows, dim, &mut scratch.queries);
        transpose((&scratch.queries, rows), dim, &mut scratch.queries_transposed);
        let width = scores_stride(rows);
        let scores = grown(&mut scratch.scores, mask.keys * width);
        write_scores::<F, IS_FUSED>(mask, visible(key), &scratch.queries_transposed, shape, (scores, width));
        let sums = grown(&mut scratch.sums, width);
        for panel in 0..rows.div_ceil(LANES) {
            let logs = softmax(mask, panel, (scores, width), lanes_mut(sums, panel * LANES));
            for (row, log) in (panel * LANES..rows).zip(logs) {
                log_sums[row * shape.heads + head] = log;
            }
        }
        for (panel, values) in scratch.values.chunks_exact(mask.keys).enumerate() {
            for first in (0..rows).step_by(ROWS) {
                let last = rows.min(first + ROWS) - 1;
                let keys = mask.visible(first, last);
                let weights = Rows { values: &scores[keys.start * width..], stride: width };
                let block = weights.transposed_times::<IS_FUSED>(first, &values[keys.start..keys.end]);
                let columns = panel * LANES..dim.min((panel + 1) * LANES);
                let target = &mut output[first * shape.output() + head * dim + columns.start..];
                let put = |row: usize, new: F, to: &mut F| *to = new / sums[first + row];
                store(&block, (last + 1 - first, columns.len()), (target, shape.output()), put);
            }
        }
    }
}

/// Writes the unmasked scores, `[keys, queries]`.
#[inline(always)]
fn write_scores<F: Real, const IS_FUSED: bool>(
    mask: &Mask,
    keys: Rows<'_, F>,
    queries: &[[F; LANES]],
    shape: &AttentionShape,
    (scores, width): (&mut [F], usize),
) {
    let scale = F::from_f64(shape.scale);
    for first in (0..mask.keys).step_by(ROWS) {
        let count = ROWS.min(mask.keys - first);
        let block_of_keys = keys.block(first, mask.keys, shape.head_dim);
        let (first_panel, behind) = mask.panels(first);
        let panels = queries.chunks_exact(shape.head_dim).enumerate();
        for (panel, queries) in panels.take(behind).skip(first_panel) {
            let block = times::<F, IS_FUSED>(&block_of_keys, 0, queries);
            let target = &mut scores[first * width + panel * LANES..];
            store(&block, (count, LANES), (target, width), |_, new, to| *to = new * scale);
        }
    }
}

/// Turns the scores for a query panel into weights and returns the log-sum-exp. The probabilities are weights
/// divided by `sums`.
#[inline(always)]
fn softmax<F: Real>(
    mask: &Mask,
    panel: usize,
    (scores, width): (&mut [F], usize),
    sums: &mut [F; LANES],
) -> [F; LANES] {
    let Span { start, end } = mask.written(panel);
    let least = -F::ONE / F::ZERO;
    for key in (start..end).filter(|&key| mask.hides(key, panel)) {
        mask.hide(key, panel, lanes_mut(scores, key * width + panel * LANES), least);
    }
    let mut most = [least; LANES];
    for row in scores.chunks_exact(width).take(end).skip(start) {
        let row: &[F; LANES] = row[panel * LANES..].first_chunk().expect("a whole panel");
        for lane in 0..LANES {
            most[lane] = larger(most[lane], row[lane]);
        }
    }
    *sums = [F::ZERO; LANES];
    for first in (start..end).step_by(SUMMED_KEYS) {
        let mut some = [F::ZERO; LANES];
        for key in first..end.min(first + SUMMED_KEYS) {
            let row = lanes_mut(scores, key * width + panel * LANES);
            for lane in 0..LANES {
                row[lane] = (row[lane] - most[lane]).exp();
                some[lane] += row[lane];
            }
        }
        for lane in 0..LANES {
            sums[lane] += some[lane];
        }
    }
    for key in (start..end).filter(|&key| mask.hides(key, panel)) {
        mask.hide(key, panel, lanes_mut(scores, key * width + panel * LANES), F::ZERO);
    }
    for lane in 0..LANES {
        most[lane] += F::from_f64(libm::log(sums[lane].to_f64()));
    }
    most
}
