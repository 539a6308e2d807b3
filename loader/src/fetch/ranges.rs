//! Reads ranges from indexed shards.
//!
//! Plain local shards are opened once and read by range. A compressed shard is decompressed as a whole, so
//! the result is kept for later samples; both caches evict the least recently used entry. The remote shard
//! ranges that a step needs are fetched beforehand, by [`remote`](super::remote), all in parallel.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use futures::future::try_join_all;

use super::field_range::FieldRange;
use super::remote::{IndexedRemote, WantedRanges, Whole, unpack};
use crate::error::{Error, Result, StorageError};
use crate::index::{Index, IndexedShard, identity_of_file, is_version};
use crate::shard::Compression;
use crate::store::{Identity, LocalShard, Opened};

/// Maximum number of open shards; the operating system limits the files and maps per process.
const OPEN_SHARDS_MAX: u64 = 64;
/// Operating system error code for too many open files in a process.
const TOO_MANY_FILES: i32 = 24;

/// Reads ranges from the shards in an index.
#[derive(Debug)]
pub(crate) struct ShardRanges {
    index: Arc<Index>,
    /// Number of retried requests.
    retries: Arc<AtomicU64>,
    open: RecentShards<LocalShard>,
    unpacked: RecentShards<Bytes>,
    /// Remote fields that the next step reads, by shard, offset and length.
    fetched: HashMap<(usize, u64, u64), Bytes>,
}

impl ShardRanges {
    /// Keeps at most `unpacked_bytes_max` bytes in decompressed shards, but always the last shard.
    pub(crate) fn new(index: Arc<Index>, unpacked_bytes_max: u64, retries: Arc<AtomicU64>) -> Self {
        let open = RecentShards::new(OPEN_SHARDS_MAX, |_| 1);
        let unpacked = RecentShards::new(unpacked_bytes_max, |bytes: &Bytes| bytes.len() as u64);
        Self { index, retries, open, unpacked, fetched: HashMap::new() }
    }

    /// Returns whether a shard must be fetched before it is read.
    fn is_remote(&self, shard: usize) -> bool {
        self.index.shards()[shard].remote().is_some()
    }

    /// Fetches the ranges to read from remote shards, by shard, offset and length.
    ///
    /// # Errors
    /// [`Error::Storage`] with the shard and the offset that could not be read.
    pub(crate) async fn fetch(&mut self, wanted: Vec<(usize, u64, u64)>) -> Result<()> {
        let mut by_shard: HashMap<usize, Vec<(u64, u64)>> = HashMap::new();
        for (shard, offset, bytes) in wanted {
            by_shard.entry(shard).or_default().push((offset, bytes));
        }
        let fetches = by_shard.into_iter().map(|(number, ranges)| {
            let shard = &self.index.shards()[number];
            let known = self.index.indexed_shards()[number].clone();
            let whole = self.open.get(number).or_else(|| self.unpacked.get(number).map(LocalShard::Mapped));
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
                Some(Whole::Kept(whole)) => self.open.put(number, whole),
                Some(Whole::Unpacked(whole)) => self.unpacked.put(number, whole),
                None => {}
            }
            let fields = fetched.fields.into_iter();
            self.fetched.extend(fields.map(|((offset, bytes), field)| ((number, offset, bytes), field)));
        }
        Ok(())
    }

    /// Drops the fetched fields; samples keep separate references.
    pub(crate) fn forget_fetched(&mut self) {
        self.fetched.clear();
    }

    /// Reads `bytes` bytes at `offset` in a shard, both after decompression; blocks on a cold disk.
    ///
    /// # Errors
    /// [`Error::Storage`] if the shard cannot be opened, read or decompressed, or has changed since it was
    /// indexed.
    pub(crate) fn read(&mut self, shard: usize, offset: u64, bytes: u64) -> Result<Bytes> {
        if self.is_remote(shard) {
            let fetched = self.fetched.get(&(shard, offset, bytes)).cloned();
            return fetched.ok_or(Error::StageEnded { stage: "store" });
        }
        let whole = match self.index.indexed_shards()[shard].compression {
            Compression::None => self.opened(shard)?,
            _ => LocalShard::Mapped(self.unpacked(shard)?),
        };
        whole.read(offset, bytes).map_err(|error| self.index.shards()[shard].read_error(error))
    }

    /// Reads a field, and checks that the shard has the field there; blocks on a cold disk.
    ///
    /// # Errors
    /// The same errors as [`Self::read`]; [`Error::Storage`] if the shard has a different field there.
    pub(crate) fn read_field(
        &mut self,
        shard: usize,
        range: FieldRange,
        key: &str,
        extension: &str,
    ) -> Result<Bytes> {
        let (offset, bytes) = range.with_headers();
        let read = self.read(shard, offset, bytes)?;
        let headers = range.header_bytes as usize;
        let checked = range.check(&read[..headers], key, extension);
        checked.map_err(|error| self.index.shards()[shard].read_error(error))?;
        Ok(read.slice(headers..))
    }

    /// Returns an open shard; opens it if needed.
    fn opened(&mut self, shard: usize) -> Result<LocalShard> {
        if let Some(open) = self.open.get(shard) {
            return Ok(open);
        }
        let source = &self.index.shards()[shard];
        let opened = match source.open() {
            Err(Error::Storage(StorageError::Read { source: error, .. }))
                if error.raw_os_error() == Some(TOO_MANY_FILES) =>
            {
                self.open.clear();
                source.open()
            }
            opened => opened,
        };
        let Opened::Local(open) = opened? else { return Err(Error::StageEnded { stage: "store" }) };
        // After the file is open: its path then shows the opened version or a later version.
        let (indexed, found) = (&self.index.indexed_shards()[shard], identity_of_file(source)?);
        if open.bytes() != found.bytes || !is_version(indexed, &found) {
            return Err(source.read_error(changed(indexed, &found)));
        }
        self.open.put(shard, open.clone());
        Ok(open)
    }

    /// Returns a decompressed shard; decompresses it if needed.
    fn unpacked(&mut self, shard: usize) -> Result<Bytes> {
        if let Some(unpacked) = self.unpacked.get(shard) {
            return Ok(unpacked);
        }
        let body = self.opened(shard)?.body();
        let failure = body.failure();
        let unpacked = unpack(body, &self.index.indexed_shards()[shard]);
        let failed = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let unpacked = failed.map_or(unpacked, Err);
        let unpacked = unpacked.map_err(|error| self.index.shards()[shard].read_error(error))?;
        self.unpacked.put(shard, unpacked.clone());
        Ok(unpacked)
    }
}

/// Returns the error for a shard whose version differs from the indexed version.
fn changed(indexed: &IndexedShard, found: &Identity) -> std::io::Error {
    let how = if indexed.bytes == found.bytes {
        "it was written to".to_owned()
    } else {
        format!("it had {} bytes and has {}", indexed.bytes, found.bytes)
    };
    let reason = format!("it has changed since it was indexed: {how}");
    std::io::Error::new(std::io::ErrorKind::InvalidData, reason)
}

/// Least-recently-used cache, up to a total weight.
#[derive(Debug)]
struct RecentShards<T> {
    entries: VecDeque<(usize, T)>,
    weight_max: u64,
    weigh: fn(&T) -> u64,
}

impl<T: Clone> RecentShards<T> {
    fn new(weight_max: u64, weigh: fn(&T) -> u64) -> Self {
        Self { entries: VecDeque::new(), weight_max, weigh }
    }

    fn get(&mut self, shard: usize) -> Option<T> {
        let at = self.entries.iter().position(|(held, _)| *held == shard)?;
        let entry = self.entries.remove(at)?;
        let held = entry.1.clone();
        self.entries.push_front(entry);
        Some(held)
    }

    fn put(&mut self, shard: usize, held: T) {
        self.entries.retain(|(other, _)| *other != shard);
        self.entries.push_front((shard, held));
        let mut weight: u64 = self.entries.iter().map(|(_, held)| (self.weigh)(held)).sum();
        while weight > self.weight_max && self.entries.len() > 1 {
            weight -= self.entries.pop_back().map_or(0, |(_, held)| (self.weigh)(&held));
        }
    }

    fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_shard_is_dropped_first() {
        let mut recent = RecentShards::new(25, |bytes: &Bytes| bytes.len() as u64);
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
