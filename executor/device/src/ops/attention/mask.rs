//! Visible keys of a tile: blocks of scores that the mask leaves, and masked scores inside of them.

use super::product::{LANES, ROWS};
use crate::segments::Tile;

/// Mask of a tile of queries. Keys count from the first of the segment, queries from the first of the tile.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    /// Keys before the first query.
    before: usize,
    /// Keys that any query attends to.
    pub(super) keys: usize,
    is_causal: bool,
}

impl Mask {
    pub(super) const fn new(tile: Tile, is_causal: bool) -> Self {
        Self { before: tile.start - tile.segment.0, keys: tile.keys(is_causal), is_causal }
    }

    /// Number of keys that a query attends to.
    #[inline(always)]
    pub(super) fn visible(&self, query: usize) -> usize {
        if self.is_causal { self.before + query + 1 } else { self.keys }
    }

    /// First panel of queries whose scores of a block of keys exist. It reaches [`ROWS`] queries farther than
    /// the mask, so that blocks of queries which do not start with a panel find zeros.
    #[inline(always)]
    pub(super) fn first_panel(&self, first_key: usize) -> usize {
        if self.is_causal { first_key.saturating_sub(self.before + ROWS - 1) / LANES } else { 0 }
    }

    /// Number of keys whose scores of a panel of queries exist.
    #[inline(always)]
    pub(super) fn end(&self, panel: usize) -> usize {
        if self.is_causal { self.keys.min(self.before + (panel + 1) * LANES + ROWS - 1) } else { self.keys }
    }

    /// Number of keys that all queries of a panel attend to.
    #[inline(always)]
    pub(super) fn seen(&self, panel: usize) -> usize {
        if self.is_causal { self.keys.min(self.before + panel * LANES + 1) } else { self.keys }
    }

    /// Replaces what the queries of a panel must not attend to.
    #[inline(always)]
    pub(super) fn hide<F: Copy>(&self, key: usize, panel: usize, scores: &mut [F; LANES], hidden: F) {
        for (lane, score) in scores.iter_mut().enumerate() {
            if key >= self.visible(panel * LANES + lane) {
                *score = hidden;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_find_every_score_up_to_the_last_key_of_their_queries() {
        for (start, end) in [(0, 1), (0, 65), (64, 128), (70, 150), (131, 140)] {
            let mask = Mask::new(Tile { segment: (0, 150), start, end }, true);
            let is_written = |key: usize, panel: usize| panel >= mask.first_panel(key / ROWS * ROWS);
            for query in 0..end - start {
                let last = (query + ROWS).min(end - start) - 1;
                for key in 0..mask.visible(last) {
                    assert!(is_written(key, query / LANES), "{start} {query} {key}");
                    assert!(key < mask.end(query / LANES));
                }
                assert!(mask.seen(query / LANES) <= mask.visible(query).max(1));
            }
        }
    }
}
