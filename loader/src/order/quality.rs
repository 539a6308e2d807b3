//! Measures how well an order is shuffled, against a uniform permutation over the same samples.
//!
//! Three statistics, each 1 for a uniform permutation (with many samples) and 0 for index order:
//!
//! - *displacement*: mean distance between a position and the index position of its sample, relative to
//!   `n / 3`, the distance in a uniform permutation;
//! - *shards in a batch*: `(distinct shards per batch - 1)`, relative to the same number for a uniform draw
//!   without replacement;
//! - *separation*: fraction of neighbors in the order that are not neighbors in the index.

use std::collections::{BTreeMap, BTreeSet};

use super::epoch::{Order, Shuffle};
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Maximum number of measured positions; in a longer epoch, batches are measured at even distances.
const POSITIONS_MAX: u64 = 1 << 22;

/// Statistics for an epoch.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct ShuffleQuality {
    /// Number of samples per epoch.
    pub samples: u64,
    /// Number of measured positions.
    pub positions: u64,
    /// Number of samples per batch.
    pub batch: u64,
    /// Mean distance between a position and the sample's index position, relative to `n / 3`.
    pub displacement: f64,
    /// Mean number of distinct shards per batch.
    pub batch_shards: f64,
    /// Expected `batch_shards` for a uniform draw.
    pub batch_shards_uniform: f64,
    /// `(batch_shards - 1) / (batch_shards_uniform - 1)`; 1 where a uniform draw uses one shard as well.
    pub shard_spread: f64,
    /// Fraction of neighbors in the order that are neighbors in the index; `2 / n` for a uniform permutation.
    pub index_neighbors: f64,
}

impl ShuffleQuality {
    /// Measures a dataset epoch in batches with `batch` samples.
    ///
    /// # Errors
    /// [`Error::Config`] if `batch` is zero, or if the shuffle does not fit the dataset.
    pub fn of(dataset: &Dataset, shuffle: Shuffle, seed: u64, epoch: u64, batch: u64) -> Result<Self> {
        if batch == 0 {
            return Err(Error::Config { setting: "batch", reason: "must be at least 1".into() });
        }
        let order = Order::from_dataset(dataset, shuffle, seed, 0)?.epoch(epoch);
        let shard_ends: Vec<u64> = (0..dataset.index().shards().len())
            .map(|shard| dataset.places_below(dataset.index().shard_samples(shard).end))
            .collect();
        Ok(Self::measure(|position| dataset.places_below(order.sample_at(position)), &shard_ends, batch))
    }

    /// Measures an order. `place_at(position)` is a sample's index position, which is below the last entry in
    /// `shard_ends`, the ascending shard ends.
    ///
    /// # Panics
    /// If there is no sample, or `batch` is zero.
    #[must_use]
    pub fn measure(place_at: impl Fn(u64) -> u64, shard_ends: &[u64], batch: u64) -> Self {
        let samples = shard_ends.last().copied().unwrap_or(0);
        assert!(samples > 0 && batch > 0, "an order has samples and a batch has some");
        let batch = batch.min(samples);
        let batches = samples / batch;
        let stride = (batches * batch).div_ceil(POSITIONS_MAX).max(1);
        let (mut positions, mut distance, mut shards, mut pairs, mut neighbors) =
            (0u64, 0u128, 0u64, 0u64, 0u64);
        let measured = (0..batches).step_by(stride as usize);
        let counted = batches.div_ceil(stride) as f64;
        for start in measured.map(|number| number * batch) {
            let mut seen = BTreeSet::new();
            let mut previous: Option<u64> = None;
            for position in start..start + batch {
                let place = place_at(position);
                positions += 1;
                distance += u128::from(place.abs_diff(position));
                seen.insert(shard_ends.partition_point(|&end| end <= place));
                pairs += u64::from(previous.is_some());
                neighbors += u64::from(previous.is_some_and(|previous| previous.abs_diff(place) == 1));
                previous = Some(place);
            }
            shards += seen.len() as u64;
        }
        let batch_shards = shards as f64 / counted;
        let batch_shards_uniform = uniform_shards(shard_ends, batch);
        let is_spread = batch_shards_uniform > 1.0;
        Self {
            samples,
            positions,
            batch,
            displacement: distance as f64 / positions as f64 / (samples as f64 / 3.0),
            batch_shards,
            batch_shards_uniform,
            shard_spread: if is_spread { (batch_shards - 1.0) / (batch_shards_uniform - 1.0) } else { 1.0 },
            index_neighbors: neighbors as f64 / pairs.max(1) as f64,
        }
    }
}

/// Expected number of distinct shards among `batch` samples drawn without replacement: a shard with `k` of
/// `n` samples is missed with probability `C(n - k, batch) / C(n, batch)`.
fn uniform_shards(shard_ends: &[u64], batch: u64) -> f64 {
    let samples = shard_ends.last().copied().unwrap_or(0);
    let starts = [0].iter().chain(shard_ends);
    let mut shards_by_size = BTreeMap::<u64, u64>::new();
    for (end, start) in shard_ends.iter().zip(starts).filter(|(end, start)| end > start) {
        *shards_by_size.entry(end - start).or_default() += 1;
    }
    let missed = |size: u64| -> f64 {
        let factor = |drawn: u64| (samples - size).saturating_sub(drawn) as f64 / (samples - drawn) as f64;
        (0..batch)
            .map(factor)
            .take_while(|&factor| factor > 0.0)
            .chain((batch > samples - size).then_some(0.0))
            .product()
    };
    shards_by_size.iter().map(|(&size, &shards)| shards as f64 * (1.0 - missed(size))).sum()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use super::*;
    use crate::dataset::Selection;
    use crate::order::epoch::blocks;

    const SHARDS: u64 = 64;
    const PER_SHARD: u64 = 1_000;

    fn quality(shuffle: Shuffle) -> ShuffleQuality {
        let shards: Vec<(Range<u64>, bool)> =
            (0..SHARDS).map(|shard| (shard * PER_SHARD..(shard + 1) * PER_SHARD, false)).collect();
        let selection = Selection::All { samples: SHARDS * PER_SHARD };
        let blocks = blocks(&selection, shuffle, &shards);
        let epoch = Order::shuffled(Arc::new(selection), blocks, shuffle, "f", 1).unwrap().epoch(0);
        let ends: Vec<u64> = shards.iter().map(|(range, _)| range.end).collect();
        ShuffleQuality::measure(|position| epoch.sample_at(position), &ends, 32)
    }

    #[test]
    fn the_global_shuffle_is_as_good_as_a_uniform_permutation() {
        let ShuffleQuality { displacement, shard_spread, index_neighbors, .. } = quality(Shuffle::Global);
        assert!((displacement - 1.0).abs() < 0.02, "{displacement}");
        assert!((shard_spread - 1.0).abs() < 0.02, "{shard_spread}");
        assert!(index_neighbors < 0.001, "{index_neighbors}");
    }

    #[test]
    fn windows_of_blocks_displace_as_far_and_keep_a_stated_spread() {
        let quality = quality(Shuffle::Blocks { block_samples: 100, open_blocks: 32 });
        let ShuffleQuality { displacement, batch_shards, shard_spread, index_neighbors, .. } = quality;
        assert!((displacement - 1.0).abs() < 0.1, "{displacement}");
        // 32 of 640 blocks, from about 25 of the 64 shards, are open: a batch of 32 meets about 17 of the 25.
        assert!(shard_spread > 0.6 && shard_spread < 0.9 && batch_shards <= 32.0, "{quality:?}");
        assert!(index_neighbors < 0.002, "{index_neighbors}");
    }

    #[test]
    fn the_order_of_the_index_is_no_shuffle() {
        let quality = quality(Shuffle::None);
        assert!(quality.displacement == 0.0 && quality.index_neighbors > 0.999, "{quality:?}");
        assert!(quality.shard_spread < 0.01, "{quality:?}");
    }

    #[test]
    fn the_shards_of_a_uniform_draw_are_those_of_the_hypergeometric_distribution() {
        // Two of {a a b}: one shard with probability 1/3, two with 2/3.
        assert!((uniform_shards(&[2, 3], 2) - 5.0 / 3.0).abs() < 1e-12);
        assert!((uniform_shards(&[5, 10, 15], 15) - 3.0).abs() < 1e-12);
    }
}
