//! Reads the headers of a shard at many offsets in parallel.
//!
//! A chain of tar headers must be followed one by one, unless the starts of several chains are known: then
//! all of them are followed together, one round of ranges at a time. Every chain must end exactly where the
//! next one starts. Since the first starts at 0, the entries equal those of a single chain from 0, whatever
//! the source of the starts: a wrong start makes the walk fail, but never gives wrong entries.

use std::ops::Range;

use bytes::Bytes;

use crate::shard::tar::header::BLOCK_BYTES;
use crate::shard::tar::headers::{Headers, Next};
use crate::shard::tar::{Entry, padded};
use crate::store::LocalShard;

/// Most ranges per request.
const RANGES_MAX: usize = 4_096;
/// Length of the ranges in which the bytes after the end marker are read.
const TAIL_RANGE_BYTES: u64 = 1 << 20;

/// Shard that is read by ranges.
pub trait ByteRanges {
    /// Returns the length of the shard.
    fn bytes(&self) -> u64;

    /// Reads ranges inside the shard; returns one piece per range, of the same length. A remote store reads
    /// them in parallel.
    ///
    /// # Errors
    /// The error of the store.
    fn read(&mut self, ranges: &[Range<u64>]) -> std::io::Result<Vec<Bytes>>;
}

impl ByteRanges for LocalShard {
    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }

    fn read(&mut self, ranges: &[Range<u64>]) -> std::io::Result<Vec<Bytes>> {
        let piece = |range: &Range<u64>| Self::read(self, range.start, range.end.saturating_sub(range.start));
        ranges.iter().map(piece).collect()
    }
}

impl ByteRanges for Bytes {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&mut self, ranges: &[Range<u64>]) -> std::io::Result<Vec<Bytes>> {
        let piece = |range: &Range<u64>| {
            let is_inside = range.start <= range.end && range.end <= self.len() as u64;
            let outside = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            is_inside.then(|| self.slice(range.start as usize..range.end as usize)).ok_or_else(outside)
        };
        ranges.iter().map(piece).collect()
    }
}

/// Reads all entries of a shard, following a chain of headers from 0 and from each of `starts`.
///
/// # Errors
/// The reason why the starts do not match the shard, or why the shard itself is damaged; reading it from its
/// start then gives the accurate error.
pub(crate) fn walk_entries(starts: &[u64], shard: &mut dyn ByteRanges) -> Result<Vec<Entry>, String> {
    let mut chains = chains(starts, shard.bytes())?;
    let mut unfinished: Vec<usize> = (0..chains.len()).collect();
    while !unfinished.is_empty() {
        for round in unfinished.chunks(RANGES_MAX) {
            let ranges: Vec<Range<u64>> = round.iter().map(|&at| chains[at].wanted()).collect();
            let pieces = shard.read(&ranges).map_err(|error| format!("read failed: {error}"))?;
            for ((&at, range), piece) in round.iter().zip(&ranges).zip(&pieces) {
                chains[at].take(range.start, piece)?;
            }
        }
        unfinished.retain(|&at| !chains[at].is_finished());
    }
    if let Some(end_mark) = chains.last().and_then(|chain| chain.end_mark) {
        check_tail(end_mark, shard)?;
    }
    Ok(chains.into_iter().flat_map(|chain| chain.entries).collect())
}

fn chains(starts: &[u64], shard_bytes: u64) -> Result<Vec<Chain>, String> {
    if shard_bytes == 0 {
        return Err("the shard is empty".to_owned());
    }
    let mut begins = vec![0];
    begins.extend(starts.iter().copied().filter(|&start| start != 0 && start != shard_bytes));
    if let Some(odd) = begins.iter().find(|start| **start > shard_bytes || **start % BLOCK_BYTES as u64 != 0)
    {
        return Err(format!("{odd} is not the offset of a header in a shard of {shard_bytes} bytes"));
    }
    if !begins.is_sorted_by(|earlier, later| earlier < later) {
        return Err("the offsets must ascend".to_owned());
    }
    let ends = begins.iter().skip(1).copied().chain([shard_bytes]);
    Ok(begins.iter().zip(ends).map(|(&begin, end)| Chain::new(begin, end, shard_bytes)).collect())
}

/// Chain of headers, and the position up to which it was followed.
struct Chain {
    at: u64,
    end: u64,
    shard_bytes: u64,
    headers: Headers,
    /// Length of the extension payload to read next.
    extension_bytes: Option<u64>,
    end_mark: Option<u64>,
    entries: Vec<Entry>,
}

impl Chain {
    fn new(at: u64, end: u64, shard_bytes: u64) -> Self {
        let (headers, entries) = (Headers::default(), Vec::new());
        Self { at, end, shard_bytes, headers, extension_bytes: None, end_mark: None, entries }
    }

    fn is_last(&self) -> bool {
        self.end == self.shard_bytes
    }

    fn is_finished(&self) -> bool {
        self.end_mark.is_some() || self.at == self.end
    }

    /// Returns the range to read next.
    fn wanted(&self) -> Range<u64> {
        let payload = self.at + BLOCK_BYTES as u64;
        match self.extension_bytes {
            Some(bytes) => payload.min(self.shard_bytes)..payload.saturating_add(bytes).min(self.shard_bytes),
            None => self.at..payload.min(self.shard_bytes),
        }
    }

    fn take(&mut self, offset: u64, piece: &[u8]) -> Result<(), String> {
        let fault = |fault: crate::error::TarFault| format!("{fault} at offset {offset}");
        if let Some(bytes) = self.extension_bytes.take() {
            if piece.len() as u64 != bytes {
                return Err(format!("truncated at offset {offset}"));
            }
            let behind = self.at + BLOCK_BYTES as u64 + bytes;
            if self.headers.extension(behind, piece).map_err(fault)?.is_some() {
                return Err(format!("a sparse member at offset {offset} has its map behind its header"));
            }
            return self.advance(bytes);
        }
        let block = piece.first_chunk().ok_or_else(|| format!("truncated at offset {offset}"))?;
        match self.headers.block(offset, block).map_err(fault)? {
            Next::Entry(entry) => {
                let bytes = entry.stored_bytes();
                self.entries.push(entry);
                self.advance(bytes)
            }
            Next::Extension { bytes } => {
                self.extension_bytes = Some(bytes);
                Ok(())
            }
            Next::Skip { bytes } => self.advance(bytes),
            Next::End if self.is_last() => {
                self.end_mark = Some(offset);
                Ok(())
            }
            Next::End => Err(format!("the archive ends at offset {offset}, before {}", self.end)),
        }
    }

    /// Skips the block at the current offset and its payload. Only padding may be missing at the end.
    fn advance(&mut self, bytes: u64) -> Result<(), String> {
        let payload = self.at + BLOCK_BYTES as u64;
        let payload_end = payload.checked_add(bytes).filter(|&end| end <= self.shard_bytes);
        let next = padded(bytes).and_then(|bytes| payload.checked_add(bytes));
        let (Some(_), Some(next)) = (payload_end, next) else {
            return Err(format!("truncated at offset {}", self.at));
        };
        self.at = if self.is_last() { next.min(self.end) } else { next };
        if self.at > self.end || (self.at == self.end && !self.headers.is_between_members()) {
            return Err(format!("no header starts at offset {}", self.end));
        }
        Ok(())
    }
}

fn check_tail(end_mark: u64, shard: &mut dyn ByteRanges) -> Result<(), String> {
    let mut at = end_mark + BLOCK_BYTES as u64;
    while at < shard.bytes() {
        let end = (at + TAIL_RANGE_BYTES).min(shard.bytes());
        let pieces = shard.read(std::slice::from_ref(&(at..end))).map_err(|error| error.to_string())?;
        if pieces.iter().any(|piece| piece.iter().any(|&byte| byte != 0)) {
            return Err(format!("non-zero bytes after the end mark at offset {end_mark}"));
        }
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::shard::tar::slice::SliceEntries;

    /// Shard that counts its reads.
    struct Counted(Bytes, usize);

    impl ByteRanges for Counted {
        fn bytes(&self) -> u64 {
            self.0.len() as u64
        }

        fn read(&mut self, ranges: &[Range<u64>]) -> std::io::Result<Vec<Bytes>> {
            self.1 += 1;
            self.0.read(ranges)
        }
    }

    /// Makes an archive of 30 members, every tenth with a name that needs extension headers.
    fn archive() -> Bytes {
        let mut archive = ::tar::Builder::new(Cursor::new(Vec::new()));
        for number in 0..30_usize {
            let name = format!("{}{number}.txt", "d/".repeat(if number % 10 == 3 { 80 } else { 1 }));
            let mut header = ::tar::Header::new_gnu();
            header.set_entry_type(::tar::EntryType::Regular);
            header.set_size(number as u64 * 70);
            archive.append_data(&mut header, name, &vec![7; number * 70][..]).unwrap();
        }
        archive.into_inner().unwrap().into_inner().into()
    }

    fn scanned(archive: &Bytes) -> Vec<Entry> {
        SliceEntries::new(archive.clone()).map(|entry| entry.unwrap().0).collect()
    }

    #[test]
    fn all_chains_are_followed_together() {
        let archive = archive();
        let entries = scanned(&archive);
        let ends: Vec<u64> = entries.iter().filter_map(Entry::end_offset).collect();
        for (starts, reads_max) in [(ends.clone(), 4), (ends.iter().copied().step_by(3).collect(), 8)] {
            let mut shard = Counted(archive.clone(), 0);
            assert_eq!(walk_entries(&starts, &mut shard).unwrap(), entries);
            assert!(shard.1 <= reads_max, "{} reads for {} members", shard.1, entries.len());
        }
        assert_eq!(walk_entries(&[], &mut archive.clone()).unwrap(), entries);
    }

    #[test]
    fn any_places_give_the_entries_or_a_reason() {
        let archive = archive();
        let entries = scanned(&archive);
        let blocks = archive.len() as u64 / 512;
        let (mut taken, mut refused) = (0, 0);
        for block in 0..=blocks + 1 {
            match walk_entries(&[block * 512], &mut archive.clone()) {
                Ok(walked) => {
                    assert_eq!(walked, entries, "a chain at {}", block * 512);
                    taken += 1;
                }
                Err(_) => refused += 1,
            }
        }
        // Accepted are 0, the end of every member, and the end of the archive.
        assert_eq!((taken, refused), (1 + entries.len() + 1, blocks as usize - entries.len()));
        for starts in [&[100][..], &[1024, 512], &[512, 512], &[u64::MAX - 511]] {
            assert!(walk_entries(starts, &mut archive.clone()).is_err(), "{starts:?}");
        }
    }
}
