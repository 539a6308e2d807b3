//! Ranged reads of indexed shards.
//!
//! Plain shards are mapped once and read in place. A compressed shard is unpacked whole, so the unpacked bytes
//! are kept for the samples that follow; both caches drop what was used longest ago.

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::io::AsyncReadExt;

use super::{Opened, open, read_error};
use crate::compression::{Compression, decompress};
use crate::error::{Error, Result};
use crate::index::{Index, IndexedShard};

/// Shards that are mapped at the same time; a map costs address space only, but their number is limited.
const MAPPED_SHARDS_MAX: usize = 4_096;

/// Reads ranges of the shards of an index.
#[derive(Debug)]
pub(crate) struct ShardRanges {
    index: std::sync::Arc<Index>,
    mapped: Recent,
    unpacked: Recent,
}

impl ShardRanges {
    /// Keeps at most `unpacked_bytes_max` of unpacked shards, but always the last one.
    pub(crate) fn new(index: std::sync::Arc<Index>, unpacked_bytes_max: u64) -> Self {
        let mapped = Recent::new(MAPPED_SHARDS_MAX as u64, |_| 1);
        Self { index, mapped, unpacked: Recent::new(unpacked_bytes_max, |bytes| bytes.len() as u64) }
    }

    /// Reads `bytes` from `offset` of a shard, both after decompression; blocks on a cold disk.
    ///
    /// # Errors
    /// [`Error::Read`] if the shard cannot be opened or unpacked, [`Error::Index`] if it is shorter than the
    /// index says.
    pub(crate) fn read(&mut self, shard: usize, offset: u64, bytes: u64) -> Result<Bytes> {
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
        let Opened::Mapped(archive) = open(source)? else { return Err(Error::StageEnded { stage: "store" }) };
        let whole = if compression == Compression::None {
            archive
        } else {
            let unpacked = unpack(&archive, &self.index.indexed_shards()[shard]);
            unpacked.map_err(|error| read_error(source, error))?
        };
        recent.put(shard, whole.clone());
        Ok(whole)
    }
}

/// Unpacks a shard up to the end of its last sample: what follows is padding, or no part of the data set.
fn unpack(archive: &Bytes, shard: &IndexedShard) -> std::io::Result<Bytes> {
    let mut unpacked = Vec::with_capacity(shard.unpacked_bytes as usize);
    let reader = decompress(shard.compression, &archive[..]);
    futures::executor::block_on(reader.take(shard.unpacked_bytes).read_to_end(&mut unpacked))?;
    Ok(unpacked.into())
}

/// What was used last, up to a total weight.
#[derive(Debug)]
struct Recent {
    entries: VecDeque<(usize, Bytes)>,
    weight_max: u64,
    weigh: fn(&Bytes) -> u64,
}

impl Recent {
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
        let mut recent = Recent::new(25, |bytes| bytes.len() as u64);
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
