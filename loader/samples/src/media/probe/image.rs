//! Reads image format, size and orientation.

use image::metadata::Orientation;

#[cfg(feature = "avif")]
use super::avif;
use super::field::{u16_le, u32_be, u32_le};
use super::tiff::swaps_sides;
use super::{ImageSize, content_name, jpeg, png, tiff};
use crate::media::DecodeError;

/// An image format that [`crate::media::decode_rgb`] reads, AVIF only with the feature `avif`; recognized by
/// the first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum ImageFormat {
    Jpeg,
    Png,
    WebP,
    Gif,
    Bmp,
    Tiff,
    Avif,
}

impl ImageFormat {
    /// Recognizes the format by the first 12 bytes, AVIF with a different main brand by up to some more, or
    /// returns `None`.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0xFF, 0xD8, 0xFF, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1A, b'\n', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'B', b'M', ..] => Some(Self::Bmp),
            [b'I', b'I', b'*' | b'+', 0, ..] | [b'M', b'M', 0, b'*' | b'+', ..] => Some(Self::Tiff),
            _ => is_avif(bytes).then_some(Self::Avif),
        }
    }

    /// Returns the lower-case name used in errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "jpeg",
            Self::Png => "png",
            Self::WebP => "webp",
            Self::Gif => "gif",
            Self::Bmp => "bmp",
            Self::Tiff => "tiff",
            Self::Avif => "avif",
        }
    }
}

/// Size and orientation from an image header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImageHeader {
    pub(crate) format: ImageFormat,
    /// Size as stored.
    pub(crate) stored: ImageSize,
    /// Rotation and mirroring that display the stored image upright.
    pub(crate) orientation: Orientation,
}

impl ImageHeader {
    /// Returns the size after applying the orientation.
    pub(crate) fn display_size(&self) -> ImageSize {
        let ImageSize { width, height } = self.stored;
        if swaps_sides(self.orientation) { ImageSize { width: height, height: width } } else { self.stored }
    }
}

/// Reads an image header.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end inside the header, [`DecodeError::Malformed`] if the format is
/// unknown or a side is 0, [`DecodeError::Unsupported`] for AVIF without the feature `avif`.
pub(crate) fn image_header(bytes: &[u8]) -> Result<ImageHeader, DecodeError> {
    let format = ImageFormat::from_bytes(bytes).ok_or_else(|| unknown_format(bytes))?;
    let (stored, orientation) = match format {
        ImageFormat::Jpeg => {
            let header = jpeg::read_jpeg_header(bytes)?;
            (ImageSize { width: header.width, height: header.height }, header.orientation)
        }
        ImageFormat::Tiff => {
            let header = tiff::read_tiff_header(bytes)?;
            (header.size, header.orientation)
        }
        // A file that ends before the pixels still has a size.
        ImageFormat::Png => (image_size(format, bytes)?, png::orientation(bytes)),
        ImageFormat::WebP => (image_size(format, bytes)?, webp_orientation(bytes)?),
        ImageFormat::Gif => (displayed_size(bytes)?, Orientation::NoTransforms),
        ImageFormat::Bmp => (image_size(format, bytes)?, Orientation::NoTransforms),
        #[cfg(feature = "avif")]
        ImageFormat::Avif => {
            let header = avif::read_avif_header(bytes)?;
            (header.size, header.orientation)
        }
        #[cfg(not(feature = "avif"))]
        ImageFormat::Avif => {
            return Err(DecodeError::unsupported("avif", "this build lacks the feature `avif`"));
        }
    };
    if stored.width == 0 || stored.height == 0 {
        return Err(DecodeError::malformed(format.name(), 0, "a side of the image is 0"));
    }
    Ok(ImageHeader { format, stored, orientation })
}

/// Returns whether the first box has an AVIF brand.
fn is_avif(bytes: &[u8]) -> bool {
    let is_brand = |brand: &[u8]| matches!(brand, b"avif" | b"avis");
    let end = u32_be(bytes, 0).map_or(0, |end| bytes.len().min(end as usize));
    // A version comes after the main brand.
    bytes.get(4..8) == Some(b"ftyp")
        && (bytes.get(8..12).is_some_and(is_brand)
            || bytes.get(16..end).is_some_and(|others| others.chunks_exact(4).any(is_brand)))
}

/// Returns whether the bytes end inside the brand list, which may contain AVIF.
fn brands_continue(bytes: &[u8]) -> bool {
    const BRANDS_BYTES_MAX: usize = 1024;
    let is_longer = |end: u32| (bytes.len() + 1..=BRANDS_BYTES_MAX).contains(&(end as usize));
    bytes.get(4..8) == Some(b"ftyp") && u32_be(bytes, 0).is_some_and(is_longer)
}

fn unknown_format(bytes: &[u8]) -> DecodeError {
    const EXPECTED: &str = "expected a JPEG, PNG, WebP, GIF, BMP or TIFF";
    match content_name(bytes) {
        _ if bytes.len() < 12 || brands_continue(bytes) => DecodeError::truncated("image", bytes.len()),
        Some(name) => DecodeError::unsupported("image", format!("it is {name}; {EXPECTED}")),
        None => DecodeError::malformed("image", 0, EXPECTED),
    }
}

fn image_size(format: ImageFormat, bytes: &[u8]) -> Result<ImageSize, DecodeError> {
    use imagesize::ImageError;
    if format == ImageFormat::Bmp {
        let (width, height) =
            bmp_size(bytes).ok_or_else(|| DecodeError::truncated(format.name(), bytes.len()))?;
        return Ok(ImageSize { width, height });
    }
    match imagesize::blob_size(bytes) {
        Ok(size) => match (u32::try_from(size.width), u32::try_from(size.height)) {
            (Ok(width), Ok(height)) => Ok(ImageSize { width, height }),
            _ => Err(DecodeError::malformed(format.name(), 0, "a side of the image exceeds 32 bits")),
        },
        Err(ImageError::IoError(_) | ImageError::CorruptedImage) => {
            Err(DecodeError::truncated(format.name(), bytes.len()))
        }
        Err(ImageError::NotSupported) => {
            Err(DecodeError::malformed(format.name(), 0, "the header declares no image size"))
        }
    }
}

/// Returns whether a PNG ends before the pixels, so that only the size may be known.
pub(crate) fn ends_before_pixels(bytes: &[u8]) -> bool {
    ImageFormat::from_bytes(bytes) == Some(ImageFormat::Png) && png::ends_before_pixels(bytes)
}

/// Returns the orientation in the `EXIF` and `XMP` chunks, which follow the pixels, if the header announces
/// them.
fn webp_orientation(bytes: &[u8]) -> Result<Orientation, DecodeError> {
    const EXIF_FLAG: u8 = 0x08;
    const XMP_FLAG: u8 = 0x04;
    let flags = bytes.get(20).copied().unwrap_or(0);
    if bytes.get(12..16) != Some(b"VP8X") || flags & (EXIF_FLAG | XMP_FLAG) == 0 {
        return Ok(Orientation::NoTransforms);
    }
    let of_exif = match flags & EXIF_FLAG {
        0 => None,
        _ => tiff::orientation_of_exif(webp_chunk(bytes, *b"EXIF")?),
    };
    let of_xmp = match (of_exif, flags & XMP_FLAG) {
        (None, 1..) => tiff::orientation_of_xmp(webp_chunk(bytes, *b"XMP ")?),
        _ => None,
    };
    Ok(of_exif.or(of_xmp).unwrap_or(Orientation::NoTransforms))
}

/// Returns the chunk with this name, which the header announces.
fn webp_chunk(bytes: &[u8], wanted: [u8; 4]) -> Result<&[u8], DecodeError> {
    let ended = || DecodeError::truncated("webp", bytes.len());
    let mut position = 12;
    loop {
        let name = bytes.get(position..position + 4).ok_or_else(ended)?;
        let length = u32_le(bytes, position + 4).ok_or_else(ended)? as usize;
        let start = position + 8;
        if name == wanted {
            return bytes.get(start..start + length).ok_or_else(ended);
        }
        // RIFF chunks are padded to an even length.
        position = start + length + (length & 1);
    }
}

/// Reads the size of a BMP image, whose height is negative if the top row comes first.
fn bmp_size(bytes: &[u8]) -> Option<(u32, u32)> {
    const CORE_HEADER_BYTES: u32 = 12;
    if u32_le(bytes, 14)? == CORE_HEADER_BYTES {
        return Some((u16_le(bytes, 18)?.into(), u16_le(bytes, 20)?.into()));
    }
    Some((u32_le(bytes, 18)?, u32_le(bytes, 22)?.cast_signed().unsigned_abs()))
}

const FORMAT: &str = "gif";
/// Color table flag, and color table size bits.
const TABLE_FLAG: u8 = 0x80;
const TABLE_SIZE: u8 = 0x07;

/// Returns the canvas size, which grows with a first frame that exceeds the canvas.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end before the first frame.
pub(super) fn displayed_size(bytes: &[u8]) -> Result<ImageSize, DecodeError> {
    let ended = || DecodeError::truncated(FORMAT, bytes.len());
    let side = |at: usize| u16_le(bytes, at).map(u32::from).ok_or_else(ended);
    let canvas = (side(6)?, side(8)?);
    let flags = *bytes.get(10).ok_or_else(ended)?;
    let table_bytes = if flags & TABLE_FLAG == 0 { 0 } else { 3 << ((flags & TABLE_SIZE) + 1) };
    let mut position = 13 + table_bytes;
    loop {
        match *bytes.get(position).ok_or_else(ended)? {
            b'!' => position = blocks_end(bytes, position + 2).ok_or_else(ended)?,
            b',' => break,
            _ => return Err(DecodeError::malformed(FORMAT, position, "there is no frame")),
        }
    }
    let frame_flags = *bytes.get(position + 9).ok_or_else(ended)?;
    if (flags | frame_flags) & TABLE_FLAG == 0 {
        return Err(DecodeError::unsupported(FORMAT, "a frame without a table of colors"));
    }
    let right = side(position + 1)? + side(position + 5)?;
    let bottom = side(position + 3)? + side(position + 7)?;
    Ok(ImageSize { width: canvas.0.max(right), height: canvas.1.max(bottom) })
}

/// Returns the offset after a list of length-prefixed blocks, which ends with an empty block.
fn blocks_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut position = from;
    loop {
        match usize::from(*bytes.get(position)?) {
            0 => return Some(position + 1),
            length => position += 1 + length,
        }
    }
}
