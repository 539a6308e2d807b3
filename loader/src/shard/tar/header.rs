//! Parses tar headers: ustar, GNU and pax.
//!
//! Understands the V7, ustar and GNU layouts. Numbers are octal or base-256. Nothing here reads a payload;
//! [`super::headers`] joins extension headers with the members that they describe.
//!
//! Only `path`, `size` and sparse member records affect what a reader delivers. A record that does not end at
//! the declared length is a fault: guessing would let a payload pose as a header.

use crate::error::TarFault;
use bytes::Bytes;

/// Header block size, and the unit that payloads are padded to, in bytes.
pub(crate) const BLOCK_BYTES: usize = 512;

/// Header type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A regular file: the only kind that becomes a field.
    Regular,
    /// PAX records for the next member.
    PaxLocal,
    /// PAX records for all members that follow.
    PaxGlobal,
    /// The next member's name, GNU style.
    GnuLongName,
    /// The next member's link target, GNU style; never used.
    GnuLongLink,
    /// A sparse file in GNU's old format.
    GnuSparse,
    /// Directory, link, device or pipe: has no payload, whatever its size; few writers store a payload for
    /// links.
    WithoutPayload,
    /// Unknown type; the payload is skipped.
    Unknown,
}

/// Header block fields that a payload reader needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) name: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) kind: Kind,
}

/// Parses a block; returns `None` for a zero block, which ends an archive.
pub(crate) fn parse_header(block: &[u8; BLOCK_BYTES]) -> Result<Option<Header>, TarFault> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(None);
    }
    check_checksum(block)?;
    let size = parse_number(&block[124..136]).ok_or(TarFault::BadNumber { field: "size" })?;
    let name = entry_name(block);
    let kind = match block[156] {
        0 if name.ends_with(b"/") => Kind::WithoutPayload,
        0 | b'0' | b'7' => Kind::Regular,
        b'1'..=b'6' => Kind::WithoutPayload,
        b'x' | b'X' => Kind::PaxLocal,
        b'g' => Kind::PaxGlobal,
        b'L' => Kind::GnuLongName,
        b'K' => Kind::GnuLongLink,
        b'S' => Kind::GnuSparse,
        _ => Kind::Unknown,
    };
    Ok(Some(Header { name, size, kind }))
}

fn entry_name(block: &[u8; BLOCK_BYTES]) -> Vec<u8> {
    let name = until_nul(&block[..100]);
    let is_posix = &block[257..263] == b"ustar\0";
    let prefix = if is_posix { until_nul(&block[345..500]) } else { &[] };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

pub(crate) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Checks the sum over all header bytes, counting the checksum field as spaces. Some old writers summed
/// signed bytes; both sums are accepted, as in every reader.
fn check_checksum(block: &[u8; BLOCK_BYTES]) -> Result<(), TarFault> {
    let stored = parse_number(&block[148..156]);
    let mut unsigned = 8 * u64::from(b' ');
    let mut negative = 0;
    // A plain loop: also fast in builds with little optimization.
    for part in [&block[..148], &block[156..]] {
        for &byte in part {
            unsigned += u64::from(byte);
            negative += u64::from(byte >> 7);
        }
    }
    let signed = unsigned as i64 - 256 * negative as i64;
    // A fuzzer cannot guess sums; without this it would end here.
    let is_sum = |stored: u64| stored == unsigned || i64::try_from(stored) == Ok(signed);
    if stored.is_some_and(|stored| cfg!(fuzzing) || is_sum(stored)) {
        Ok(())
    } else {
        Err(TarFault::BadChecksum)
    }
}

/// Parses octal digits between optional spaces, or base-256 if the top bit is set.
pub(super) fn parse_number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        return parse_base256(field);
    }
    let text = until_nul(field).trim_ascii();
    text.iter().try_fold(0u64, |value, &digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Parses big-endian two's complement; a size is never negative, so a set sign bit is rejected.
fn parse_base256(field: &[u8]) -> Option<u64> {
    if field[0] & 0x40 != 0 {
        return None;
    }
    let first = u64::from(field[0] & 0x3f);
    field[1..].iter().try_fold(first, |value, &byte| value.checked_mul(256)?.checked_add(u64::from(byte)))
}

/// Header values that a member's PAX records override.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct PaxRecords {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(super) sparse: Option<PaxSparse>,
}

/// Sparse member records, `GNU.sparse.KEY`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct PaxSparse {
    pub(super) major: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    /// Length with holes, in bytes.
    pub(super) bytes: Option<u64>,
    /// Map in format 0.0 or 0.1.
    pub(super) pieces: Pieces,
}

impl PaxSparse {
    fn take(&mut self, key: &[u8], value: &[u8]) {
        match key {
            b"major" => self.major = Some(parse_decimal(value).unwrap_or(u64::MAX)),
            b"name" => self.name = Some(value.to_vec()),
            b"size" | b"realsize" => self.bytes = parse_decimal(value),
            b"offset" => self.pieces.push_offset(parse_decimal(value)),
            b"numbytes" => self.pieces.push_length(parse_decimal(value)),
            b"map" if !value.is_empty() => {
                value.split(|&byte| byte == b',').for_each(|number| self.pieces.push(parse_decimal(number)));
            }
            _ => {}
        }
    }
}

/// Parses a PAX header payload.
pub(crate) fn parse_pax(mut payload: &[u8]) -> Result<PaxRecords, TarFault> {
    let mut records = PaxRecords::default();
    while !payload.is_empty() && payload[0] != 0 {
        let (key, value, rest) = split_record(payload)?;
        match key {
            b"path" => records.path = Some(value.to_vec()),
            b"size" => records.size = Some(parse_decimal(value).ok_or(TarFault::BadPax { what: "size" })?),
            key => {
                if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    records.sparse.get_or_insert_default().take(key, value);
                }
            }
        }
        payload = rest;
    }
    Ok(records)
}

/// Key, value, and the bytes after the record.
type Record<'a> = (&'a [u8], &'a [u8], &'a [u8]);

fn split_record(payload: &[u8]) -> Result<Record<'_>, TarFault> {
    let bad_length = TarFault::BadPax { what: "record length" };
    let space = payload.iter().take(21).position(|&byte| byte == b' ').ok_or_else(|| bad_length.clone())?;
    let length = parse_decimal(&payload[..space]).ok_or_else(|| bad_length.clone())?;
    let length = usize::try_from(length).ok().filter(|&bytes| bytes <= payload.len() && bytes > space + 1);
    let (record, rest) = payload.split_at(length.ok_or(bad_length)?);
    let Some((b'\n', body)) = record[space + 1..].split_last() else {
        return Err(TarFault::BadPax { what: "record end" });
    };
    let equals = body.iter().position(|&byte| byte == b'=').ok_or(TarFault::BadPax { what: "record key" })?;
    Ok((&body[..equals], &body[equals + 1..], rest))
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

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

    fn block(name: &[u8], size: &[u8], kind: u8) -> [u8; BLOCK_BYTES] {
        let mut block = [0u8; BLOCK_BYTES];
        block[..name.len()].copy_from_slice(name);
        block[124..124 + size.len()].copy_from_slice(size);
        block[156] = kind;
        block[257..263].copy_from_slice(b"ustar\0");
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    #[test]
    fn octal_and_base256_sizes_agree() {
        let octal = parse_header(&block(b"a.txt", b"00000001750\0", b'0')).unwrap().unwrap();
        let base256 = [0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x03, 0xe8];
        let binary = parse_header(&block(b"a.txt", &base256, b'0')).unwrap().unwrap();
        assert_eq!((octal.size, octal.kind), (1000, Kind::Regular));
        assert_eq!(octal, binary);
    }

    #[test]
    fn a_size_beyond_64_bits_is_refused() {
        let huge = [0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let fault = parse_header(&block(b"a", &huge, b'0')).unwrap_err();
        assert_eq!(fault, TarFault::BadNumber { field: "size" });
        let negative = [0xff; 12];
        assert!(parse_header(&block(b"a", &negative, b'0')).is_err());
    }

    #[test]
    fn one_changed_byte_breaks_the_checksum() {
        let mut changed = block(b"a.txt", b"00000000001\0", b'0');
        changed[3] ^= 1;
        assert_eq!(parse_header(&changed), Err(TarFault::BadChecksum));
    }

    #[test]
    fn a_signed_checksum_is_accepted() {
        let mut old = block("é.txt".as_bytes(), b"00000000001\0", b'0');
        old[148..156].fill(b' ');
        let signed: i64 = old.iter().map(|&byte| i64::from(byte as i8)).sum();
        old[148..156].copy_from_slice(format!("{signed:06o}\0 ").as_bytes());
        assert!(parse_header(&old).is_ok());
    }

    #[test]
    fn a_v7_name_with_a_trailing_slash_is_a_directory() {
        let directory = parse_header(&block(b"d/", b"00000000000\0", 0)).unwrap().unwrap();
        assert_eq!(directory.kind, Kind::WithoutPayload);
    }

    #[test]
    fn path_and_size_are_taken_and_the_rest_is_passed_over() {
        let records = parse_pax(b"14 path=a.txt\n12 size=700\n20 mtime=1.25000000\n").unwrap();
        assert_eq!(records.path.as_deref(), Some(b"a.txt".as_slice()));
        assert_eq!(records.size, Some(700));
    }

    #[test]
    fn a_value_may_hold_newlines_and_equal_signs() {
        assert_eq!(parse_pax(b"15 path=a\n=b.t\n").unwrap().path.as_deref(), Some(b"a\n=b.t".as_slice()));
    }

    #[test]
    fn a_wrong_record_length_is_a_fault() {
        for payload in [b"99 path=a\n".as_slice(), b"8 path=a\n", b"0 path=a\n", b"path=a\n", b"10 size=x\n"]
        {
            assert!(matches!(parse_pax(payload), Err(TarFault::BadPax { .. })), "{payload:?}");
        }
    }

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
