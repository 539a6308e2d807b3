//! Walks an archive that is read by range, and skips unneeded payloads.

use std::io;
use std::ops::Range;

use bytes::Bytes;

use super::Entry;
use super::entries::{BlockSource, Entries};
use super::stream::{StreamFault, TAIL_BYTES_MAX};

/// Returns the number of payload bytes to read for an entry.
pub(crate) type Wanted = Box<dyn Fn(&Entry) -> u64 + Send>;

/// Iterates over archive entries with payload beginnings.
pub(crate) type RangedEntries<A> = Entries<A, Wanted>;

/// Archive that is read by range.
pub(crate) trait Archive {
    /// Returns the archive length in bytes.
    fn bytes(&self) -> u64;

    /// Reads a range inside the archive.
    fn read(&mut self, range: Range<u64>) -> io::Result<Bytes>;
}

impl<A: Archive> BlockSource for A {
    type Fault = StreamFault;

    const TAIL_BYTES_MAX: u64 = TAIL_BYTES_MAX;

    fn bytes(&self) -> u64 {
        Archive::bytes(self)
    }

    fn read(&mut self, range: Range<u64>) -> Result<Bytes, StreamFault> {
        let offset = range.start;
        Archive::read(self, range).map_err(|source| StreamFault::Read { offset, source })
    }
}
