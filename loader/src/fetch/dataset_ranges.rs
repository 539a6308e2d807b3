//! Reads ranges from the shards of several datasets, which share open shards where they have the same index.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::try_join_all;

use super::ranges::{FieldRange, ShardRanges};
use crate::dataset::Dataset;
use crate::error::Result;
use crate::flow::Metrics;
use crate::index::Index;
use crate::shard::Shard;

/// Fields to fetch from remote shards and tables, by dataset: shard and range.
pub(crate) type WantedFields = Vec<Vec<(usize, FieldRange)>>;

/// Shard ranges by dataset.
#[derive(Debug)]
pub(crate) struct DatasetRanges {
    /// By index.
    ranges: Vec<ShardRanges>,
    /// Index position, by dataset.
    positions: Vec<usize>,
    /// Number of each index's first shard among all shards.
    shard_starts: Vec<usize>,
}

impl DatasetRanges {
    /// Opens nothing yet.
    ///
    /// - `unpacked_bytes_max`: maximum size of kept decompressed shards over all datasets, in bytes
    pub(crate) fn new(datasets: &[Dataset], unpacked_bytes_max: u64, metrics: &Metrics) -> Self {
        let (indexes, positions) = distinct_indexes(datasets);
        let unpacked_bytes_max = unpacked_bytes_max / indexes.len().max(1) as u64;
        let (mut ranges, mut shard_starts, mut shards) = (Vec::new(), Vec::new(), 0usize);
        for index in indexes {
            shard_starts.push(shards);
            shards += index.shards().len();
            ranges.push(ShardRanges::new(index.clone(), unpacked_bytes_max, metrics.retries()));
        }
        Self { ranges, positions, shard_starts }
    }

    /// Returns the number of a dataset shard in [`distinct_shards`].
    pub(crate) fn shard_number(&self, dataset: usize, shard: usize) -> usize {
        self.shard_starts[self.positions[dataset]] + shard
    }

    /// Fetches remote fields and table rows in parallel; the bytes are kept until [`Self::forget_fetched`],
    /// or the next fetch.
    ///
    /// # Errors
    /// See [`ShardRanges::fetch`].
    pub(crate) async fn fetch(&mut self, wanted: WantedFields) -> Result<()> {
        let mut by_index = vec![Vec::new(); self.ranges.len()];
        for (position, mut fields) in self.positions.iter().zip(wanted) {
            by_index[*position].append(&mut fields);
        }
        let fetches = self.ranges.iter_mut().zip(by_index).filter(|(_, wanted)| !wanted.is_empty());
        try_join_all(fetches.map(|(ranges, wanted)| ranges.fetch(wanted))).await?;
        Ok(())
    }

    /// Reads a field, and checks that the shard has the field there; blocks on a cold disk.
    ///
    /// # Errors
    /// See [`ShardRanges::read_field`].
    pub(crate) fn read_field(
        &mut self,
        (dataset, shard): (usize, usize),
        range: FieldRange,
        key: &str,
        extension: &str,
    ) -> Result<Bytes> {
        self.ranges[self.positions[dataset]].read_field(shard, range, key, extension)
    }

    /// Drops the fetched fields; samples keep separate references.
    pub(crate) fn forget_fetched(&mut self) {
        self.ranges.iter_mut().for_each(ShardRanges::forget_fetched);
    }
}

/// Returns the indexes of datasets, each once, and for each dataset the position in this list.
fn distinct_indexes(datasets: &[Dataset]) -> (Vec<&Arc<Index>>, Vec<usize>) {
    let mut indexes: Vec<&Arc<Index>> = Vec::new();
    let mut positions = Vec::with_capacity(datasets.len());
    for dataset in datasets {
        let known = indexes.iter().position(|index| Arc::ptr_eq(index, dataset.index()));
        positions.push(known.unwrap_or(indexes.len()));
        if known.is_none() {
            indexes.push(dataset.index());
        }
    }
    (indexes, positions)
}

/// Returns the shards of datasets, index after index, each index once.
pub(crate) fn distinct_shards(datasets: &[Dataset]) -> Vec<Shard> {
    distinct_indexes(datasets).0.into_iter().flat_map(|index| index.shards()).cloned().collect()
}
