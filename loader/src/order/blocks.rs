//! Cuts datasets into shuffle blocks, along what must be read as a whole: compressed shards and table blocks.

use super::epoch::Shuffle;
use crate::dataset::{Dataset, Selection};
use crate::index::{Index, IndexedBlock, IndexedShard};
use crate::shard::Compression;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Maximum payload size of the table blocks that a global shuffle mixes, except for a single block that
/// exceeds it: readers keep at least twice as many decoded bytes.
pub(super) const WINDOW_BYTES: u64 = 128 << 20;

/// Samples of a shard that are read together, where a part of them cannot be read for less.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ShardRuns {
    /// Every sample is read by range.
    Seekable(Range<u64>),
    /// A compressed shard.
    Whole(Range<u64>),
    /// The blocks of a table, with the payload bytes of each.
    Blocks(Vec<(Range<u64>, u64)>),
}

/// Returns how the shards in an index are read, in sample numbers.
pub(super) fn shard_runs(index: &Index) -> Vec<ShardRuns> {
    let runs = |(shard, indexed): (usize, &IndexedShard)| {
        let range = index.shard_samples(shard);
        match indexed.compression {
            Compression::None => ShardRuns::Seekable(range),
            Compression::Gzip | Compression::Zstd => ShardRuns::Whole(range),
            Compression::Table => {
                let mut start = range.start;
                let block = |block: &IndexedBlock| {
                    let samples = start..start + block.samples;
                    start = samples.end;
                    (samples, block.bytes)
                };
                ShardRuns::Blocks(indexed.blocks.iter().map(block).collect())
            }
        }
    };
    index.indexed_shards().iter().enumerate().map(runs).collect()
}

/// Returns the payload bytes of each shuffle block in a global shuffle with tables; else nothing. A block
/// that is no block of a table fills a window.
pub(super) fn window_weights(
    dataset: &Dataset,
    shuffle: Shuffle,
    blocks: &[Range<u64>],
    shards: &[ShardRuns],
) -> Arc<[u64]> {
    if shuffle != Shuffle::Global || !shards.iter().any(|runs| matches!(runs, ShardRuns::Blocks(_))) {
        return Arc::new([]);
    }
    let selection = dataset.selection();
    let runs = shards.iter().flat_map(|runs| match runs {
        ShardRuns::Seekable(range) | ShardRuns::Whole(range) => vec![(range.clone(), WINDOW_BYTES)],
        ShardRuns::Blocks(blocks) => blocks.clone(),
    });
    let by_start: BTreeMap<u64, u64> = runs
        .filter(|(range, _)| selection.places_below(range.start) < selection.places_below(range.end))
        .map(|(range, bytes)| (selection.places_below(range.start), bytes))
        .collect();
    blocks.iter().map(|block| by_start.get(&block.start).copied().unwrap_or(WINDOW_BYTES)).collect()
}

/// Cuts the selection, in selection numbers, into shuffle blocks. `shards` holds, for every shard in the
/// index, the samples that are read together.
pub(super) fn blocks(selection: &Selection, shuffle: Shuffle, shards: &[ShardRuns]) -> Vec<Range<u64>> {
    let is_seekable = shards.iter().all(|runs| matches!(runs, ShardRuns::Seekable(_)));
    let places = |range: &Range<u64>| selection.places_below(range.start)..selection.places_below(range.end);
    let whole = |runs: &ShardRuns| match runs {
        ShardRuns::Seekable(range) | ShardRuns::Whole(range) => vec![places(range)],
        ShardRuns::Blocks(blocks) => blocks.iter().map(|(range, _)| places(range)).collect(),
    };
    match shuffle {
        Shuffle::None => vec![0..selection.len()],
        Shuffle::Global if is_seekable => vec![0..selection.len()],
        Shuffle::Global => shards.iter().flat_map(whole).collect(),
        Shuffle::Blocks { block_samples, .. } => {
            let runs = shards.iter().flat_map(|runs| {
                let ShardRuns::Seekable(range) = runs else { return whole(runs) };
                let Range { start, end } = places(range);
                let starts = (start..end).step_by(block_samples.max(1) as usize);
                starts.map(|at| at..end.min(at.saturating_add(block_samples))).collect()
            });
            runs.collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_and_the_ranges_that_it_fills_are_cut_alike() {
        let shards = [ShardRuns::Seekable(0..10), ShardRuns::Whole(10..16), ShardRuns::Seekable(16..30)];
        let ranges = Selection::ranges([2..5, 5..5, 12..16, 20..21]);
        let list = Selection::List(vec![2, 3, 4, 12, 13, 14, 15, 20]);
        assert_eq!((ranges.len(), list.len()), (8, 8));
        for place in 0..8 {
            assert_eq!(ranges.sample_at(place), list.sample_at(place));
        }
        for shuffle in [Shuffle::Global, Shuffle::Blocks { block_samples: 2, open_blocks: 1 }, Shuffle::None]
        {
            assert_eq!(blocks(&ranges, shuffle, &shards), blocks(&list, shuffle, &shards), "{shuffle:?}");
        }
        let runs = blocks(&list, Shuffle::Blocks { block_samples: 2, open_blocks: 1 }, &shards);
        assert_eq!(runs, [0..2, 2..3, 3..7, 7..8]);
    }

    #[test]
    fn blocks_of_a_table_are_never_cut() {
        let table = ShardRuns::Blocks(vec![(0..4, 10), (4..4, 0), (4..10, 20)]);
        let shards = [table, ShardRuns::Seekable(10..13)];
        let all = Selection::All { samples: 13 };
        assert_eq!(blocks(&all, Shuffle::Global, &shards), [0..4, 4..4, 4..10, 10..13]);
        let runs = blocks(&all, Shuffle::Blocks { block_samples: 2, open_blocks: 1 }, &shards);
        assert_eq!(runs, [0..4, 4..4, 4..10, 10..12, 12..13]);
    }
}
