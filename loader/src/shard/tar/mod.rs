//! Reads tar archives: entry names, offsets and payloads.
//!
//! Walks an archive in memory or memory-mapped. Payloads are slices into the archive, and copies only where a
//! sparse member has holes.
//!
//! Walks the blocks of an archive: what is at each offset, where it ends, and what is wrong with it.
//!
//! [`SliceEntries`] walks an archive in memory or memory-mapped and returns payloads without a copy,
//! [`stream`] an archive that arrives as bytes. Both use `Walker`, so they accept and reject the same
//! archives. A damaged archive yields the good entries first and then a
//! [`TarFault`]; nothing ends silently. Entries go to [`crate::shard`].
//!
//! `Walker` does no I/O. A reader passes the header block at the current offset, receives what follows, and
//! reports how many of those bytes it found. So every byte source accepts and rejects the same archives, with
//! the same faults at the same offsets. Readers are `entries`, for archives with known length, and
//! [`stream`].

pub(crate) mod entries;
pub(crate) mod header;
pub(crate) mod headers;
pub mod stream;
#[cfg(test)]
mod tests;

use super::compression::{OtherFormat, other_format};
use crate::error::{ArchiveFault, TarFault};
use bytes::Bytes;
use entries::{BlockSource, Entries};
use header::BLOCK_BYTES;
use headers::{Headers, Next};
use std::ops::Range;

pub use header::SparseMap;

/// Regular archive member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Full path inside the archive; bytes that are not UTF-8 are written `\xNN`.
    pub name: String,
    /// Offset of the member's first header block, including extension headers, in bytes.
    pub header_offset: u64,
    /// Offset of the first stored payload byte, in bytes.
    pub payload_offset: u64,
    /// Payload length with holes, in bytes.
    pub bytes: u64,
    /// Holes in a sparse member.
    pub sparse: Option<Box<SparseMap>>,
}

impl Entry {
    /// Returns the offset after the padded payload; `None` if it exceeds 64 bits.
    #[must_use]
    pub fn end_offset(&self) -> Option<u64> {
        self.payload_offset.checked_add(padded(self.stored_bytes())?)
    }

    /// Returns the payload length in the archive, without holes.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.sparse.as_ref().map_or(self.bytes, |sparse| sparse.stored_bytes())
    }
}

/// Rounds `bytes` up to whole blocks.
pub(crate) fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK_BYTES as u64)
}

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

/// Archive position.
#[derive(Debug, Default)]
pub(crate) struct Walker {
    headers: Headers,
    /// Offset of the next byte.
    offset: u64,
    /// Offset of the last header block.
    header_offset: u64,
}

impl Walker {
    /// Starts at the header at `offset`.
    pub(crate) fn starting_at(offset: u64) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Returns the offset of the next byte.
    pub(crate) const fn offset(&self) -> u64 {
        self.offset
    }

    /// Parses the header block at the offset, or the fewer bytes at the archive end.
    ///
    /// Returns `None` where the archive ends without an end marker, which is allowed.
    pub(crate) fn header(&mut self, found: &[u8]) -> Result<Option<Next>, ArchiveFault> {
        self.header_offset = self.offset;
        let Some(block) = found.first_chunk() else {
            return match found.len() {
                0 if self.offset > 0 => Ok(None),
                0 => Err(TarFault::Empty.at(0)),
                bytes => {
                    let truncated = TarFault::Truncated { missing: (BLOCK_BYTES - bytes) as u64 };
                    Err(self.named(truncated, found).at(self.offset))
                }
            };
        };
        let next = self.headers.block(self.offset, block);
        let next = next.map_err(|fault| match fault {
            TarFault::BadChecksum => self.named(fault, block).at(self.offset),
            fault => fault.at(self.offset),
        })?;
        self.offset += BLOCK_BYTES as u64;
        Ok(Some(next))
    }

    /// Returns the fault for a file that is not a tar from the first byte on, by format if known.
    fn named(&self, fault: TarFault, first: &[u8]) -> TarFault {
        let format = other_format(first).filter(|_| self.offset == 0);
        format.map_or(fault, |OtherFormat { name, advice }| TarFault::OtherFormat { format: name, advice })
    }

    /// Moves past an entry payload.
    ///
    /// - `found`: number of payload bytes in the archive, with padding
    pub(crate) fn pass_entry(&mut self, entry: &Entry, found: u64) -> Result<(), ArchiveFault> {
        self.pass(entry.stored_bytes(), found)
            .map_err(|fault| fault.in_entry(&entry.name, entry.header_offset))
    }

    /// Moves past any other payload with `bytes` bytes; only padding may be missing at the end.
    ///
    /// - `found`: number of payload bytes in the archive, with padding
    pub(crate) fn pass(&mut self, bytes: u64, found: u64) -> Result<(), ArchiveFault> {
        self.offset += found;
        match bytes.saturating_sub(found) {
            0 => Ok(()),
            missing => Err(TarFault::Truncated { missing }.at(self.header_offset)),
        }
    }

    /// Parses the last extension's payload, after moving past it; returns what follows if that is not a
    /// header.
    pub(crate) fn extension(&mut self, payload: &[u8]) -> Result<Option<Next>, ArchiveFault> {
        self.headers.extension(self.offset, payload).map_err(|fault| fault.at(self.header_offset))
    }

    /// Checks bytes after the end marker, and moves past them.
    pub(crate) fn tail(&mut self, bytes: &[u8]) -> Result<(), ArchiveFault> {
        if let Some(position) = bytes.iter().position(|&byte| byte != 0) {
            return Err(TarFault::TrailingBytes.at(self.offset + position as u64));
        }
        self.offset += bytes.len() as u64;
        Ok(())
    }
}

/// Returns the padded payload length.
pub(crate) fn with_padding(bytes: u64) -> u64 {
    padded(bytes).unwrap_or(u64::MAX)
}
