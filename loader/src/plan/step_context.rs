//! Places of samples in a step whose samples may be split: microbatch, group of ranks, and the ranks that
//! encode the media.

use std::ops::Range;

use dflop_samples::media::Modality;
use serde::{Deserialize, Serialize};

/// Placement of whole and split samples in a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepContext {
    /// Place of every sample, in the order of the samples in the plan.
    pub places: Vec<SamplePlace>,
    /// Predicted times in nanoseconds by rank, microbatch and module.
    pub times_ns: Vec<Vec<Vec<u64>>>,
}

/// Place of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplePlace {
    /// Microbatch, the same on all ranks in the group.
    pub microbatch: usize,
    /// Ranks in the group, one for a whole sample.
    pub ranks: Range<usize>,
    /// Parts of the media, in the order of the media in the sample.
    pub media: Vec<MediumPart>,
}

/// Part of a medium, or an entire medium, and the rank that encodes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MediumPart {
    /// Modality of the medium.
    pub modality: Modality,
    /// Index among the sample's media in this modality, in order of occurrence.
    pub index: u32,
    /// Equal parts of the medium: tiles, frames, or layers of patches.
    pub parts: Range<u64>,
    /// Number of equal parts in the medium; 1 if its positions in the encoder see each other.
    pub parts_in_medium: u64,
    /// Rank that encodes these parts.
    pub rank: usize,
}

impl SamplePlace {
    /// Whether several ranks share the sample.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.ranks.len() > 1
    }

    /// Whether a rank encodes a medium, or a part of one. A medium that is not in the plan is encoded by the
    /// first rank.
    #[must_use]
    pub fn encodes(&self, rank: usize, modality: Modality, index: u32) -> bool {
        let mut own = self.media.iter().filter(|part| (part.modality, part.index) == (modality, index));
        let mut is_planned = false;
        own.any(|part| {
            is_planned = true;
            part.rank == rank
        }) || (!is_planned && rank == self.ranks.start)
    }
}

impl StepContext {
    /// Returns the number of samples that several ranks share.
    #[must_use]
    pub fn split_samples(&self) -> usize {
        self.places.iter().filter(|place| place.is_split()).count()
    }
}

impl MediumPart {
    /// Whether another part is next on the same rank.
    pub(super) fn is_followed_by(&self, next: &Self) -> bool {
        (self.modality, self.index, self.rank, self.parts.end)
            == (next.modality, next.index, next.rank, next.parts.start)
    }
}

/// Cuts parts into at most `pieces` runs whose lengths differ by one at most.
pub(super) fn cuts(parts: u64, pieces: u64) -> impl Iterator<Item = Range<u64>> {
    let pieces = pieces.clamp(1, parts.max(1));
    (0..pieces).map(move |piece| piece * parts / pieces..(piece + 1) * parts / pieces)
}

/// Returns the part of an amount that falls on a run of equal parts; all runs add up to the amount.
pub(super) fn share(amount: u64, parts: &Range<u64>, parts_in_medium: u64) -> u64 {
    let before = |part: u64| u128::from(amount) * u128::from(part) / u128::from(parts_in_medium.max(1));
    (before(parts.end) - before(parts.start)) as u64
}

/// Changes the first values so that a sum is exact.
pub(super) fn match_sum(values: &mut [u64], sum: u64) {
    let own = values.iter().copied().fold(0, u64::saturating_add);
    let (mut missing, mut excess) = (sum.saturating_sub(own), own.saturating_sub(sum));
    for value in values {
        *value = value.saturating_add(std::mem::take(&mut missing));
        let taken = excess.min(*value);
        *value -= taken;
        excess -= taken;
    }
}

/// Returns the tokens of every rank's slice: a split sample is padded to `2 k` equal chunks.
pub(super) fn slice_tokens(tokens: u64, ranks: u64) -> u64 {
    if ranks > 1 { tokens.next_multiple_of(2 * ranks) / ranks } else { tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_matched_from_the_front() {
        for (mut values, sum, expected) in [
            (vec![3, 4], 9, vec![5, 4]),
            (vec![3, 4], 7, vec![3, 4]),
            (vec![1, 4], 3, vec![0, 3]),
            (vec![], 5, vec![]),
        ] {
            match_sum(&mut values, sum);
            assert_eq!(values, expected);
        }
    }

    #[test]
    fn slices_have_two_equal_chunks_a_rank() {
        assert_eq!([1, 8, 9].map(|tokens| slice_tokens(tokens, 4)), [2, 2, 4]);
        assert_eq!(slice_tokens(9, 1), 9);
    }

    #[test]
    fn cuts_cover_all_parts_and_shares_add_up() {
        for parts in 1..40 {
            for pieces in [1, 2, 4, 8] {
                let found: Vec<Range<u64>> = cuts(parts, pieces).collect();
                assert_eq!(found.len() as u64, pieces.min(parts));
                assert!(found.iter().flat_map(Clone::clone).eq(0..parts), "{found:?}");
                let lengths = || found.iter().map(|own| own.end - own.start);
                assert!(lengths().max().unwrap() - lengths().min().unwrap() <= 1);
                assert_eq!(found.iter().map(|own| share(1_003, own, parts)).sum::<u64>(), 1_003);
            }
        }
    }
}
