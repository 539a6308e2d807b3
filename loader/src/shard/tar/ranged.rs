//! Walks an archive that is read by range, and skips unneeded payloads.

use std::io;
use std::ops::Range;

use bytes::Bytes;

use super::header::BLOCK_BYTES;
use super::headers::{Headers, Next};
use super::stream::{StreamFault, TAIL_BYTES_MAX};
use super::{Entry, padded};
use crate::error::{ArchiveFault, TarFault};

/// Returns the number of bytes to read of the payload of an entry.
pub(crate) type Wanted = Box<dyn Fn(&Entry) -> u64 + Send>;

/// Archive that is read by range.
pub(crate) trait Archive {
    /// Returns the length of the archive.
    fn bytes(&self) -> u64;

    /// Reads a range inside the archive.
    fn read(&mut self, range: Range<u64>) -> io::Result<Bytes>;
}

/// Iterates over the entries of an archive with the beginnings of their payloads.
pub(crate) struct RangedEntries<A> {
    pub(crate) archive: A,
    /// Number of bytes to read of a payload.
    wanted: Wanted,
    offset: u64,
    headers: Headers,
    is_done: bool,
}

impl<A: Archive> RangedEntries<A> {
    pub(crate) fn new(archive: A, wanted: Wanted) -> Self {
        Self::starting_at(archive, 0, wanted)
    }

    /// Starts at a header.
    pub(crate) fn starting_at(archive: A, offset: u64, wanted: Wanted) -> Self {
        Self { archive, wanted, offset, headers: Headers::default(), is_done: false }
    }

    fn step(&mut self) -> Result<Option<(Entry, Bytes)>, StreamFault> {
        if self.archive.bytes() == 0 {
            return Err(TarFault::Empty.at(0).into());
        }
        loop {
            let offset = self.offset;
            let Some(block) = self.block_at(offset)? else { return Ok(None) };
            let next = self.headers.block(offset, &block).map_err(|fault| fault.at(offset))?;
            let payload_offset = offset + BLOCK_BYTES as u64;
            match next {
                Next::Entry(entry) => {
                    let passed = self.pass(payload_offset, entry.bytes, offset);
                    passed.map_err(|fault| fault.in_entry(&entry.name, entry.header_offset))?;
                    let wanted = (self.wanted)(&entry).min(entry.bytes);
                    let payload = self.read(payload_offset..payload_offset + wanted)?;
                    return Ok(Some((entry, payload)));
                }
                Next::Extension { bytes } => {
                    self.pass(payload_offset, bytes, offset)?;
                    let payload = self.read(payload_offset..payload_offset + bytes)?;
                    self.headers.extension(&payload).map_err(|fault| fault.at(offset))?;
                }
                Next::Skip { bytes } => self.pass(payload_offset, bytes, offset)?,
                Next::End => return self.check_tail(payload_offset),
            }
        }
    }

    fn read(&mut self, range: Range<u64>) -> Result<Bytes, StreamFault> {
        let offset = range.start;
        self.archive.read(range).map_err(|source| StreamFault::Read { offset, source })
    }

    /// Returns the block at `offset`; `None` if the archive ends without an end marker, which is allowed.
    fn block_at(&mut self, offset: u64) -> Result<Option<[u8; BLOCK_BYTES]>, StreamFault> {
        let rest = self.archive.bytes().saturating_sub(offset);
        if rest == 0 {
            return Ok(None);
        }
        if rest < BLOCK_BYTES as u64 {
            return Err(TarFault::Truncated { missing: BLOCK_BYTES as u64 - rest }.at(offset).into());
        }
        let block = self.read(offset..offset + BLOCK_BYTES as u64)?;
        Ok(block.first_chunk().copied())
    }

    /// Skips a payload and its padding; only padding may be missing at the end.
    fn pass(&mut self, start: u64, bytes: u64, header_offset: u64) -> Result<(), ArchiveFault> {
        let length = self.archive.bytes();
        if start.checked_add(bytes).is_none_or(|end| end > length) {
            let missing = bytes.saturating_sub(length.saturating_sub(start));
            return Err(TarFault::Truncated { missing }.at(header_offset));
        }
        self.offset = start.saturating_add(padded(bytes).unwrap_or(u64::MAX)).min(length);
        Ok(())
    }

    fn check_tail(&mut self, offset: u64) -> Result<Option<(Entry, Bytes)>, StreamFault> {
        let start = offset.min(self.archive.bytes());
        let end = self.archive.bytes().min(start + TAIL_BYTES_MAX);
        let tail = self.read(start..end)?;
        match tail.iter().position(|&byte| byte != 0) {
            Some(position) => Err(TarFault::TrailingBytes.at(start + position as u64).into()),
            None => Ok(None),
        }
    }
}

impl<A: Archive> Iterator for RangedEntries<A> {
    type Item = Result<(Entry, Bytes), StreamFault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let step = self.step().transpose();
        self.is_done = !matches!(step, Some(Ok(_)));
        step
    }
}
