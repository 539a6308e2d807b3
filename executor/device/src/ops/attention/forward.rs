//! Attention forward pass, parallel over query tiles; a tile writes rows for all heads.
//!
//! Visible keys in a tile: unmasked score blocks, and masked scores inside these blocks.

use crate::ops::real::Real;
use crate::segments::{HostSegments, TILE_ROWS_MAX, Tile};
use rayon::prelude::*;
use super::{AttentionShape, grown, scores_stride};
use crate::ops::{has_fused, larger, vectorized};
use super::product::{LANES, ROWS, Rows, lanes_mut, store, times, transpose};

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

/// Maximum number of query panels in a tile.
const PANELS: usize = TILE_ROWS_MAX.div_ceil(LANES);

/// Consecutive keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Span {
    /// First key.
    pub(super) start: usize,
    /// End of the key range (exclusive).
    pub(super) end: usize,
}

impl Span {
    /// Returns the smallest span that contains both spans.
    fn or(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }

    /// Keys that two spans share.
    fn and(self, other: Self) -> Self {
        Self { start: self.start.max(other.start), end: self.end.min(other.end) }
    }

    const fn contains(self, key: usize) -> bool {
        self.start <= key && key < self.end
    }
}

/// Mask for a query tile. Keys count from the first key that any query attends to, queries from the first
/// query in the tile.
pub(super) struct Mask {
    /// First key row.
    pub(super) first_key: usize,
    /// Number of keys from the first to the last that any query attends to.
    pub(super) keys: usize,
    /// Number of query panels.
    panels: usize,
    /// Keys for every query; lanes after the last query repeat the keys of the last query.
    queries: [Span; PANELS * LANES],
    /// Keys with computed scores for a query panel. Includes the keys for [`ROWS`] more queries on both
    /// sides, so that query blocks which do not start with a panel find zeros.
    written: [Span; PANELS],
    /// Keys that all queries in a panel attend to; empty if the span ends before it starts.
    seen: [Span; PANELS],
}

impl Mask {
    pub(super) fn new(segments: &HostSegments, tile: Tile, is_causal: bool) -> Self {
        let rows = tile.rows();
        let keys_of = |query: usize| match segments.ranges() {
            Some(ranges) => {
                let [start, end] = ranges.keys()[tile.start + query];
                Span { start: start as usize, end: end as usize }
            }
            None if is_causal => Span { start: tile.segment.0, end: tile.start + query + 1 },
            None => Span { start: tile.segment.0, end: tile.segment.1 },
        };
        let (first_key, end) = (keys_of(0).start, keys_of(rows - 1).end);
        let panels = rows.div_ceil(LANES);
        let mut queries = [Span::default(); PANELS * LANES];
        for (query, span) in queries.iter_mut().enumerate().take(panels * LANES) {
            let Span { start, end } = keys_of(query.min(rows - 1));
            *span = Span { start: start - first_key, end: end - first_key };
        }
        let mut mask = Self {
            first_key,
            keys: end - first_key,
            panels,
            queries,
            written: [Span::default(); PANELS],
            seen: [Span::default(); PANELS],
        };
        for panel in 0..panels {
            let (first, last) = (panel * LANES, panel * LANES + LANES - 1);
            mask.written[panel] = mask.visible((first + 1).saturating_sub(ROWS), last + ROWS - 1);
            let spans = &mask.queries[first..=last];
            mask.seen[panel] = spans.iter().fold(spans[0], |all, &span| all.and(span));
        }
        mask
    }

    /// Returns the keys that any query in a range attends to. Bounds ascend, so the first and the last query
    /// determine them.
    #[inline(always)]
    pub(super) fn visible(&self, first: usize, last: usize) -> Span {
        let last = last.min(self.panels * LANES - 1);
        self.queries[first].or(self.queries[last])
    }

    /// Returns the query panels with computed scores for a key block: the first panel, and the end of the
    /// panel range.
    #[inline(always)]
    pub(super) fn panels(&self, first_key: usize) -> (usize, usize) {
        let written = &self.written[..self.panels];
        let is_before = |span: &&Span| span.end <= first_key;
        let has_begun = |span: &&Span| span.start < first_key + ROWS;
        (written.iter().take_while(is_before).count(), written.iter().take_while(has_begun).count())
    }

    /// Returns the keys with computed scores for a query panel.
    #[inline(always)]
    pub(super) const fn written(&self, panel: usize) -> Span {
        self.written[panel]
    }

    /// Returns whether a query in a panel does not attend to a key.
    #[inline(always)]
    pub(super) const fn hides(&self, key: usize, panel: usize) -> bool {
        !self.seen[panel].contains(key)
    }

    /// Replaces scores that the queries in the panel must not attend to.
    #[inline(always)]
    pub(super) fn hide<F: Copy>(&self, key: usize, panel: usize, scores: &mut [F; LANES], hidden: F) {
        for (span, score) in self.queries[panel * LANES..].iter().zip(scores) {
            if !span.contains(key) {
                *score = hidden;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::segments::KeyRanges;
    use super::*;

    #[test]
    fn blocks_find_every_score_of_their_queries() {
        // windows with 9 keys, and an image from 100 to 140
        let windows: Vec<[u32; 2]> = (0..150)
            .map(|query: u32| {
                [query.saturating_sub(8), if (100..140).contains(&query) { 140 } else { query + 1 }]
            })
            .collect();
        let causal = HostSegments::new(&[0, 150]);
        for segments in [causal.clone(), causal.ranged(KeyRanges::new(&windows))] {
            for (start, end) in [(0, 1), (0, 65), (64, 128), (70, 150), (131, 140)] {
                let mask = Mask::new(&segments, Tile { segment: (0, 150), start, end }, true);
                let is_written = |key: usize, panel: usize| {
                    let (first, behind) = mask.panels(key / ROWS * ROWS);
                    (first..behind).contains(&panel)
                };
                for query in 0..end - start {
                    let last = (query + ROWS).min(end - start) - 1;
                    let visible = mask.visible(query, last);
                    for key in visible.start..visible.end {
                        for panel in query / LANES..=last / LANES {
                            assert!(is_written(key, panel), "{start} {query} {key}");
                            assert!(mask.written(panel).contains(key));
                        }
                    }
                    let own = mask.visible(query, query);
                    assert!(own.contains(start + query - mask.first_key) && own.end <= mask.keys);
                    for key in 0..mask.keys {
                        let mut score = [1; LANES];
                        if mask.hides(key, query / LANES) {
                            mask.hide(key, query / LANES, &mut score, 0);
                        }
                        assert_eq!(score[query % LANES] == 1, own.contains(key), "{start} {query} {key}");
                    }
                }
            }
        }
    }
}
