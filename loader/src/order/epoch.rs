//! Computes the global sample order, as arithmetic.
//!
//! Measures how well an order is shuffled, against a uniform permutation over the same samples.
//!
//! The sample at position `p` of epoch `e` is a pure function of (fingerprint, seed, epoch, position). It
//! does not depend on ranks, workers or time, so any rank can compute any step, and a position is the
//! complete loader state.
//!
//! A dataset is cut into *blocks* of neighboring samples. An epoch permutes the blocks, joins consecutive
//! blocks into *windows*, and permutes the positions inside each window; [`Shuffle`] sets both sizes. Laying
//! out an epoch is O(blocks); the last few layouts are kept, because the steps in an epoch share a layout.
//!
//! Three statistics, each 1 for a uniform permutation (with many samples) and 0 for index order:
//!
//! - *displacement*: mean distance between a position and the index position of its sample, relative to
//!   `n / 3`, the distance in a uniform permutation;
//! - *shards in a batch*: `(distinct shards per batch - 1)`, relative to the same number for a uniform draw
//!   without replacement;
//! - *separation*: fraction of neighbors in the order that are not neighbors in the index.

use super::blocks::{WINDOW_BYTES, blocks, shard_runs, window_weights};
use crate::dataset::{Dataset, Selection};
use crate::error::{Error, Result};
use dflop_costmodel::random::{Permutation, mix64};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of cached epoch layouts.
const EPOCHS_KEPT: usize = 4;
/// Maximum number of blocks in a dataset: an epoch layout then needs half a gibibyte.
const BLOCKS_MAX: usize = 1 << 24;

type RecentEpochs = VecDeque<(u64, Arc<EpochOrder>)>;

/// Order of the dataset samples in all epochs.
#[derive(Debug, Clone)]
pub struct Order {
    selection: Arc<Selection>,
    blocks: Arc<[Range<u64>]>,
    /// Payload bytes of each block, where blocks of tables are joined to windows of [`WINDOW_BYTES`]; else
    /// empty.
    weights: Arc<[u64]>,
    samples: u64,
    key: u64,
    shuffle: Shuffle,
    /// Layouts of recent epochs, last used first; shared by all clones.
    recent: Arc<Mutex<RecentEpochs>>,
}

impl Order {
    /// Orders the samples in `blocks`, consecutive ranges of sample numbers from 0: blocks are permuted, and
    /// so are the samples inside each.
    ///
    /// # Errors
    /// [`Error::Config`] if the blocks hold no sample.
    pub fn new(blocks: Vec<Range<u64>>, fingerprint: &str, seed: u64) -> Result<Self> {
        let samples = blocks.last().map_or(0, |block| block.end);
        Self::shuffled(Arc::new(Selection::All { samples }), blocks, Shuffle::Global, fingerprint, seed)
    }

    /// Orders the dataset samples. `twins` is the number of earlier datasets in the mixture with the same
    /// samples; each has a separate shuffle.
    ///
    /// # Errors
    /// [`Error::Config`] if the shuffle has too many blocks, or a size is zero.
    pub fn from_dataset(dataset: &Dataset, shuffle: Shuffle, seed: u64, twins: u64) -> Result<Self> {
        shuffle.check()?;
        let shards = shard_runs(dataset.index());
        let seed = if twins == 0 { seed } else { mix64(seed ^ mix64(twins)) };
        let blocks = blocks(dataset.selection(), shuffle, &shards);
        let fingerprint = dataset.index().fingerprint();
        let order = Self::shuffled(dataset.selection().clone(), blocks, shuffle, fingerprint, seed)?;
        Ok(Self { weights: window_weights(dataset, shuffle, &order.blocks, &shards), ..order })
    }

    /// Orders selected samples by `shuffle`; `blocks` are the shuffle blocks, in selection numbers.
    ///
    /// # Errors
    /// [`Error::Config`] if the blocks hold no sample, or are too many.
    pub(super) fn shuffled(
        selection: Arc<Selection>,
        blocks: Vec<Range<u64>>,
        shuffle: Shuffle,
        fingerprint: &str,
        seed: u64,
    ) -> Result<Self> {
        let blocks: Vec<_> = blocks.into_iter().filter(|block| !block.is_empty()).collect();
        let samples = blocks.last().map_or(0, |block| block.end);
        if samples == 0 {
            return Err(Error::Config { setting: "dataset", reason: "it holds no good sample".into() });
        }
        if blocks.len() > BLOCKS_MAX {
            let reason = format!("{} blocks, more than {BLOCKS_MAX}; take larger ones", blocks.len());
            return Err(Error::Config { setting: "block_samples", reason });
        }
        let key = fingerprint.bytes().fold(mix64(seed), |key, byte| mix64(key ^ u64::from(byte)));
        let weights = Arc::new([]);
        Ok(Self { selection, blocks: blocks.into(), weights, samples, key, shuffle, recent: Arc::default() })
    }

    /// Returns the number of samples in an epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Lays out an epoch in O(blocks), or returns a cached layout.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> Arc<EpochOrder> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = recent.iter().position(|(kept, _)| *kept == epoch);
        let entry =
            kept.and_then(|at| recent.remove(at)).unwrap_or_else(|| (epoch, Arc::new(self.lay_out(epoch))));
        let order = entry.1.clone();
        recent.push_front(entry);
        recent.truncate(EPOCHS_KEPT);
        order
    }

    fn lay_out(&self, epoch: u64) -> EpochOrder {
        let key = mix64(self.key ^ mix64(epoch));
        let block_order = Permutation::new(self.blocks.len() as u64, key);
        let mut layout = EpochOrder {
            selection: self.selection.clone(),
            blocks: Vec::new(),
            windows: Vec::new(),
            samples: self.samples,
        };
        let window_blocks = match self.shuffle {
            Shuffle::Blocks { open_blocks, .. } => open_blocks,
            Shuffle::Global | Shuffle::None => 1,
        };
        let (mut start, mut window_start, mut window_key, mut window_bytes) = (0, 0, 0, 0u64);
        for place in 0..self.blocks.len() as u64 {
            let block = if self.shuffle == Shuffle::None { place } else { block_order.at(place) };
            let weight = self.weights.get(block as usize).copied();
            let is_full = match weight {
                Some(weight) => place == 0 || window_bytes.saturating_add(weight) > WINDOW_BYTES,
                None => place % window_blocks == 0,
            };
            if is_full {
                window_bytes = 0;
                layout.push_window(window_start..start, window_key);
                (window_start, window_key) = (start, mix64(key ^ mix64(1 + block)));
            }
            window_bytes = window_bytes.saturating_add(weight.unwrap_or(0));
            let range = &self.blocks[block as usize];
            layout.blocks.push(PlacedBlock { start, first_sample: range.start });
            start += range.end - range.start;
        }
        layout.push_window(window_start..start, window_key);
        if self.shuffle == Shuffle::None {
            layout.windows.clear();
        }
        layout
    }
}

/// Sample order in an epoch.
#[derive(Debug, Clone)]
pub struct EpochOrder {
    selection: Arc<Selection>,
    blocks: Vec<PlacedBlock>,
    /// Empty where positions are not permuted.
    windows: Vec<ShuffleWindow>,
    samples: u64,
}

#[derive(Debug, Clone)]
struct PlacedBlock {
    start: u64,
    first_sample: u64,
}

/// Consecutive placed blocks whose positions are permuted together.
#[derive(Debug, Clone)]
struct ShuffleWindow {
    start: u64,
    scatter: Permutation,
}

impl EpochOrder {
    fn push_window(&mut self, places: Range<u64>, key: u64) {
        let length = places.end - places.start;
        if length > 0 {
            self.windows.push(ShuffleWindow { start: places.start, scatter: Permutation::new(length, key) });
        }
    }

    /// Returns the sample number in the index for a position in the epoch.
    ///
    /// # Panics
    /// If `offset` is not below the number of samples.
    #[must_use]
    pub fn sample_at(&self, offset: u64) -> u64 {
        assert!(offset < self.samples, "offset {offset} is outside an epoch of {}", self.samples);
        let window = self.windows.partition_point(|window| window.start <= offset).checked_sub(1);
        let place = window.map_or(offset, |at| {
            let ShuffleWindow { start, scatter } = &self.windows[at];
            start + scatter.at(offset - start)
        });
        let block = &self.blocks[self.blocks.partition_point(|block| block.start <= place) - 1];
        self.selection.sample_at(block.first_sample + place - block.start)
    }
}

/// Shuffle of the samples in an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shuffle {
    /// All samples together, where every shard is read by range. A compressed shard is read completely, so
    /// where there is one, each shard is a block: shards are permuted, then the samples inside each. Where
    /// there is a table, the blocks of the table are permuted, and samples inside windows of blocks with at
    /// most 128 MiB.
    #[default]
    Global,
    /// For storage that is slow to seek: samples are cut into runs that never cross a shard, the runs are
    /// permuted, and positions are permuted inside windows of consecutive runs. At most `open_blocks` shards
    /// are open at the same time, twice as many where a batch spans two windows. A compressed shard, and a
    /// block of a table, are single runs, whatever the length.
    Blocks {
        /// Maximum number of samples per run.
        block_samples: u64,
        /// Number of runs in a window.
        open_blocks: u64,
    },
    /// Index order.
    None,
}

impl fmt::Display for Shuffle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Global => formatter.write_str("of the whole epoch"),
            Self::Blocks { block_samples, open_blocks } => {
                write!(formatter, "of blocks of {block_samples} samples, {open_blocks} open at once")
            }
            Self::None => formatter.write_str("of nothing"),
        }
    }
}

impl Shuffle {
    /// Checks the sizes.
    pub(crate) fn check(self) -> Result<()> {
        let Self::Blocks { block_samples, open_blocks } = self else { return Ok(()) };
        if block_samples == 0 || open_blocks == 0 {
            let reason = "`block_samples` and `open_blocks` must be at least 1".into();
            return Err(Error::Config { setting: "shuffle", reason });
        }
        Ok(())
    }
}

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
    use super::*;
    use crate::dataset::Selection;
    use crate::order::blocks::{ShardRuns, blocks};
    use proptest::prelude::*;
    use std::ops::Range;
    use std::sync::Arc;

    pub(super) fn shuffled(blocks: Vec<Range<u64>>, shuffle: Shuffle, seed: u64) -> Order {
        let samples = blocks.last().unwrap().end;
        Order::shuffled(Arc::new(Selection::All { samples }), blocks, shuffle, "fingerprint", seed).unwrap()
    }

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
    fn seed_epoch_and_dataset_each_change_the_order() {
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
    fn windows_hold_whole_blocks_and_nothing_else() {
        let blocks = (0..12).map(|block| block * 10..block * 10 + 10).collect();
        let shuffle = Shuffle::Blocks { block_samples: 10, open_blocks: 3 };
        let order = shuffled(blocks, shuffle, 5);
        let epoch = samples(&order, 2);
        for window in epoch.chunks(30) {
            let blocks: std::collections::BTreeSet<u64> = window.iter().map(|sample| sample / 10).collect();
            assert_eq!(blocks.len(), 3, "{window:?}");
        }
        let mut seen = epoch;
        seen.sort_unstable();
        assert_eq!(seen, (0..120).collect::<Vec<_>>());
    }

    #[test]
    fn no_shuffle_is_the_order_of_the_index_in_every_epoch() {
        let order = shuffled(vec![0..7, 7..9], Shuffle::None, 5);
        assert_eq!(samples(&order, 0), (0..9).collect::<Vec<_>>());
        assert_eq!(samples(&order, 4), samples(&order, 0));
    }

    /// Resumed runs rely on these values, so they never change.
    #[test]
    fn the_orders_of_a_seed_are_the_recorded_ones() {
        let blocks = || vec![0..4, 4..9, 9..12];
        let global = Order::new(vec![0..12], "fingerprint", 42).unwrap();
        assert_eq!(samples(&global, 1), [4, 3, 9, 10, 2, 5, 1, 11, 0, 6, 7, 8]);
        let by_shard = Order::new(blocks(), "fingerprint", 42).unwrap();
        assert_eq!(samples(&by_shard, 0), [10, 11, 9, 8, 7, 6, 5, 4, 0, 3, 2, 1]);
        let shuffle = Shuffle::Blocks { block_samples: 5, open_blocks: 2 };
        let windows = shuffled(blocks(), shuffle, 42);
        assert_eq!(samples(&windows, 0), [6, 9, 10, 4, 7, 5, 11, 8, 0, 3, 2, 1]);
    }

    #[test]
    fn a_kept_epoch_is_the_one_that_is_laid_out_again() {
        let order = Order::new(vec![0..50], "f", 3).unwrap();
        let first = samples(&order, 0);
        (1..9).for_each(|epoch| assert_ne!(samples(&order, epoch), first));
        assert_eq!(samples(&order, 0), first);
    }

    #[test]
    fn a_dataset_without_samples_is_refused() {
        assert!(Order::new(vec![0..0], "f", 0).is_err());
    }

    const SHARDS: u64 = 64;
    const PER_SHARD: u64 = 1_000;

    fn quality(shuffle: Shuffle) -> ShuffleQuality {
        let ranges = || (0..SHARDS).map(|shard| shard * PER_SHARD..(shard + 1) * PER_SHARD);
        let shards: Vec<ShardRuns> = ranges().map(ShardRuns::Seekable).collect();
        let selection = Selection::All { samples: SHARDS * PER_SHARD };
        let blocks = blocks(&selection, shuffle, &shards);
        let epoch = Order::shuffled(Arc::new(selection), blocks, shuffle, "f", 1).unwrap().epoch(0);
        let ends: Vec<u64> = ranges().map(|range| range.end).collect();
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
