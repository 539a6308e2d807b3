//! The global order of samples, as arithmetic.
//!
//! Which sample stands at position `p` of epoch `e` is a pure function of (fingerprint, seed, epoch, position).
//! It knows nothing of ranks, workers or time, so any rank can compute any step, and a position is the whole
//! state of a loader.
//!
//! Samples are permuted as one block where every shard is read by range. Where some are compressed, and so
//! read whole, each shard is a block: shards are permuted, then the samples inside each.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::permutation::{Permutation, mix64};

/// The order of a data set's samples in all epochs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    blocks: Vec<Range<u64>>,
    samples: u64,
    key: u64,
}

impl Order {
    /// Orders the samples in `blocks`, ranges of sample numbers that follow each other from 0.
    ///
    /// # Errors
    /// [`Error::Config`] if the blocks hold no sample.
    pub fn new(blocks: Vec<Range<u64>>, fingerprint: &str, seed: u64) -> Result<Self> {
        let blocks: Vec<_> = blocks.into_iter().filter(|block| !block.is_empty()).collect();
        let samples = blocks.last().map_or(0, |block| block.end);
        if samples == 0 {
            return Err(Error::Config { setting: "data set", reason: "it holds no good sample".into() });
        }
        let key = fingerprint.bytes().fold(mix64(seed), |key, byte| mix64(key ^ u64::from(byte)));
        Ok(Self { blocks, samples, key })
    }

    /// Returns the number of samples of an epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Lays out one epoch: O(blocks), independent of the number of samples.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> EpochOrder {
        let key = mix64(self.key ^ mix64(epoch));
        let block_order = Permutation::new(self.blocks.len() as u64, key);
        let mut start = 0;
        let placed = (0..self.blocks.len() as u64).map(|place| {
            let block = block_order.at(place);
            let range = &self.blocks[block as usize];
            let length = range.end - range.start;
            let within = Permutation::new(length, mix64(key ^ mix64(1 + block)));
            let placed = PlacedBlock { start, first_sample: range.start, within };
            start += length;
            placed
        });
        EpochOrder { blocks: placed.collect(), samples: self.samples }
    }
}

/// The order of one epoch.
#[derive(Debug, Clone)]
pub struct EpochOrder {
    blocks: Vec<PlacedBlock>,
    samples: u64,
}

#[derive(Debug, Clone)]
struct PlacedBlock {
    start: u64,
    first_sample: u64,
    within: Permutation,
}

impl EpochOrder {
    /// Returns the number of the sample at a position of the epoch.
    ///
    /// # Panics
    /// If `offset` is not below the number of samples.
    #[must_use]
    pub fn sample_at(&self, offset: u64) -> u64 {
        assert!(offset < self.samples, "offset {offset} is outside an epoch of {}", self.samples);
        let block = &self.blocks[self.blocks.partition_point(|block| block.start <= offset) - 1];
        block.first_sample + block.within.at(offset - block.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples(order: &Order, epoch: u64) -> Vec<u64> {
        let epoch = order.epoch(epoch);
        (0..order.samples()).map(|offset| epoch.sample_at(offset)).collect()
    }

    proptest! {
        #[test]
        fn an_epoch_visits_every_sample_once(lengths in prop::collection::vec(0u64..40, 1..9), seed: u64) {
            let mut start = 0;
            let blocks = lengths.iter().map(|length| { start += length; start - length..start }).collect();
            prop_assume!(start > 0);
            let order = Order::new(blocks, "f", seed).unwrap();
            let mut seen = samples(&order, 3);
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..start).collect::<Vec<_>>());
        }
    }

    #[test]
    fn seed_epoch_and_data_set_each_change_the_order() {
        let order = |fingerprint, seed| Order::new(vec![0..50], fingerprint, seed).unwrap();
        let first = samples(&order("a", 0), 0);
        assert_eq!(first, samples(&order("a", 0), 0));
        for other in [samples(&order("a", 1), 0), samples(&order("a", 0), 1), samples(&order("b", 0), 0)] {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn blocks_stay_together() {
        let order = Order::new(vec![0..10, 10..20, 20..30], "f", 5).unwrap();
        for chunk in samples(&order, 0).chunks(10) {
            assert!(chunk.iter().all(|sample| sample / 10 == chunk[0] / 10), "{chunk:?}");
        }
    }

    #[test]
    fn a_data_set_without_samples_is_refused() {
        assert!(Order::new(vec![0..0], "f", 0).is_err());
    }
}
