//! Iterates over the entries in an archive with known length: in memory, memory-mapped, or read by range.

use std::io;
use std::ops::Range;

use bytes::Bytes;

use super::header::BLOCK_BYTES;
use super::headers::Next;
use super::stream::{StreamFault, TAIL_BYTES_MAX};
use super::{Entry, Walker, with_padding};
use crate::error::ArchiveFault;

/// Source of archive bytes, by offset.
pub(crate) trait BlockSource {
    /// Reason why a walk ends early.
    type Fault: From<ArchiveFault>;

    /// Maximum number of bytes after the end marker that are searched for unexpected data.
    const TAIL_BYTES_MAX: u64;

    /// Returns the archive length in bytes.
    fn bytes(&self) -> u64;

    /// Reads a range inside the archive.
    fn read(&mut self, range: Range<u64>) -> Result<Bytes, Self::Fault>;
}

/// Iterator over archive entries with payload beginnings.
///
/// The last good entry is followed by at most one `Err`, then by `None`.
#[derive(Debug)]
pub(crate) struct Entries<S, W> {
    pub(crate) archive: S,
    /// Returns the number of payload bytes to read.
    wanted: W,
    walker: Walker,
    /// Maximum length of an expanded sparse member, in bytes.
    sparse_bytes_max: u64,
    is_done: bool,
}

impl<S: BlockSource, W: Fn(&Entry) -> u64> Entries<S, W> {
    pub(crate) fn new(archive: S, wanted: W) -> Self {
        Self::starting_at(archive, 0, wanted)
    }

    /// Starts at a header.
    pub(crate) fn starting_at(archive: S, offset: u64, wanted: W) -> Self {
        let walker = Walker::starting_at(offset);
        Self { archive, wanted, walker, sparse_bytes_max: u64::MAX, is_done: false }
    }

    /// Expands sparse members up to this length; longer members have no payload.
    pub(crate) fn expanding(self, sparse_bytes_max: u64) -> Self {
        Self { sparse_bytes_max, ..self }
    }

    fn step(&mut self) -> Result<Option<(Entry, Bytes)>, S::Fault> {
        let mut announced = None;
        loop {
            let next = if let Some(next) = announced.take() {
                next
            } else {
                let block = self.read_up_to(BLOCK_BYTES as u64)?;
                let Some(next) = self.walker.header(&block)? else { return Ok(None) };
                next
            };
            let payload = self.walker.offset();
            match next {
                Next::Entry(entry) => {
                    self.walker.pass_entry(&entry, self.rest_up_to(with_padding(entry.stored_bytes())))?;
                    let payload = self.read_payload(&entry)?;
                    return Ok(Some((entry, payload)));
                }
                Next::Extension { bytes } => {
                    self.walker.pass(bytes, self.rest_up_to(with_padding(bytes)))?;
                    let records = self.archive.read(payload..payload + bytes)?;
                    announced = self.walker.extension(&records)?;
                }
                Next::Skip { bytes } => {
                    self.walker.pass(bytes, self.rest_up_to(with_padding(bytes)))?;
                }
                Next::End => {
                    let tail = self.read_up_to(S::TAIL_BYTES_MAX)?;
                    self.walker.tail(&tail)?;
                    return Ok(None);
                }
            }
        }
    }

    /// Reads the wanted beginning of a payload.
    fn read_payload(&mut self, entry: &Entry) -> Result<Bytes, S::Fault> {
        let wanted = (self.wanted)(entry).min(entry.bytes);
        let start = entry.payload_offset;
        match &entry.sparse {
            None => self.archive.read(start..start + wanted),
            Some(map) if wanted == 0 || map.fault().is_some() || entry.bytes > self.sparse_bytes_max => {
                Ok(Bytes::new())
            }
            Some(map) => Ok(map.expand(&self.archive.read(start..start + map.stored_bytes())?, wanted)),
        }
    }

    /// Reads the next bytes, fewer at the archive end.
    fn read_up_to(&mut self, bytes: u64) -> Result<Bytes, S::Fault> {
        match self.rest_up_to(bytes) {
            0 => Ok(Bytes::new()),
            bytes => self.archive.read(self.walker.offset()..self.walker.offset() + bytes),
        }
    }

    /// Returns the number of bytes from the offset to the archive end, at most `bytes`.
    fn rest_up_to(&self, bytes: u64) -> u64 {
        self.archive.bytes().saturating_sub(self.walker.offset()).min(bytes)
    }
}

impl<S: BlockSource, W: Fn(&Entry) -> u64> Iterator for Entries<S, W> {
    type Item = Result<(Entry, Bytes), S::Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let step = self.step().transpose();
        self.is_done = !matches!(step, Some(Ok(_)));
        step
    }
}

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
