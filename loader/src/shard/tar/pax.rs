//! Parses PAX extended header records, `LENGTH KEY=VALUE\n`.
//!
//! Only `path`, `size` and sparse member records affect what a reader delivers. A record that does not end at
//! the declared length is a fault: guessing would let a payload pose as a header.

use super::sparse::Pieces;
use crate::error::TarFault;

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
