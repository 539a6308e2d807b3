//! Reads ranges of indexed shards.
//!
//! Plain local shards are mapped once and read in place. A compressed shard is decompressed as a whole, so
//! the result is kept for later samples; both caches evict the least recently used entry. The ranges that a
//! step needs of remote shards are fetched beforehand, by [`remote`](super::remote), all in parallel.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use futures::future::try_join_all;
use tokio::io::{AsyncBufRead, AsyncReadExt};

use super::remote::{IndexedRemote, WantedRanges};
use crate::error::{Error, Result};
use crate::index::{Index, IndexedShard};
use crate::shard::{Compression, decompress};
use crate::store::Opened;

/// Shards mapped at the same time; maps only cost address space, but the system limits their number.
const MAPPED_SHARDS_MAX: usize = 4_096;

/// Reads ranges of the shards of an index.
#[derive(Debug)]
pub(crate) struct ShardRanges {
    index: Arc<Index>,
    /// Number of retried requests.
    retries: Arc<AtomicU64>,
    mapped: RecentShards,
    unpacked: RecentShards,
    /// Fields of remote shards that the next step reads, by shard, offset and length.
    fetched: HashMap<(usize, u64, u64), Bytes>,
}

impl ShardRanges {
    /// Keeps at most `unpacked_bytes_max` of decompressed shards, but always the last one.
    pub(crate) fn new(index: Arc<Index>, unpacked_bytes_max: u64, retries: Arc<AtomicU64>) -> Self {
        let mapped = RecentShards::new(MAPPED_SHARDS_MAX as u64, |_| 1);
        let unpacked = RecentShards::new(unpacked_bytes_max, |bytes| bytes.len() as u64);
        Self { index, retries, mapped, unpacked, fetched: HashMap::new() }
    }

    /// Returns whether a shard must be fetched before it is read.
    fn is_remote(&self, shard: usize) -> bool {
        self.index.shards()[shard].remote().is_some()
    }

    /// Fetches what will be read of remote shards, by shard, offset and length.
    ///
    /// # Errors
    /// [`Error::Read`] with the shard and the offset that could not be read.
    pub(crate) async fn fetch(&mut self, wanted: Vec<(usize, u64, u64)>) -> Result<()> {
        let mut by_shard: HashMap<usize, Vec<(u64, u64)>> = HashMap::new();
        for (shard, offset, bytes) in wanted {
            by_shard.entry(shard).or_default().push((offset, bytes));
        }
        let fetches = by_shard.into_iter().map(|(number, ranges)| {
            let shard = &self.index.shards()[number];
            let known = self.index.indexed_shards()[number].clone();
            let whole = self.mapped.get(number).or_else(|| self.unpacked.get(number));
            let object = shard.remote().map(|object| object.clone().counted_by(self.retries.clone()));
            async move {
                let object = object.ok_or(Error::StageEnded { stage: "store" })?;
                let wanted = WantedRanges { ranges, whole };
                let fetched = IndexedRemote { object, known }.fetch(wanted).await;
                Ok::<_, Error>((number, fetched.map_err(|source| shard.read_error(source))?))
            }
        });
        let all = try_join_all(fetches.collect::<Vec<_>>()).await?;
        self.fetched.clear();
        for (number, fetched) in all {
            match fetched.whole {
                Some(whole) if fetched.is_mapped => self.mapped.put(number, whole),
                Some(whole) => self.unpacked.put(number, whole),
                None => {}
            }
            let fields = fetched.fields.into_iter();
            self.fetched.extend(fields.map(|((offset, bytes), field)| ((number, offset, bytes), field)));
        }
        Ok(())
    }

    /// Drops the fetched fields; samples keep their own references.
    pub(crate) fn forget_fetched(&mut self) {
        self.fetched.clear();
    }

    /// Reads `bytes` from `offset` of a shard, both after decompression; blocks on a cold disk.
    ///
    /// # Errors
    /// [`Error::Read`] if the shard cannot be opened or decompressed, [`Error::Index`] if it is shorter than
    /// in the index.
    pub(crate) fn read(&mut self, shard: usize, offset: u64, bytes: u64) -> Result<Bytes> {
        if self.is_remote(shard) {
            let fetched = self.fetched.get(&(shard, offset, bytes)).cloned();
            return fetched.ok_or(Error::StageEnded { stage: "store" });
        }
        let whole = self.whole(shard)?;
        let end = offset.checked_add(bytes).filter(|&end| end <= whole.len() as u64);
        let end = end.ok_or_else(|| Error::Index {
            path: self.index.path().map_or_else(|| "in memory".into(), |path| path.display().to_string()),
            reason: format!(
                "shard `{}` ends before offset {offset} + {bytes}; it changed while it was read",
                self.index.shards()[shard].url
            ),
        })?;
        Ok(whole.slice(offset as usize..end as usize))
    }

    fn whole(&mut self, shard: usize) -> Result<Bytes> {
        let compression = self.index.indexed_shards()[shard].compression;
        let recent = if compression == Compression::None { &mut self.mapped } else { &mut self.unpacked };
        if let Some(whole) = recent.get(shard) {
            return Ok(whole);
        }
        let source = &self.index.shards()[shard];
        let Opened::Mapped(archive) = source.open()? else {
            return Err(Error::StageEnded { stage: "store" });
        };
        let whole = if compression == Compression::None {
            archive
        } else {
            let unpacked = unpack(&archive[..], &self.index.indexed_shards()[shard]);
            unpacked.map_err(|error| source.read_error(error))?
        };
        recent.put(shard, whole.clone());
        Ok(whole)
    }
}

/// Decompresses a shard up to the end of its last sample; the rest is padding, or not part of the dataset.
pub(super) fn unpack(
    archive: impl AsyncBufRead + Send + Unpin,
    shard: &IndexedShard,
) -> std::io::Result<Bytes> {
    let mut unpacked = Vec::with_capacity(shard.unpacked_bytes as usize);
    let reader = decompress(shard.compression, archive);
    futures::executor::block_on(reader.take(shard.unpacked_bytes).read_to_end(&mut unpacked))?;
    Ok(unpacked.into())
}

/// Least-recently-used cache, up to a total weight.
#[derive(Debug)]
struct RecentShards {
    entries: VecDeque<(usize, Bytes)>,
    weight_max: u64,
    weigh: fn(&Bytes) -> u64,
}

impl RecentShards {
    fn new(weight_max: u64, weigh: fn(&Bytes) -> u64) -> Self {
        Self { entries: VecDeque::new(), weight_max, weigh }
    }

    fn get(&mut self, shard: usize) -> Option<Bytes> {
        let at = self.entries.iter().position(|(held, _)| *held == shard)?;
        let entry = self.entries.remove(at)?;
        let bytes = entry.1.clone();
        self.entries.push_front(entry);
        Some(bytes)
    }

    fn put(&mut self, shard: usize, bytes: Bytes) {
        self.entries.retain(|(held, _)| *held != shard);
        self.entries.push_front((shard, bytes));
        let mut weight: u64 = self.entries.iter().map(|(_, bytes)| (self.weigh)(bytes)).sum();
        while weight > self.weight_max && self.entries.len() > 1 {
            weight -= self.entries.pop_back().map_or(0, |(_, bytes)| (self.weigh)(&bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_shard_is_dropped_first() {
        let mut recent = RecentShards::new(25, |bytes| bytes.len() as u64);
        let ten = Bytes::from_static(b"0123456789");
        recent.put(0, ten.clone());
        recent.put(1, ten.clone());
        assert!(recent.get(0).is_some());
        recent.put(2, ten.clone());
        assert!(recent.get(1).is_none() && recent.get(0).is_some() && recent.get(2).is_some());
        recent.put(3, Bytes::from(vec![0; 100]));
        assert!(recent.get(3).is_some() && recent.get(0).is_none());
    }
}
