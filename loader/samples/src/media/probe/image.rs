//! Reads the format, size and orientation of an image.

use image::metadata::Orientation;

use super::exif::swaps_sides;
use super::field::{u16_le, u32_be, u32_le};
use super::{ImageSize, exif, jpeg};
use crate::media::error::DecodeError;

/// An image format that [`crate::media::decode_rgb`] reads, recognized by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant is named after its format")]
pub enum ImageFormat {
    Jpeg,
    Png,
    WebP,
    Gif,
    Bmp,
    Tiff,
}

impl ImageFormat {
    /// Recognizes the format by its first 12 bytes, or returns `None`.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0xFF, 0xD8, 0xFF, ..] => Some(Self::Jpeg),
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1A, b'\n', ..] => Some(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'B', b'M', ..] => Some(Self::Bmp),
            [b'I', b'I', b'*', 0, ..] | [b'M', b'M', 0, b'*', ..] => Some(Self::Tiff),
            _ => None,
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
        }
    }
}

/// Size and orientation from the header of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImageHeader {
    pub(crate) format: ImageFormat,
    /// Size as stored.
    pub(crate) stored: ImageSize,
    /// Rotation and mirroring that display the stored image upright.
    pub(crate) orientation: Orientation,
}

impl ImageHeader {
    /// Returns the size after the orientation is applied.
    pub(crate) fn display_size(&self) -> ImageSize {
        let ImageSize { width, height } = self.stored;
        if swaps_sides(self.orientation) { ImageSize { width: height, height: width } } else { self.stored }
    }
}

/// Reads the header of an image.
///
/// # Errors
/// [`DecodeError::Truncated`] if the bytes end inside the header, [`DecodeError::Malformed`] if their format
/// is unknown or a side is 0.
pub(crate) fn image_header(bytes: &[u8]) -> Result<ImageHeader, DecodeError> {
    let format = ImageFormat::from_bytes(bytes).ok_or_else(|| unknown_format(bytes))?;
    let (stored, orientation) = if format == ImageFormat::Jpeg {
        let header = jpeg::read_jpeg_header(bytes)?;
        (ImageSize { width: header.width, height: header.height }, header.orientation)
    } else {
        let size = size_of(format, bytes)?;
        (size, orientation_of(format, bytes)?)
    };
    if stored.width == 0 || stored.height == 0 {
        return Err(DecodeError::malformed(format.name(), 0, "a side of the image is 0"));
    }
    Ok(ImageHeader { format, stored, orientation })
}

fn unknown_format(bytes: &[u8]) -> DecodeError {
    if bytes.len() < 12 {
        DecodeError::truncated("image", bytes.len())
    } else {
        DecodeError::malformed("image", 0, "expected a JPEG, PNG, WebP, GIF, BMP or TIFF")
    }
}

fn size_of(format: ImageFormat, bytes: &[u8]) -> Result<ImageSize, DecodeError> {
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

fn orientation_of(format: ImageFormat, bytes: &[u8]) -> Result<Orientation, DecodeError> {
    let found = match format {
        // A file that ends before its pixels has a size all the same.
        ImageFormat::Png => png_exif(bytes).ok().flatten().and_then(exif::orientation_of_tiff),
        ImageFormat::WebP => webp_exif(bytes)?.and_then(exif::orientation_of_tiff),
        ImageFormat::Tiff => exif::orientation_of_tiff(bytes),
        ImageFormat::Jpeg | ImageFormat::Gif | ImageFormat::Bmp => None,
    };
    Ok(found.unwrap_or(Orientation::NoTransforms))
}

/// Returns whether a PNG ends before its pixels, so that its orientation is still unknown.
pub(crate) fn ends_before_pixels(bytes: &[u8]) -> bool {
    ImageFormat::from_bytes(bytes) == Some(ImageFormat::Png) && png_exif(bytes).is_err()
}

/// Returns the `eXIf` chunk, if one precedes the pixels.
fn png_exif(bytes: &[u8]) -> Result<Option<&[u8]>, DecodeError> {
    let ended = || DecodeError::truncated("png", bytes.len());
    let mut position = 8;
    loop {
        let length = u32_be(bytes, position).ok_or_else(ended)? as usize;
        match bytes.get(position + 4..position + 8).ok_or_else(ended)? {
            b"eXIf" => return bytes.get(position + 8..position + 8 + length).ok_or_else(ended).map(Some),
            b"IDAT" | b"IEND" => return Ok(None),
            _ => position += length + 12,
        }
    }
}

/// Returns the `EXIF` chunk, which follows the pixels, if the header announces one.
fn webp_exif(bytes: &[u8]) -> Result<Option<&[u8]>, DecodeError> {
    const EXIF_FLAG: u8 = 0x08;
    if bytes.get(12..16) != Some(b"VP8X") || bytes.get(20).is_none_or(|flags| flags & EXIF_FLAG == 0) {
        return Ok(None);
    }
    let ended = || DecodeError::truncated("webp", bytes.len());
    let mut position = 12;
    loop {
        let name = bytes.get(position..position + 4).ok_or_else(ended)?;
        let length = u32_le(bytes, position + 4).ok_or_else(ended)? as usize;
        let start = position + 8;
        if name == b"EXIF" {
            let chunk = bytes.get(start..start + length).ok_or_else(ended)?;
            // Some writers copy the prefix of the JPEG segment into the chunk.
            return Ok(Some(chunk.strip_prefix(b"Exif\0\0").unwrap_or(chunk)));
        }
        // RIFF chunks are padded to an even length.
        position = start + length + (length & 1);
    }
}

/// Reads the size of a BMP, whose height is negative if the top row comes first.
fn bmp_size(bytes: &[u8]) -> Option<(u32, u32)> {
    const CORE_HEADER_BYTES: u32 = 12;
    if u32_le(bytes, 14)? == CORE_HEADER_BYTES {
        return Some((u16_le(bytes, 18)?.into(), u16_le(bytes, 20)?.into()));
    }
    Some((u32_le(bytes, 18)?, u32_le(bytes, 22)?.cast_signed().unsigned_abs()))
}
