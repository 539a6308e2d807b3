//! Parses a 512-byte tar header block: name, size, type and checksum.
//!
//! Understands the V7, ustar and GNU layouts. Numbers are octal or base-256. Nothing here reads a payload;
//! [`super::headers`] joins extension headers with the members that they describe.

use crate::error::TarFault;

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
}
