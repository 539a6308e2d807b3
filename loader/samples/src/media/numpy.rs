//! Reads NPY files, versions 1 to 3, without copying the values.
//!
//! An NPY file is a magic number, a Python dictionary literal with type, order and shape, then the values.
//!
//! Source: NumPy, `numpy/lib/format.py`, "Format Version 1.0".

use bytes::Bytes;

use super::DecodeError;
use super::probe::field::{u16_le, u32_le};
use crate::error::{EXCERPT_CHARACTERS, excerpt};

const FORMAT: &str = "npy";
const MAGIC: &[u8] = b"\x93NUMPY";
const HEADER_BYTES_MAX: usize = 1 << 16;

/// NumPy array whose values stay in the input buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpyArray {
    /// Type in NumPy notation, such as `<f4`: byte order, kind, and bytes (for `U`: characters).
    pub dtype: String,
    /// Bytes per value.
    pub item_bytes: usize,
    /// Length of each axis; empty for a scalar.
    pub shape: Vec<u64>,
    /// Whether the first axis varies fastest.
    pub is_fortran_order: bool,
    /// Array values: product of `shape` times `item_bytes` bytes, shared with the input.
    pub data: Bytes,
}

/// Reads an NPY file; the array shares the memory of `bytes`.
///
/// # Errors
/// [`DecodeError::Unsupported`] for pickled objects, structured types and unknown versions,
/// [`DecodeError::Malformed`] and [`DecodeError::Truncated`] if header, shape and length are inconsistent.
pub fn decode_npy(bytes: &Bytes) -> Result<NpyArray, DecodeError> {
    let (header, data_start) = split_header(bytes)?;
    let fields = HeaderParser { header, position: 0 }.parse()?;
    let item_bytes = item_bytes(&fields.dtype)?;
    let data_bytes = fields
        .shape
        .iter()
        .try_fold(item_bytes as u64, |product, &length| product.checked_mul(length))
        .and_then(|product| usize::try_from(product).ok())
        .ok_or_else(|| DecodeError::malformed(FORMAT, 10, "the shape exceeds the address space"))?;
    let present = bytes.len() - data_start;
    if present < data_bytes {
        return Err(DecodeError::truncated(FORMAT, bytes.len()));
    }
    if present > data_bytes {
        return Err(DecodeError::malformed(FORMAT, data_start + data_bytes, "bytes after the last value"));
    }
    Ok(NpyArray {
        dtype: fields.dtype,
        item_bytes,
        shape: fields.shape,
        is_fortran_order: fields.is_fortran_order,
        data: bytes.slice(data_start..),
    })
}

/// Returns the dictionary and the value offset.
fn split_header(bytes: &[u8]) -> Result<(&str, usize), DecodeError> {
    if !bytes.starts_with(MAGIC) {
        return Err(DecodeError::malformed(FORMAT, 0, "expected the NumPy magic number"));
    }
    let (start, length) = match bytes.get(6) {
        Some(1) => (10, u16_le(bytes, 8).map(usize::from)),
        Some(2 | 3) => (12, u32_le(bytes, 8).map(|length| length as usize)),
        Some(version) => return Err(DecodeError::unsupported(FORMAT, format!("format version {version}"))),
        None => (0, None),
    };
    let length = length.ok_or_else(|| DecodeError::truncated(FORMAT, bytes.len()))?;
    if length > HEADER_BYTES_MAX {
        return Err(DecodeError::malformed(FORMAT, 8, format!("header of {length} bytes")));
    }
    let header =
        bytes.get(start..start + length).ok_or_else(|| DecodeError::truncated(FORMAT, bytes.len()))?;
    let header = std::str::from_utf8(header).map_err(|error| {
        DecodeError::malformed(FORMAT, start + error.valid_up_to(), "header is not UTF-8")
    })?;
    Ok((header, start + length))
}

/// Returns the bytes per value for a simple type.
fn item_bytes(dtype: &str) -> Result<usize, DecodeError> {
    let shown = excerpt(dtype, EXCERPT_CHARACTERS);
    let unsupported = || DecodeError::unsupported(FORMAT, format!("values of type `{shown}`"));
    let plain = dtype.strip_prefix(['<', '>', '|', '=']).unwrap_or(dtype);
    let mut characters = plain.chars();
    let kind = characters.next().ok_or_else(unsupported)?;
    let digits = characters.as_str().split('[').next().unwrap_or_default();
    let count: usize = digits.parse().map_err(|_| unsupported())?;
    match kind {
        'b' | 'i' | 'u' | 'f' | 'c' if (1..=32).contains(&count) => Ok(count),
        'm' | 'M' if count == 8 => Ok(count),
        'S' | 'a' | 'V' => Ok(count),
        'U' => count.checked_mul(4).ok_or_else(unsupported),
        _ => Err(unsupported()),
    }
}

struct HeaderFields {
    dtype: String,
    shape: Vec<u64>,
    is_fortran_order: bool,
}

/// Parses the dictionary literal: three keys in any order, as NumPy writes and checks them.
struct HeaderParser<'a> {
    header: &'a str,
    position: usize,
}

impl HeaderParser<'_> {
    fn parse(mut self) -> Result<HeaderFields, DecodeError> {
        let (mut dtype, mut shape, mut is_fortran_order) = (None, None, None);
        self.expect('{')?;
        while !self.accept('}') {
            let key = self.string()?;
            self.expect(':')?;
            match key.as_str() {
                "descr" => dtype = Some(self.string()?),
                "fortran_order" => is_fortran_order = Some(self.boolean()?),
                "shape" => shape = Some(self.tuple()?),
                _ => {
                    let shown = excerpt(&key, EXCERPT_CHARACTERS);
                    return Err(self.malformed(format!("unknown key `{shown}`")));
                }
            }
            if !self.accept(',') {
                self.expect('}')?;
                break;
            }
        }
        match (dtype, shape, is_fortran_order) {
            (Some(dtype), Some(shape), Some(is_fortran_order)) => {
                Ok(HeaderFields { dtype, shape, is_fortran_order })
            }
            _ => Err(self.malformed("one of `descr`, `fortran_order`, `shape` is missing")),
        }
    }

    fn rest(&mut self) -> &str {
        let rest = &self.header[self.position..];
        let trimmed = rest.trim_start();
        self.position += rest.len() - trimmed.len();
        trimmed
    }

    fn accept(&mut self, symbol: char) -> bool {
        let is_there = self.rest().starts_with(symbol);
        self.position += usize::from(is_there);
        is_there
    }

    fn expect(&mut self, symbol: char) -> Result<(), DecodeError> {
        if self.accept(symbol) { Ok(()) } else { Err(self.malformed(format!("expected `{symbol}`"))) }
    }

    fn string(&mut self) -> Result<String, DecodeError> {
        if self.rest().starts_with('[') {
            return Err(DecodeError::unsupported(FORMAT, "structured values"));
        }
        let quote = if self.accept('"') { '"' } else { '\'' };
        if quote == '\'' {
            self.expect('\'')?;
        }
        let rest = &self.header[self.position..];
        let Some(end) = rest.find(quote) else { return Err(self.malformed("unterminated string")) };
        let value = rest[..end].to_owned();
        self.position += end + 1;
        Ok(value)
    }

    fn boolean(&mut self) -> Result<bool, DecodeError> {
        for (word, value) in [("True", true), ("False", false)] {
            if self.rest().starts_with(word) {
                self.position += word.len();
                return Ok(value);
            }
        }
        Err(self.malformed("expected `True` or `False`"))
    }

    fn tuple(&mut self) -> Result<Vec<u64>, DecodeError> {
        let mut lengths = Vec::new();
        self.expect('(')?;
        while !self.accept(')') {
            let rest = self.rest();
            let digits = rest.find(|character: char| !character.is_ascii_digit()).unwrap_or(rest.len());
            let Ok(length) = rest[..digits].parse() else { return Err(self.malformed("expected a length")) };
            lengths.push(length);
            self.position += digits;
            if !self.accept(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(lengths)
    }

    fn malformed(&self, reason: impl Into<String>) -> DecodeError {
        const SHORTEST_PREAMBLE: usize = 10;
        DecodeError::malformed(FORMAT, SHORTEST_PREAMBLE + self.position, reason)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn npy(version: u8, header: &str, data: &[u8]) -> Bytes {
        let mut file = MAGIC.to_vec();
        file.extend([version, 0]);
        if version == 1 {
            file.extend((header.len() as u16).to_le_bytes());
        } else {
            file.extend((header.len() as u32).to_le_bytes());
        }
        file.extend(header.as_bytes());
        file.extend(data);
        file.into()
    }

    const HEADER: &str = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n";

    #[test]
    fn all_versions_are_read_without_copying() {
        for version in 1..=3 {
            let file = npy(version, HEADER, &[7; 24]);
            let array = decode_npy(&file).unwrap();
            assert_eq!((array.dtype.as_str(), array.item_bytes, array.is_fortran_order), ("<f4", 4, false));
            assert_eq!(array.shape, [2, 3]);
            assert_eq!(array.data.as_ptr(), file[file.len() - 24..].as_ptr());
        }
    }

    #[test]
    fn scalars_empty_arrays_and_strings_have_the_right_length() {
        let scalar = "{'shape': (), 'fortran_order': True, 'descr': '>i8'}";
        assert!(decode_npy(&npy(1, scalar, &[0; 8])).unwrap().shape.is_empty());
        let empty = "{'descr': '|u1', 'fortran_order': False, 'shape': (0,), }";
        assert_eq!(decode_npy(&npy(1, empty, &[])).unwrap().shape, [0]);
        let string = "{\"descr\": '<U5', 'fortran_order': False, 'shape': (2,), }";
        assert_eq!(decode_npy(&npy(1, string, &[0; 40])).unwrap().item_bytes, 20);
    }

    #[test]
    fn objects_and_structures_are_refused() {
        for dtype in ["'|O'", "[('a', '<f4')]", "'<f99'", "''"] {
            let header = format!("{{'descr': {dtype}, 'fortran_order': False, 'shape': (1,), }}");
            let refused = decode_npy(&npy(1, &header, &[0; 8]));
            assert!(matches!(refused, Err(DecodeError::Unsupported { .. })), "{dtype}: {refused:?}");
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        assert!(matches!(decode_npy(&npy(1, HEADER, &[0; 23])), Err(DecodeError::Truncated { .. })));
        assert!(matches!(decode_npy(&npy(1, HEADER, &[0; 25])), Err(DecodeError::Malformed { .. })));
        let huge = "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }";
        assert!(matches!(decode_npy(&npy(1, huge, &[])), Err(DecodeError::Malformed { .. })));
    }

    proptest! {
        #[test]
        fn mutations_never_panic(at in 0usize..110, value: u8, cut in 0usize..110) {
            let mut file = npy(1, HEADER, &[7; 24]).to_vec();
            let at = at.min(file.len() - 1);
            file[at] = value;
            file.truncate(file.len() - cut.min(file.len()));
            let _ = decode_npy(&file.into());
        }
    }
}
