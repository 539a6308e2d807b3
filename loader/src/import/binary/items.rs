//! Reads the layout that MDS shards and litdata chunks share: a count, offsets, then the items.
//!
//! All numbers are little-endian and have 32 bits. Items are read one after another, so compressed files work
//! too, and no memory is taken before the bytes for it are there.

use std::io::{self, Read};

use crate::shard::FIELD_BYTES_MAX;

/// Bytes that describe a frame.
const FRAME_BYTES: u64 = 24;

/// Items of one file, in order.
pub(super) struct Items<R> {
    reader: R,
    /// Lengths of the items in bytes.
    lengths: Vec<u32>,
    next: usize,
}

impl Items<Box<dyn Read>> {
    /// Reads the directory of a litdata chunk that is compressed in frames of Zstandard, from behind its
    /// magic bytes: version, flags, counts, offsets, and the places of the frames, which follow each other.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), and [`io::ErrorKind::InvalidData`] for another version.
    pub(super) fn open_framed(mut reader: Box<dyn Read>) -> io::Result<Self> {
        let version = read_number(&mut reader)?;
        if version != 1 {
            return Err(invalid(&format!("its frames have the version {version}, expected 1")));
        }
        let [items, _rows_of_frame, frames] =
            [read_number(&mut reader)?, read_number(&mut reader)?, read_number(&mut reader)?];
        let lengths = read_lengths(&mut reader, items)?.0;
        pass_over(&mut reader, FRAME_BYTES * u64::from(frames))?;
        Ok(Self { reader: Box::new(zstd::Decoder::new(reader)?), lengths, next: 0 })
    }
}

impl<R: Read> Items<R> {
    /// Reads the count and the offsets.
    ///
    /// # Errors
    /// Those of the reader, and [`io::ErrorKind::InvalidData`] if offsets go backwards.
    pub(super) fn open(mut reader: R) -> io::Result<Self> {
        let items = read_number(&mut reader)?;
        let (lengths, start) = read_lengths(&mut reader, items)?;
        let read = 4 * (u64::from(items) + 2);
        let start = u64::from(start);
        let between = start.checked_sub(read).ok_or_else(|| invalid("its items overlap its offsets"))?;
        pass_over(&mut reader, between)?;
        Ok(Self { reader, lengths, next: 0 })
    }

    /// Returns the number of items.
    pub(super) fn len(&self) -> u64 {
        self.lengths.len() as u64
    }

    /// Returns whether the items have no bytes at all.
    pub(super) fn is_blank(&self) -> bool {
        self.lengths.iter().all(|&length| length == 0)
    }

    /// Passes over the next items.
    pub(super) fn pass(&mut self, items: u64) -> io::Result<()> {
        let end = self.lengths.len().min(self.next + items as usize);
        let bytes = self.lengths[self.next..end].iter().map(|&length| u64::from(length)).sum();
        self.next = end;
        pass_over(&mut self.reader, bytes)
    }

    /// Reads the next item; `None` after the last one.
    pub(super) fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some(&length) = self.lengths.get(self.next) else { return Ok(None) };
        self.next += 1;
        if u64::from(length) > FIELD_BYTES_MAX {
            return Err(invalid(&format!("an item has {length} bytes, over {FIELD_BYTES_MAX}")));
        }
        let mut item = Vec::new();
        self.reader.by_ref().take(length.into()).read_to_end(&mut item)?;
        if item.len() < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Some(item))
    }

    /// Reads everything behind the items.
    pub(super) fn rest(mut self) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        self.reader.by_ref().take(FIELD_BYTES_MAX).read_to_end(&mut rest)?;
        Ok(rest)
    }
}

/// Takes numbers and bytes from the front of an item.
pub(super) struct Cut<'a>(pub(super) &'a [u8]);

impl<'a> Cut<'a> {
    /// Takes bytes.
    ///
    /// # Errors
    /// The reason, if fewer are left.
    pub(super) fn bytes(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or_else(|| format!("it ends early: expected {length} bytes, found {}", self.0.len()))?;
        self.0 = rest;
        Ok(taken)
    }

    /// Takes a number of 32 bits.
    ///
    /// # Errors
    /// See [`bytes`](Self::bytes).
    pub(super) fn number(&mut self) -> Result<u32, String> {
        let bytes = self.bytes(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}

/// Reads the offsets of items; returns their lengths, and the first offset.
fn read_lengths(reader: &mut impl Read, items: u32) -> io::Result<(Vec<u32>, u32)> {
    let mut lengths = Vec::new();
    let start = read_number(reader)?;
    let mut last = start;
    for _ in 0..items {
        let end = read_number(reader)?;
        lengths.push(end.checked_sub(last).ok_or_else(|| invalid("its offsets go backwards"))?);
        last = end;
    }
    Ok((lengths, start))
}

fn read_number(reader: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    reader.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn pass_over(reader: &mut impl Read, bytes: u64) -> io::Result<()> {
    let passed = io::copy(&mut reader.take(bytes), &mut io::sink())?;
    if passed < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(numbers: &[u32], rest: &[u8]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).chain(rest.iter().copied()).collect()
    }

    #[test]
    fn items_are_found_behind_the_offsets_and_what_else_lies_there() {
        let file = file(&[2, 19, 21, 24], b"{} abcde...");
        let mut items = Items::open(&file[..]).unwrap();
        assert_eq!(items.len(), 2);
        assert_eq!(items.next().unwrap().unwrap(), b"ab");
        assert_eq!(items.next().unwrap().unwrap(), b"cde");
        assert_eq!(items.next().unwrap(), None);
        assert_eq!(items.rest().unwrap(), b"...");
        let mut passed = Items::open(&file[..]).unwrap();
        passed.pass(1).unwrap();
        assert_eq!(passed.next().unwrap().unwrap(), b"cde");
    }

    #[test]
    fn damaged_offsets_are_errors_and_take_no_memory() {
        for (numbers, rest) in [
            (&[2, 16, 21, 20][..], &b"abcde"[..]),
            (&[2, 4, 8, 12], b"abcde"),
            (&[1, 12, 400], b"abcde"),
            (&[u32::MAX, 12, 12], b""),
            (&[], b""),
        ] {
            let file = file(numbers, rest);
            let read = Items::open(&file[..]).and_then(|mut items| items.next());
            assert!(read.is_err(), "{numbers:?}: {read:?}");
        }
    }
}
