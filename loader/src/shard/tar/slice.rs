//! Walks an archive in memory or memory-mapped. Payloads are slices into the archive, and copies only where a
//! sparse member has holes.

use std::ops::Range;

use bytes::Bytes;

use super::Entry;
use super::entries::{BlockSource, Entries};
use crate::error::ArchiveFault;

/// Iterates over archive entries with payloads.
///
/// Only touches header blocks; a payload is read from disk when the slice is read. The last good entry is
/// followed by at most one `Err` with the fault offset, then by `None`.
#[derive(Debug)]
pub struct SliceEntries(Entries<Bytes, fn(&Entry) -> u64>);

impl SliceEntries {
    /// Starts at the beginning of `archive`.
    #[must_use]
    pub fn new(archive: Bytes) -> Self {
        Self(Entries::new(archive, |entry| entry.bytes))
    }

    /// Expands sparse members up to this length; longer members have no payload.
    #[must_use]
    pub fn expanding(self, sparse_bytes_max: u64) -> Self {
        Self(self.0.expanding(sparse_bytes_max))
    }
}

impl Iterator for SliceEntries {
    type Item = Result<(Entry, Bytes), ArchiveFault>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

impl BlockSource for Bytes {
    type Fault = ArchiveFault;

    const TAIL_BYTES_MAX: u64 = u64::MAX;

    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&mut self, range: Range<u64>) -> Result<Bytes, ArchiveFault> {
        Ok(self.slice(range.start as usize..range.end as usize))
    }
}
