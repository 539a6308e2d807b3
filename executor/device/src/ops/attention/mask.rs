//! Visible keys in a tile: unmasked score blocks, and masked scores inside these blocks.

use super::product::{LANES, ROWS};
use crate::segments::{HostSegments, TILE_ROWS_MAX, Tile};

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
    use super::*;
    use crate::segments::KeyRanges;

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
