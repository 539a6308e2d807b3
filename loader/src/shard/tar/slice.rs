//! Walks an archive that is in memory or memory-mapped; payloads are slices of it, never copies.

use bytes::Bytes;

use super::header::BLOCK_BYTES;
use super::headers::{Headers, Next};
use super::{Entry, padded};
use crate::error::{ArchiveFault, TarFault};

/// Iterates over the entries of an archive with their payloads.
///
/// Touches header blocks only; a payload is read from disk when its slice is. The last good entry is followed
/// by at most one `Err` with the offset of the fault, then by `None`.
#[derive(Debug)]
pub struct SliceEntries {
    archive: Bytes,
    offset: u64,
    headers: Headers,
    is_done: bool,
}

impl SliceEntries {
    /// Starts at the beginning of `archive`.
    #[must_use]
    pub fn new(archive: Bytes) -> Self {
        Self::starting_at(archive, 0)
    }

    /// Starts at the header at `offset`.
    #[must_use]
    pub fn starting_at(archive: Bytes, offset: u64) -> Self {
        Self { archive, offset, headers: Headers::default(), is_done: false }
    }

    fn step(&mut self) -> Result<Option<(Entry, Bytes)>, ArchiveFault> {
        if self.archive.is_empty() {
            return Err(TarFault::Empty.at(0));
        }
        loop {
            let offset = self.offset;
            let Some(block) = self.block_at(offset)? else { return Ok(None) };
            let next = self.headers.block(offset, &block).map_err(|fault| fault.at(offset))?;
            let payload_offset = offset + BLOCK_BYTES as u64;
            match next {
                Next::Entry(entry) => {
                    let payload = self.payload(payload_offset, entry.bytes, offset);
                    let payload =
                        payload.map_err(|fault| fault.in_entry(&entry.name, entry.header_offset))?;
                    return Ok(Some((entry, payload)));
                }
                Next::Extension { bytes } => {
                    let payload = self.payload(payload_offset, bytes, offset)?;
                    self.headers.extension(&payload).map_err(|fault| fault.at(offset))?;
                }
                Next::Skip { bytes } => drop(self.payload(payload_offset, bytes, offset)?),
                Next::End => return self.check_tail(payload_offset),
            }
        }
    }

    /// Returns the block at `offset`; `None` if the archive ends without an end marker, which is allowed.
    fn block_at(&self, offset: u64) -> Result<Option<[u8; BLOCK_BYTES]>, ArchiveFault> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.archive.len());
        let rest = &self.archive[start..];
        match rest.first_chunk() {
            Some(block) => Ok(Some(*block)),
            None if rest.is_empty() => Ok(None),
            None => Err(TarFault::Truncated { missing: (BLOCK_BYTES - rest.len()) as u64 }.at(offset)),
        }
    }

    /// Returns the payload at `start` and skips its padding; only padding may be missing at the end.
    fn payload(&mut self, start: u64, bytes: u64, header_offset: u64) -> Result<Bytes, ArchiveFault> {
        let end = start.checked_add(bytes);
        let length = self.archive.len() as u64;
        let Some(end) = end.filter(|&end| end <= length) else {
            let missing = bytes.saturating_sub(length.saturating_sub(start));
            return Err(TarFault::Truncated { missing }.at(header_offset));
        };
        self.offset = start.saturating_add(padded(bytes).unwrap_or(u64::MAX)).min(length);
        Ok(self.archive.slice(start as usize..end as usize))
    }

    fn check_tail(&self, offset: u64) -> Result<Option<(Entry, Bytes)>, ArchiveFault> {
        let tail = &self.archive[(offset as usize).min(self.archive.len())..];
        match tail.iter().position(|&byte| byte != 0) {
            Some(position) => Err(TarFault::TrailingBytes.at(offset + position as u64)),
            None => Ok(None),
        }
    }
}

impl Iterator for SliceEntries {
    type Item = Result<(Entry, Bytes), ArchiveFault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let step = self.step().transpose();
        self.is_done = !matches!(step, Some(Ok(_)));
        step
    }
}
