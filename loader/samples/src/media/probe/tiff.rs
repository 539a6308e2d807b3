//! Reads TIFF directories: image size and kind, and orientation, also in EXIF blocks and XMP texts.
//!
//! A directory is a list of entries: tag, type, number of values, and the values or a value offset. `BigTIFF`
//! has entries with 20 bytes instead of 12. EXIF blocks are small TIFF files.
//!
//! Of an EXIF block only tag `0x0112` in the first directory is read. A broken block counts as "not rotated",
//! as in other decoders. XMP is read if EXIF has no such tag, as in Pillow.

use image::metadata::Orientation;

use super::ImageSize;
use crate::media::DecodeError;

const FORMAT: &str = "tiff";
/// Maximum number of values read from an entry.
const VALUES_MAX: u64 = 1 << 17;

/// A directory in a TIFF file.
#[derive(Clone, Copy)]
struct Directory<'a> {
    bytes: &'a [u8],
    is_little: bool,
    is_big: bool,
    /// Offset of the first entry.
    start: usize,
    entries: u64,
}

/// Entry values.
#[derive(Clone, Copy)]
struct Values {
    kind: u16,
    count: u64,
    at: usize,
}

impl<'a> Directory<'a> {
    /// Returns the first directory; `None` if the header is broken or the directory is past the end of the
    /// bytes.
    fn first(bytes: &'a [u8]) -> Option<Self> {
        let (is_little, is_big) = match bytes.get(..4)? {
            b"II*\0" => (true, false),
            b"MM\0*" => (false, false),
            b"II+\0" => (true, true),
            b"MM\0+" => (false, true),
            _ => return None,
        };
        let mut directory = Self { bytes, is_little, is_big, start: 0, entries: 0 };
        let (offset_at, offset_bytes, count_bytes) = if is_big { (8, 8, 8) } else { (4, 4, 2) };
        let offset = usize::try_from(directory.integer(offset_at, offset_bytes)?).ok()?;
        directory.entries = directory.integer(offset, count_bytes)?;
        directory.start = offset.checked_add(count_bytes)?;
        Some(directory)
    }

    /// Returns whether the bytes end inside the directory.
    fn is_cut(&self) -> bool {
        let entry_bytes = if self.is_big { 20 } else { 12 };
        self.entries.saturating_mul(entry_bytes) > self.bytes.len().saturating_sub(self.start) as u64
    }

    /// Returns the first value for a tag.
    fn number(&self, tag: u16) -> Option<u64> {
        let values = self.values(tag)?;
        self.integer(values.at, value_bytes(values.kind)?)
    }

    /// Returns all values for a tag; none if the tag is missing.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] if the bytes end before the last value.
    fn numbers(&self, tag: u16) -> Result<Vec<u64>, DecodeError> {
        let Some(values) = self.values(tag).filter(|values| values.count <= VALUES_MAX) else {
            return Ok(Vec::new());
        };
        let Some(width) = value_bytes(values.kind) else { return Ok(Vec::new()) };
        let at = |place: u64| self.integer(values.at.checked_add(place as usize * width)?, width);
        let numbers: Option<Vec<u64>> = (0..values.count).map(at).collect();
        numbers.ok_or_else(|| DecodeError::truncated(FORMAT, self.bytes.len()))
    }

    /// Returns a tag's bytes.
    fn content(&self, tag: u16) -> Option<&'a [u8]> {
        let values = self.values(tag)?;
        let length = usize::try_from(values.count).ok()?.checked_mul(value_bytes(values.kind)?)?;
        self.bytes.get(values.at..values.at.checked_add(length)?)
    }

    fn values(&self, tag: u16) -> Option<Values> {
        let (entry_bytes, count_bytes, inline_bytes) = if self.is_big { (20, 8, 8) } else { (12, 4, 4) };
        for entry in 0..self.entries {
            let at = self.start.checked_add(usize::try_from(entry).ok()?.checked_mul(entry_bytes)?)?;
            if self.integer(at, 2)? != u64::from(tag) {
                continue;
            }
            let kind = self.integer(at + 2, 2)? as u16;
            let count = self.integer(at + 4, count_bytes)?;
            let inline_at = at + 4 + count_bytes;
            let is_inline = count.saturating_mul(value_bytes(kind)? as u64) <= inline_bytes as u64;
            let at = if is_inline {
                inline_at
            } else {
                usize::try_from(self.integer(inline_at, inline_bytes)?).ok()?
            };
            return Some(Values { kind, count, at });
        }
        None
    }

    fn integer(&self, at: usize, width: usize) -> Option<u64> {
        let bytes = self.bytes.get(at..at.checked_add(width)?)?;
        let join = |number: u64, &byte: &u8| number << 8 | u64::from(byte);
        Some(if self.is_little { bytes.iter().rev().fold(0, join) } else { bytes.iter().fold(0, join) })
    }
}

/// Returns the bytes per value for a type; `None` for types other than integers.
fn value_bytes(kind: u16) -> Option<usize> {
    match kind {
        1 | 2 | 6 | 7 => Some(1),
        3 | 8 => Some(2),
        4 | 9 | 13 => Some(4),
        16..=18 => Some(8),
        _ => None,
    }
}

/// Meaning of the samples in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TiffKind {
    /// Gray, RGB or CMYK in whole bytes, which the general-purpose decoder converts.
    Plain,
    /// Gray with other bit depths, with alpha, or with a sign; 0 is white where `is_inverted`.
    Gray {
        /// Whether samples are floating-point numbers.
        is_float: bool,
        /// Whether samples are signed integers.
        is_signed: bool,
    },
    /// Palette indices, with the palette: 16 bits each, all reds, all greens, all blues.
    Palette(Vec<u16>),
    /// 8-bit YCbCr, converted with the JFIF matrix.
    YCbCr,
    /// 8-bit CIE L*a*b*; a* and b* are signed.
    Lab,
}

/// Header fields for a TIFF image.
#[derive(Clone, Debug)]
pub(crate) struct TiffHeader {
    pub(crate) size: ImageSize,
    pub(crate) orientation: Orientation,
    pub(crate) kind: TiffKind,
    pub(crate) bits: u64,
    /// Samples per pixel.
    pub(crate) samples: u64,
    /// Offset of the byte that defines the sample meaning.
    pub(crate) meaning_at: usize,
}

/// Reads the header of a TIFF or `BigTIFF` file.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end before the first directory ends, [`DecodeError::Unsupported`]
/// if the image cannot be decoded.
pub(crate) fn read_tiff_header(bytes: &[u8]) -> Result<TiffHeader, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    let directory = Directory::first(bytes).filter(|directory| !directory.is_cut()).ok_or_else(ended)?;
    let missing =
        |name: &str| DecodeError::malformed(FORMAT, directory.start, format!("it declares no {name}"));
    let side = |tag: u16, name: &str| {
        let length = directory.number(tag).ok_or_else(|| missing(name))?;
        u32::try_from(length)
            .map_err(|_| DecodeError::malformed(FORMAT, 0, "a side of the image exceeds 32 bits"))
    };
    let size = ImageSize { width: side(256, "width")?, height: side(257, "height")? };
    let orientation = directory.number(274).and_then(|_| orientation_of_tiff(bytes));
    let of_xmp = || orientation_of_xmp(directory.content(700)?);
    let (kind, bits, samples) = read_kind(&directory)?;
    let meaning = directory.values(262).ok_or_else(|| missing("color space"))?;
    Ok(TiffHeader {
        size,
        orientation: orientation.or_else(of_xmp).unwrap_or(Orientation::NoTransforms),
        kind,
        bits,
        samples,
        meaning_at: meaning.at
            + if directory.is_little { 0 } else { value_bytes(meaning.kind).unwrap_or(1) - 1 },
    })
}

/// Returns the kind of a decodable image, the bits per sample, and the samples per pixel.
fn read_kind(directory: &Directory<'_>) -> Result<(TiffKind, u64, u64), DecodeError> {
    const JPEG: u64 = 7;
    let refused = |what: String| Err(DecodeError::unsupported(FORMAT, what));
    let number = |tag: u16, default: u64| directory.number(tag).unwrap_or(default);
    let compression = number(259, 1);
    if let Some(name) = unread_compression(compression) {
        return refused(format!("compressed by {name}"));
    }
    if directory.values(50_706).is_some() {
        return refused("a camera's raw image (DNG), whose first image is a preview".to_owned());
    }
    let depths = directory.numbers(258)?;
    let bits = depths.first().copied().unwrap_or(1);
    let formats = directory.numbers(339)?;
    let format = formats.first().copied().unwrap_or(1);
    if depths.iter().any(|&other| other != bits) || formats.iter().any(|&other| other != format) {
        return refused("samples of different types in a pixel".to_owned());
    }
    let samples = number(277, 1);
    let is_split = number(284, 1) == 2 && samples > 1;
    let extra = directory.numbers(338)?.len() as u64;
    let (is_signed, is_float) = (format == 2, format == 3);
    let name = match format {
        1 => "unsigned",
        2 => "signed",
        3 => "floating-point",
        _ => "undefined",
    };
    let meaning = number(262, 1);
    let kind = match (meaning, bits, samples - extra.min(samples), format) {
        (0 | 1, 1 | 8 | 16, _, 1) if samples == 1 => TiffKind::Plain,
        (0 | 1, 2 | 4 | 8 | 16 | 32, 1, 1) | (0 | 1, 16 | 32, 1, 2) | (0 | 1, 32, 1, 3)
            if !is_split && (samples == 1 || compression != JPEG) =>
        {
            TiffKind::Gray { is_float, is_signed }
        }
        (2, 8 | 16, 3.., 1) | (2, 32, 3.., 3) => TiffKind::Plain,
        (5, 8 | 16, 4.., 1) if !is_split => TiffKind::Plain,
        (3, 1 | 2 | 4 | 8, 1, 1) if !is_split => {
            let colors: Vec<u16> = directory.numbers(320)?.iter().map(|&color| color as u16).collect();
            if colors.len() as u64 != 3 << bits {
                return Err(DecodeError::malformed(FORMAT, directory.start, "its palette is missing or cut"));
            }
            TiffKind::Palette(colors)
        }
        (6, 8, 3, 1) if !is_split => TiffKind::YCbCr,
        (8, 8, 3, _) if !is_split && extra == 0 => TiffKind::Lab,
        _ => {
            let split = if is_split { " in planes" } else { "" };
            return refused(format!(
                "{samples} {name} samples of {bits} bits{split}, {}",
                color_space_name(meaning)
            ));
        }
    };
    Ok((kind, bits, samples))
}

/// Returns the name of an unsupported compression.
fn unread_compression(number: u64) -> Option<String> {
    let name = match number {
        1 | 4 | 5 | 7 | 8 | 32_773 | 32_946 => return None,
        2 | 3 => "fax group 3",
        6 => "JPEG as of TIFF 6.0",
        34_712 => "JPEG 2000",
        34_887 => "LERC",
        34_925 => "LZMA",
        50_000 => "Zstandard",
        50_001 => "WebP",
        50_002 => "JPEG XL",
        other => return Some(format!("method {other}")),
    };
    Some(name.to_owned())
}

/// Returns a color space name.
fn color_space_name(meaning: u64) -> String {
    let name = match meaning {
        0 | 1 => "gray",
        2 => "RGB",
        3 => "palette",
        4 => "mask",
        5 => "CMYK",
        6 => "YCbCr",
        8..=10 => "CIE L*a*b*",
        32_803 => "color filter array",
        34_892 => "linear raw",
        other => return format!("color space {other}"),
    };
    name.to_owned()
}

/// Start of an XMP segment in a JPEG.
pub(super) const XMP_NAMESPACE: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
const ORIENTATION_TAG: u16 = 0x0112;

/// Returns the orientation in an EXIF block that starts with the TIFF header, or `None` if there is none. An
/// invalid orientation number means "as stored".
pub(super) fn orientation_of_tiff(block: &[u8]) -> Option<Orientation> {
    let number = Directory::first(block)?.number(ORIENTATION_TAG)?;
    Some(orientation_of_number(number))
}

/// Returns the orientation in an EXIF block, which may start with the JPEG segment prefix that some writers
/// copy.
pub(super) fn orientation_of_exif(block: &[u8]) -> Option<Orientation> {
    orientation_of_tiff(block.strip_prefix(b"Exif\0\0").unwrap_or(block))
}

/// Returns the orientation in an XMP text: an attribute or an element with a single digit.
pub(super) fn orientation_of_xmp(text: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = text;
    loop {
        let found = rest.windows(NAME.len()).position(|window| window == NAME)?;
        rest = &rest[found + NAME.len()..];
        let digit = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">")).and_then(<[u8]>::first);
        if let Some(digit) = digit.filter(|digit| digit.is_ascii_digit()) {
            return Some(orientation_of_number(u64::from(digit - b'0')));
        }
    }
}

fn orientation_of_number(number: u64) -> Orientation {
    let known = u8::try_from(number).ok().and_then(Orientation::from_exif);
    known.unwrap_or(Orientation::NoTransforms)
}

/// Returns whether the orientation swaps width and height.
pub(super) fn swaps_sides(orientation: Orientation) -> bool {
    matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a file with a single directory; each entry holds a number with up to 32 bits.
    fn file(is_big: bool, entries: &[(u16, u32)]) -> Vec<u8> {
        let mut file =
            if is_big { b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0".to_vec() } else { b"II*\0\x08\0\0\0".to_vec() };
        file.extend(&(entries.len() as u64).to_le_bytes()[..if is_big { 8 } else { 2 }]);
        for (tag, value) in entries {
            file.extend([tag.to_le_bytes(), [4, 0]].concat());
            file.extend(&1_u64.to_le_bytes()[..if is_big { 8 } else { 4 }]);
            file.extend(&u64::from(*value).to_le_bytes()[..if is_big { 8 } else { 4 }]);
        }
        file
    }

    #[test]
    fn both_sizes_of_entries_are_read_and_cuts_are_truncated() {
        let entries = [(256, 70_000), (257, 3), (258, 8), (262, 1), (274, 6)];
        for is_big in [false, true] {
            let file = file(is_big, &entries);
            let header = read_tiff_header(&file).unwrap();
            assert_eq!(header.size, ImageSize { width: 70_000, height: 3 });
            assert_eq!((header.kind, header.orientation), (TiffKind::Plain, Orientation::Rotate90));
            for length in 0..file.len() {
                assert!(matches!(read_tiff_header(&file[..length]), Err(DecodeError::Truncated { .. })));
            }
        }
    }

    #[test]
    fn kinds_that_are_not_decoded_are_named() {
        let refused = |changes: &[(u16, u32)]| {
            let entries = [&[(256, 4), (257, 4)], changes].concat();
            read_tiff_header(&file(false, &entries)).unwrap_err().to_string()
        };
        let table = [
            (&[(259, 34_925), (262, 1)][..], "unsupported tiff: compressed by LZMA"),
            (&[(258, 12), (262, 1)], "unsupported tiff: 1 unsigned samples of 12 bits, gray"),
            (&[(259, 9), (262, 1)], "unsupported tiff: compressed by method 9"),
            (&[(258, 8), (339, 2), (262, 1)], "unsupported tiff: 1 signed samples of 8 bits, gray"),
            (&[(258, 8), (262, 2), (277, 2)], "unsupported tiff: 2 unsigned samples of 8 bits, RGB"),
            (
                &[(258, 8), (262, 6), (277, 3), (284, 2)],
                "unsupported tiff: 3 unsigned samples of 8 bits in planes, YCbCr",
            ),
            (
                &[(258, 16), (262, 32_803)],
                "unsupported tiff: 1 unsigned samples of 16 bits, color filter array",
            ),
            (&[(258, 8), (262, 3)], "malformed tiff at byte 10: its palette is missing or cut"),
        ];
        for (changes, message) in table {
            assert_eq!(refused(changes), message);
        }
    }

    fn block(is_little: bool, orientation: u16) -> Vec<u8> {
        let short = |value: u16| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let long = |value: u32| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
        let mut block = if is_little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
        block.extend(long(8));
        block.extend(short(1));
        block.extend(short(ORIENTATION_TAG));
        block.extend(short(3));
        block.extend(long(1));
        block.extend(short(orientation));
        block.extend(short(0));
        block.extend(long(0));
        block
    }

    #[test]
    fn both_byte_orders_are_read() {
        assert_eq!(orientation_of_tiff(&block(true, 6)), Some(Orientation::Rotate90));
        assert_eq!(orientation_of_tiff(&block(false, 8)), Some(Orientation::Rotate270));
    }

    #[test]
    fn broken_blocks_mean_not_turned() {
        assert_eq!(orientation_of_tiff(&block(true, 9)), Some(Orientation::NoTransforms));
        for cut in 0..20 {
            assert_eq!(orientation_of_tiff(&block(true, 6)[..cut.min(18)]), None);
        }
        let mut far = block(true, 6);
        far[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(orientation_of_tiff(&far), None);
    }

    #[test]
    fn xmp_is_an_attribute_or_an_element() {
        let read = |text: &str| orientation_of_xmp(text.as_bytes());
        assert_eq!(read(r#"<rdf:Description tiff:Orientation="6"/>"#), Some(Orientation::Rotate90));
        assert_eq!(read("tiff:Orientation ... <tiff:Orientation>8<"), Some(Orientation::Rotate270));
        assert_eq!(read("<tiff:Orientation>9<"), Some(Orientation::NoTransforms));
        assert_eq!(read("<tiff:Orientation>"), None);
    }

    #[test]
    fn a_long_number_is_read_as_such() {
        let mut block = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x04\0\0\0\x01".to_vec();
        block.extend([0, 0, 0, 6, 0, 0, 0, 0]);
        assert_eq!(orientation_of_tiff(&block), Some(Orientation::Rotate90));
    }
}
