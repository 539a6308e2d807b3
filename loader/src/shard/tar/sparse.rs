//! Maps sparse members: files whose holes are not stored.
//!
//! A map lists the stored pieces of a file, in order; everything between them is zeros. GNU's old format
//! keeps the map in the header and in blocks after it, PAX 0.0 and 0.1 in records, PAX 1.0 as text before the
//! pieces. An unusable map only affects that member, because the stored length is known without the map.

use bytes::Bytes;

use super::header::{BLOCK_BYTES, parse_number};

/// Maximum number of pieces in a member.
const PIECES_MAX: usize = 1 << 20;
/// Size of an offset or a length in a GNU old-format header, in bytes.
const NUMBER_BYTES: usize = 12;
/// Maximum ratio of a member's length to the stored length, beyond [`EXPANDED_BYTES_FREE`].
const EXPANDED_RATIO_MAX: u64 = 500;
/// Number of bytes that any member may expand to, regardless of the ratio.
const EXPANDED_BYTES_FREE: u64 = 64 << 20;

/// Sparse member map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseMap {
    /// Offsets and lengths of the stored pieces in the file, ascending.
    pieces: Vec<(u64, u64)>,
    /// Total piece length stored in the archive, in bytes.
    stored_bytes: u64,
    fault: Option<String>,
}

impl SparseMap {
    /// Checks a map.
    ///
    /// - `bytes`: file length
    /// - `stored_bytes`: total piece length in the archive
    pub(super) fn new(pieces: Pieces, bytes: u64, stored_bytes: u64) -> Self {
        let fault = pieces.fault.or_else(|| pieces_fault(&pieces.numbers, bytes, stored_bytes));
        let pieces = pieces.numbers.chunks_exact(2).map(|piece| (piece[0], piece[1])).collect();
        Self { pieces, stored_bytes, fault }
    }

    /// Returns the number of bytes in the archive.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Returns why the member cannot be expanded.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Returns the first `wanted` bytes of the file, with zeros for holes; empty if the map has a fault.
    ///
    /// - `stored`: all stored bytes
    pub(crate) fn expand(&self, stored: &[u8], wanted: u64) -> Bytes {
        if self.fault.is_some() || wanted == 0 {
            return Bytes::new();
        }
        let mut expanded = vec![0; wanted as usize];
        let mut rest = stored;
        for &(offset, bytes) in &self.pieces {
            let (piece, behind) = rest.split_at((bytes as usize).min(rest.len()));
            rest = behind;
            if let Some(place) = expanded.get_mut(offset.min(wanted) as usize..) {
                let copied = place.len().min(piece.len());
                place[..copied].copy_from_slice(&piece[..copied]);
            }
        }
        expanded.into()
    }
}

fn pieces_fault(numbers: &[u64], bytes: u64, stored_bytes: u64) -> Option<String> {
    if !numbers.len().is_multiple_of(2) {
        return Some("its map is incomplete".to_owned());
    }
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in numbers.chunks_exact(2) {
        let next = piece[0].checked_add(piece[1]).filter(|&next| piece[0] >= end && next <= bytes);
        let Some(next) = next else { return Some("the pieces of its map overlap or exceed it".to_owned()) };
        (end, sum) = (next, sum.saturating_add(piece[1]));
    }
    if sum != stored_bytes {
        return Some(format!("its map has {sum} bytes, the archive {stored_bytes}"));
    }
    (bytes > EXPANDED_BYTES_FREE && bytes / EXPANDED_RATIO_MAX > stored_bytes).then(|| {
        format!("{stored_bytes} stored bytes expand to {bytes}, over {EXPANDED_RATIO_MAX} times as many")
    })
}

/// Piece offsets and lengths, as they are read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Offsets and lengths, alternating.
    numbers: Vec<u64>,
    fault: Option<String>,
}

impl Pieces {
    /// Returns unusable pieces.
    pub(super) fn faulty(reason: &str) -> Self {
        Self { numbers: Vec::new(), fault: Some(reason.to_owned()) }
    }

    /// Adds the next number, an offset or a length; `None` means an unreadable number.
    pub(super) fn push(&mut self, number: Option<u64>) {
        match number {
            _ if self.fault.is_some() => {}
            None => self.fault = Some("its map is malformed".to_owned()),
            Some(_) if self.numbers.len() >= 2 * PIECES_MAX => {
                self.fault = Some(format!("its map has more than {PIECES_MAX} pieces"));
            }
            Some(number) => self.numbers.push(number),
        }
    }

    /// Adds an offset, after whole pieces.
    pub(super) fn push_offset(&mut self, offset: Option<u64>) {
        self.push(offset.filter(|_| self.numbers.len().is_multiple_of(2)));
    }

    /// Adds a length, after an offset.
    pub(super) fn push_length(&mut self, length: Option<u64>) {
        self.push(length.filter(|_| self.numbers.len() % 2 == 1));
    }

    /// Adds the pieces in a GNU old-format header; unused places are empty.
    fn push_gnu(&mut self, places: &[u8]) {
        for place in places.chunks_exact(2 * NUMBER_BYTES) {
            let (offset, length) = place.split_at(NUMBER_BYTES);
            if length[0] == 0 {
                return;
            }
            self.push(parse_number(offset));
            self.push(parse_number(length));
        }
    }
}

/// Map under construction, from blocks after a header.
#[derive(Debug)]
pub(super) enum MapReader {
    /// GNU old-format blocks.
    Gnu { pieces: Pieces },
    /// PAX 1.0 text.
    Text { text: MapText, rest_bytes: u64 },
}

/// [`MapReader`] step.
pub(super) enum MapStep {
    /// Another block with this many bytes follows.
    More { bytes: u64 },
    /// The map is complete; `rest_bytes` stored member bytes were not part of it.
    Done { pieces: Pieces, rest_bytes: Option<u64> },
}

impl MapReader {
    /// Reads the map part in a GNU old-format header; also returns the file length.
    pub(super) fn gnu(block: &[u8; BLOCK_BYTES]) -> (Self, MapStep, Option<u64>) {
        let mut pieces = Pieces::default();
        pieces.push_gnu(&block[386..482]);
        let bytes = parse_number(&block[483..495]);
        let step = match block[482] {
            0 => MapStep::Done { pieces: std::mem::take(&mut pieces), rest_bytes: None },
            _ => MapStep::More { bytes: BLOCK_BYTES as u64 },
        };
        (Self::Gnu { pieces }, step, bytes)
    }

    /// Starts PAX 1.0 text, which is part of the member's `bytes` stored bytes.
    pub(super) fn text(bytes: u64) -> (Self, MapStep) {
        let mut reader = Self::Text { text: MapText::default(), rest_bytes: bytes };
        let step = reader.next_step(false);
        (reader, step)
    }

    /// Reads the next block.
    pub(super) fn take(&mut self, block: &[u8]) -> MapStep {
        let is_done = match self {
            Self::Gnu { pieces } => {
                pieces.push_gnu(&block[..block.len().min(504)]);
                block.get(504).is_none_or(|&more| more == 0)
            }
            Self::Text { text, rest_bytes } => {
                *rest_bytes = rest_bytes.saturating_sub(BLOCK_BYTES as u64);
                text.take(block)
            }
        };
        self.next_step(is_done)
    }

    fn next_step(&mut self, is_done: bool) -> MapStep {
        match self {
            Self::Gnu { .. } if !is_done => MapStep::More { bytes: BLOCK_BYTES as u64 },
            Self::Gnu { pieces } => MapStep::Done { pieces: std::mem::take(pieces), rest_bytes: None },
            Self::Text { rest_bytes, .. } if !is_done && *rest_bytes > 0 => {
                MapStep::More { bytes: (*rest_bytes).min(BLOCK_BYTES as u64) }
            }
            Self::Text { text, rest_bytes } => {
                let pieces = std::mem::take(text).finish(is_done);
                MapStep::Done { pieces, rest_bytes: Some(*rest_bytes) }
            }
        }
    }
}

/// Decimal numbers, one per line: the number of pieces, then each piece's offset and length.
#[derive(Debug, Default)]
pub(super) struct MapText {
    pieces: Pieces,
    count: Option<u64>,
    line: Vec<u8>,
}

impl MapText {
    /// Maximum line length in bytes; a 64-bit number has 20 digits.
    const LINE_BYTES_MAX: usize = 20;

    /// Reads a block; returns whether the map is complete.
    fn take(&mut self, block: &[u8]) -> bool {
        for &byte in block {
            if byte != b'\n' {
                if self.line.len() == Self::LINE_BYTES_MAX || !byte.is_ascii_digit() {
                    self.pieces.push(None);
                    return true;
                }
                self.line.push(byte);
                continue;
            }
            let number = std::str::from_utf8(&self.line).ok().and_then(|digits| digits.parse().ok());
            self.line.clear();
            match self.count {
                None => self.count = Some(number.unwrap_or(u64::MAX)),
                Some(_) => self.pieces.push(number),
            }
            let is_complete = |count: u64| self.pieces.numbers.len() as u64 >= count.saturating_mul(2);
            if self.pieces.fault.is_some() || self.count.is_some_and(is_complete) {
                return true;
            }
        }
        false
    }

    fn finish(self, is_complete: bool) -> Pieces {
        if is_complete { self.pieces } else { Pieces::faulty("its map is incomplete") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(numbers: &[u64]) -> Pieces {
        Pieces { numbers: numbers.to_vec(), fault: None }
    }

    #[test]
    fn holes_are_zeros_and_a_prefix_is_a_prefix() {
        let map = SparseMap::new(pieces(&[1, 2, 6, 1, 9, 0]), 9, 3);
        assert_eq!(map.fault(), None);
        let whole = map.expand(b"abc", 9);
        assert_eq!(whole, &b"\0ab\0\0\0c\0\0"[..]);
        for wanted in 0..9 {
            assert_eq!(map.expand(b"abc", wanted), whole[..wanted as usize]);
        }
    }

    #[test]
    fn a_map_that_does_not_fit_is_a_fault_with_its_reason() {
        for (numbers, bytes, stored, reason) in [
            (&[0, 4, 2, 4][..], 9, 8, "overlap"),
            (&[8, 4], 9, 4, "exceed"),
            (&[u64::MAX, 4], 9, 4, "exceed"),
            (&[0, 4], 9, 5, "its map has 4 bytes, the archive 5"),
            (&[0], 9, 0, "incomplete"),
            (&[0, 4], 1 << 40, 4, "over 500 times"),
        ] {
            let map = SparseMap::new(pieces(numbers), bytes, stored);
            assert!(map.fault().unwrap().contains(reason), "{map:?}");
            assert!(map.expand(b"abcdefgh", 9).is_empty());
        }
    }

    #[test]
    fn a_text_ends_after_its_last_number_and_anything_else_is_malformed() {
        let read = |text: &str| {
            let mut reader = MapText::default();
            let is_done = text.as_bytes().chunks(3).any(|part| reader.take(part));
            reader.finish(is_done)
        };
        assert_eq!(read("2\n0\n4\n2048\n4\n\0\0"), pieces(&[0, 4, 2048, 4]));
        assert_eq!(read("0\n\0"), pieces(&[]));
        for (text, reason) in
            [("2\n0\n", "incomplete"), ("x\n", "malformed"), ("1\n0\n99999999999999999999\n", "malformed")]
        {
            assert!(read(text).fault.unwrap().contains(reason), "{text}");
        }
    }
}
