//! Slices of a sequence over the ranks of a context-parallel group.
//!
//! The tokens are cut into `2 k` consecutive chunks for `k` ranks, and rank `r` holds the chunks `r` and
//! `2 k - 1 - r` (*zigzag*): an early chunk, whose tokens see few keys, with a late chunk, whose tokens see
//! many. Chunks differ by one token at most. In a *ring*, keys and values pass from rank to rank: in step `j`
//! rank `r` has the keys from rank `r - j`.
//!
//! Attention is counted in *squares*, twice the query-key pairs with half the pair of a token with itself, so
//! that a whole causal sequence with `n` tokens has `n²`. The squares of all slices, and of all ring steps in
//! a slice, add up to exactly that.
//!
//! # Source
//! Zigzag: Brandon et al., "Striped Attention", 2023, arXiv:2311.09431, section 3, on the imbalance of
//! consecutive chunks; Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv:2407.21783, section
//! 3.3.2, on `2 k` chunks. Ring: Liu et al., "Ring Attention", 2023, arXiv:2310.01889.

use std::ops::Range;

use crate::model::WindowedAttention;

/// Zigzag slices of a sequence.
///
/// # Examples
/// ```
/// use dflop_costmodel::flops::ZigzagSlices;
///
/// let slices = ZigzagSlices::new(100, 2);
/// assert_eq!(slices.chunks(0), [0..25, 75..100]);
/// assert_eq!((slices.tokens(0), slices.tokens(1)), (50, 50));
/// assert_eq!(slices.squares(0) + slices.squares(1), 100 * 100);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ZigzagSlices {
    tokens: u32,
    ranks: u32,
}

impl ZigzagSlices {
    /// Cuts `tokens` tokens for `ranks` ranks; 0 ranks count as 1.
    #[must_use]
    pub fn new(tokens: u32, ranks: u32) -> Self {
        Self { tokens, ranks: ranks.max(1) }
    }

    /// Returns the number of tokens in all slices.
    #[must_use]
    pub const fn whole_tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns the number of ranks, at least 1.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the two chunks of a rank, the earlier first; either may be empty.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn chunks(&self, rank: u32) -> [Range<u32>; 2] {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        [rank, 2 * self.ranks - 1 - rank].map(|chunk| self.boundary(chunk)..self.boundary(chunk + 1))
    }

    /// Returns the first token of a chunk: chunks get the remainder one token each, evenly spread.
    fn boundary(self, chunk: u32) -> u32 {
        // Below the number of tokens, so it fits.
        (u64::from(self.tokens) * u64::from(chunk) / (2 * u64::from(self.ranks))) as u32
    }

    /// Returns the number of tokens in a rank's slice.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn tokens(&self, rank: u32) -> u32 {
        self.chunks(rank).iter().map(ExactSizeIterator::len).sum::<usize>() as u32
    }

    /// Returns the tokens in the longest slice.
    #[must_use]
    pub fn tokens_max(&self) -> u32 {
        (0..self.ranks).map(|rank| self.tokens(rank)).max().unwrap_or(0)
    }

    /// Returns the squares of causal attention in a rank's slice, over the keys on all ranks.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn squares(&self, rank: u32) -> u64 {
        self.chunk_squares(rank, |tokens| tokens * tokens)
    }

    /// Returns the squares of causal attention within windows in a rank's slice.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn window_squares(&self, rank: u32, windows: &WindowedAttention) -> u64 {
        self.chunk_squares(rank, |tokens| windows.causal_squares(tokens))
    }

    /// Sums the rows of both chunks, from the squares of all rows before a token.
    fn chunk_squares(self, rank: u32, before: impl Fn(u64) -> u64) -> u64 {
        let chunk = |chunk: Range<u32>| before(chunk.end.into()).saturating_sub(before(chunk.start.into()));
        self.chunks(rank).map(chunk).into_iter().fold(0, u64::saturating_add)
    }

    /// Returns the squares of causal attention in a ring step: between a rank's queries and the keys from the
    /// rank `step` places before it.
    ///
    /// # Panics
    /// If there is no such rank, or `step` is not below the number of ranks.
    #[must_use]
    pub fn ring_squares(&self, rank: u32, step: u32) -> u64 {
        assert!(step < self.ranks, "ring step {step} of {}", self.ranks);
        let source = (rank + self.ranks - step) % self.ranks;
        let mut squares = 0_u64;
        for queries in self.chunks(rank) {
            for keys in self.chunks(source) {
                let pairs = u64::from(queries.end - queries.start) * u64::from(keys.end - keys.start);
                squares += match keys.start.cmp(&queries.start) {
                    _ if keys == queries => pairs,
                    std::cmp::Ordering::Less => 2 * pairs,
                    _ => 0,
                };
            }
        }
        squares
    }

    /// Returns the squares of attention without a mask in a ring step.
    ///
    /// # Panics
    /// As [`Self::ring_squares`].
    #[must_use]
    pub fn unmasked_ring_squares(&self, rank: u32, step: u32) -> u64 {
        assert!(step < self.ranks, "ring step {step} of {}", self.ranks);
        let source = (rank + self.ranks - step) % self.ranks;
        u64::from(self.tokens(rank)) * u64::from(self.tokens(source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LayerSet, Window};

    /// Counts the squares of a mask entry by entry: two for a pair, one for a token with itself.
    fn count(slices: ZigzagSlices, rank: u32, keys_of: Option<u32>, sees: impl Fn(u32, u32) -> bool) -> u64 {
        let is_there =
            |key: u32| keys_of.is_none_or(|of| slices.chunks(of).iter().any(|own| own.contains(&key)));
        let mut squares = 0;
        for query in slices.chunks(rank).into_iter().flatten() {
            for key in (0..slices.tokens).filter(|key| is_there(*key) && sees(query, *key)) {
                squares += if key == query { 1 } else { 2 };
            }
        }
        squares
    }

    fn cases() -> impl Iterator<Item = ZigzagSlices> {
        let tokens = [0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 40, 61];
        tokens.into_iter().flat_map(|tokens| [1, 2, 3, 4, 8].map(|ranks| ZigzagSlices::new(tokens, ranks)))
    }

    #[test]
    fn every_token_is_in_one_slice_and_chunks_differ_by_one() {
        for slices in cases() {
            let mut owners = vec![0; slices.tokens as usize];
            let mut lengths = Vec::new();
            for rank in 0..slices.ranks {
                let chunks = slices.chunks(rank);
                assert_eq!(slices.tokens(rank) as usize, chunks[0].len() + chunks[1].len());
                lengths.extend(chunks.clone().map(|chunk| chunk.len()));
                chunks.into_iter().flatten().for_each(|token| owners[token as usize] += 1);
            }
            assert!(owners.iter().all(|count| *count == 1), "{slices:?}");
            let [least, most] = [lengths.iter().min().unwrap(), lengths.iter().max().unwrap()];
            assert!(most - least <= 1, "{slices:?}: {lengths:?}");
        }
    }

    #[test]
    fn squares_are_those_of_the_causal_mask() {
        for slices in cases() {
            let mut all = 0;
            for rank in 0..slices.ranks {
                let causal = count(slices, rank, None, |query, key| key <= query);
                assert_eq!(slices.squares(rank), causal, "{slices:?} {rank}");
                let by_step = |step: u32| slices.ring_squares(rank, step);
                for step in 0..slices.ranks {
                    let source = (rank + slices.ranks - step) % slices.ranks;
                    let seen = count(slices, rank, Some(source), |query, key| key <= query);
                    assert_eq!(by_step(step), seen, "{slices:?} {rank} {step}");
                }
                assert_eq!((0..slices.ranks).map(by_step).sum::<u64>(), causal);
                all += causal;
            }
            assert_eq!(all, u64::from(slices.tokens).pow(2), "{slices:?}");
        }
    }

    /// A sliding window counts the pair of a token with itself in full, once the window is full
    /// ([`WindowedAttention::causal_squares`]).
    #[test]
    fn windowed_squares_are_those_of_the_windowed_mask() {
        for (kind, window) in [(Window::Sliding, 5_u32), (Window::Sliding, 64), (Window::Chunk, 8)] {
            let windows = WindowedAttention { layers: LayerSet::range(0, 1), tokens: window, kind };
            let sees = |query: u32, key: u32| match kind {
                Window::Sliding => key <= query && query - key < window,
                Window::Chunk => key <= query && query / window == key / window,
            };
            let is_full = |query: &u32| kind == Window::Sliding && *query >= window;
            for slices in cases() {
                for rank in 0..slices.ranks {
                    let full = slices.chunks(rank).into_iter().flatten().filter(is_full).count() as u64;
                    let expected = count(slices, rank, None, sees) + full;
                    assert_eq!(
                        slices.window_squares(rank, &windows),
                        expected,
                        "{windows:?} {slices:?} {rank}"
                    );
                }
            }
        }
    }

    #[test]
    fn zigzag_slices_have_nearly_equal_attention() {
        for ranks in [2, 4, 8] {
            let slices = ZigzagSlices::new(4099, ranks);
            let squares: Vec<u64> = (0..ranks).map(|rank| slices.squares(rank)).collect();
            let [least, most] = [*squares.iter().min().unwrap(), *squares.iter().max().unwrap()];
            // Less than one row of the mask.
            assert!(most - least <= 2 * 4099, "{squares:?}");
        }
    }

    #[test]
    fn unmasked_steps_add_up_to_whole_rows() {
        for slices in cases() {
            for rank in 0..slices.ranks {
                let steps: u64 = (0..slices.ranks).map(|step| slices.unmasked_ring_squares(rank, step)).sum();
                assert_eq!(steps, u64::from(slices.tokens(rank)) * u64::from(slices.tokens), "{slices:?}");
            }
        }
    }
}
