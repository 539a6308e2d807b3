//! Rows of pixels of any type.
//!
//! For an animation, the first frame is decoded. Palettes are looked up, 16 bits become 8, gray is repeated,
//! alpha is dropped without blending, as in Pillow's `convert("RGB")`. Checksums of critical PNG chunks are
//! verified; a PNG may end without the last chunk.
//!
//! The first frame in a WebP file must not be larger than the canvas: the extended header states the canvas
//! size, each frame the frame size, and the decoder allocates for the frame.

use super::RgbImage;
use crate::media::DecodeError;
use crate::media::probe::ImageFormat;
use crate::media::probe::field::{u16_le, u32_le};
use crate::media::shape::{ImageLimits, check_limit};
use bytemuck::Pod;
use half::bf16;
use image::{ColorType, DynamicImage, ImageDecoder, ImageReader, Limits};
use std::io::Cursor;

/// The last PNG chunk.
const PNG_END: &[u8] = b"\0\0\0\0IEND\xae\x42\x60\x82";

/// Decodes the stored image, without its orientation, into `image`.
///
/// `format` must not be JPEG, GIF or AVIF, which have separate decoders.
pub(super) fn decode_into(
    bytes: &[u8],
    format: ImageFormat,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    match decode_whole(bytes, format, limits, image) {
        Err(DecodeError::Truncated { .. }) if format == ImageFormat::Png => {
            let ended = [bytes, PNG_END].concat();
            let decoded = decode_whole(&ended, format, limits, image);
            decoded.map_err(|_| DecodeError::truncated(format.name(), bytes.len()))
        }
        decoded => decoded,
    }
}

fn decode_whole(
    bytes: &[u8],
    format: ImageFormat,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), crate_format(format));
    let mut decoder_limits = Limits::default();
    decoder_limits.max_alloc = Some(limits.alloc_bytes_max);
    reader.limits(decoder_limits);
    let refusal = |error: image::ImageError| refusal(error, format, bytes.len());
    let decoder = reader.into_decoder().map_err(refusal)?;
    let (width, height) = decoder.dimensions();
    super::check_pixels(format, width, height, limits)?;
    if format == ImageFormat::WebP {
        check_first_frame(bytes, width, height)?;
    }
    check_limit(
        format.name(),
        decoder.total_bytes(),
        "decoded bytes",
        "alloc_bytes_max",
        limits.alloc_bytes_max,
    )?;
    if decoder.color_type() == ColorType::Rgb8 {
        image.pixels.resize(decoder.total_bytes() as usize, 0);
        decoder.read_image(&mut image.pixels).map_err(refusal)?;
    } else {
        image.pixels = DynamicImage::from_decoder(decoder).map_err(refusal)?.into_rgb8().into_raw();
    }
    (image.width, image.height, image.is_truncated) = (width, height, false);
    Ok(())
}

fn crate_format(format: ImageFormat) -> image::ImageFormat {
    match format {
        ImageFormat::Jpeg => image::ImageFormat::Jpeg,
        ImageFormat::Png => image::ImageFormat::Png,
        ImageFormat::WebP => image::ImageFormat::WebP,
        ImageFormat::Gif => image::ImageFormat::Gif,
        ImageFormat::Bmp => image::ImageFormat::Bmp,
        ImageFormat::Tiff => image::ImageFormat::Tiff,
        ImageFormat::Avif => image::ImageFormat::Avif,
    }
}

fn refusal(error: image::ImageError, format: ImageFormat, bytes: usize) -> DecodeError {
    use image::ImageError;
    match error {
        ImageError::Unsupported(what) => DecodeError::unsupported(format.name(), what.to_string()),
        ImageError::IoError(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
            DecodeError::truncated(format.name(), bytes)
        }
        other => DecodeError::codec(format.name(), other),
    }
}

/// Length of an animation frame header in bytes, before the frame's chunks.
const FRAME_HEADER_BYTES: usize = 16;

/// Checks the first frame.
///
/// # Errors
/// [`DecodeError::Malformed`] with the offset of a frame that exceeds the canvas.
fn check_first_frame(bytes: &[u8], width: u32, height: u32) -> Result<(), DecodeError> {
    match first_frame(bytes) {
        Some((offset, frame)) if frame.0 > width || frame.1 > height => {
            let reason = "a frame is larger than the canvas";
            Err(DecodeError::malformed("webp", offset, reason))
        }
        _ => Ok(()),
    }
}

/// Returns offset and size of the first frame; `None` without a frame, which the decoder rejects.
fn first_frame(bytes: &[u8]) -> Option<(usize, (u32, u32))> {
    let mut position = 12;
    loop {
        let length = u32_le(bytes, position + 4)? as usize;
        let start = position + 8;
        match bytes.get(position..position + 4)? {
            b"VP8 " => {
                // Frame tag with three bytes, start code with three bytes, then 14 bits each, below two
                // scaling bits.
                let side = |at| Some(u32::from(u16_le(bytes, at)? & 0x3fff));
                return Some((position, (side(start + 6)?, side(start + 8)?)));
            }
            b"VP8L" => {
                // A signature byte, then 14 bits each, minus 1.
                let sides = u32_le(bytes, start + 1)?;
                return Some((position, ((sides & 0x3fff) + 1, ((sides >> 14) & 0x3fff) + 1)));
            }
            b"ANMF" => position = start + FRAME_HEADER_BYTES,
            _ => position = start.checked_add(length)?.checked_add(length & 1)?,
        }
    }
}

/// Pixel value type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelType {
    /// Normalized, in single precision, as from the Hugging Face processors.
    #[default]
    Float32,
    /// Normalized, rounded to the nearest bfloat16: half the memory.
    BFloat16,
    /// Resized bytes, not normalized: a quarter of the memory.
    UInt8,
}

impl PixelType {
    /// Returns the bytes per value.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 => 2,
            Self::UInt8 => 1,
        }
    }
}

/// Axis order of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `[3, height, width]`, as PyTorch models accept images.
    #[default]
    ChannelsFirst,
    /// `[height, width, 3]`, the memory order in JAX, TensorFlow, and PyTorch's `channels_last`.
    ChannelsLast,
}

/// Value type and memory order for images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PixelFormat {
    /// Value type.
    pub pixels: PixelType,
    /// Axis order.
    pub layout: PixelLayout,
}

/// Pixel values with any type, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum PixelBuffer {
    /// Normalized, in single precision.
    F32(Vec<f32>),
    /// Normalized, rounded to half the bits.
    Bf16(Vec<bf16>),
    /// Bytes.
    U8(Vec<u8>),
}

impl Default for PixelBuffer {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

impl PixelBuffer {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
        }
    }

    /// Returns whether there are no values, as for images that were only counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates zeros with the same type.
    #[must_use]
    pub fn zeros(&self, len: usize) -> Self {
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::Bf16(_) => Self::Bf16(vec![bf16::ZERO; len]),
            Self::U8(_) => Self::U8(vec![0; len]),
        }
    }

    /// Returns the values in single precision; empty for any other type.
    #[must_use]
    pub fn f32(&self) -> &[f32] {
        match self {
            Self::F32(values) => values,
            Self::Bf16(_) | Self::U8(_) => &[],
        }
    }
}

/// A pixel value; the default is the tile padding value.
pub trait Pixel: Pod + Default + Send {
    /// Converts a byte with a known normalized value.
    fn of(byte: u8, normalized: f32) -> Self;

    /// Wraps values of this type in a buffer.
    fn buffer(values: Vec<Self>) -> PixelBuffer;

    /// Returns the values from a buffer with this type.
    fn values(buffer: PixelBuffer) -> Option<Vec<Self>>;
}

impl Pixel for f32 {
    #[inline]
    fn of(_: u8, normalized: f32) -> Self {
        normalized
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::F32(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::F32(values) => Some(values),
            _ => None,
        }
    }
}

impl Pixel for bf16 {
    #[inline]
    fn of(_: u8, normalized: f32) -> Self {
        Self::from_f32(normalized)
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::Bf16(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::Bf16(values) => Some(values),
            _ => None,
        }
    }
}

impl Pixel for u8 {
    #[inline]
    fn of(byte: u8, _: f32) -> Self {
        byte
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::U8(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::U8(values) => Some(values),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an extended file with a canvas of 100 x 100 pixels and a single lossy frame.
    fn extended(width: u16, height: u16, is_animated: bool) -> Vec<u8> {
        let mut frame = b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a".to_vec();
        frame.extend([width.to_le_bytes(), height.to_le_bytes()].concat());
        if is_animated {
            let length = (FRAME_HEADER_BYTES + frame.len()) as u32;
            frame = [b"ANMF", &length.to_le_bytes()[..], &[0; FRAME_HEADER_BYTES], &frame].concat();
        }
        let canvas = b"VP8X\x0a\0\0\0\0\0\0\0\x63\0\0\x63\0\0";
        [b"RIFF\0\0\0\0WEBP", &canvas[..], &frame].concat()
    }

    #[test]
    fn a_frame_larger_than_the_canvas_is_refused() {
        for is_animated in [false, true] {
            let check = |width, height| check_first_frame(&extended(width, height, is_animated), 100, 100);
            assert!(check(100, 100).is_ok());
            assert!(check(16_383, 16_383).unwrap_err().to_string().contains("larger than the canvas"));
            assert!(check(1, 101).is_err());
        }
        let lossless = b"RIFF\0\0\0\0WEBPVP8L\x05\0\0\0\x2f\xff\xff\xff\x0f";
        assert_eq!(first_frame(lossless), Some((12, (16_384, 16_384))));
        assert_eq!(first_frame(&lossless[..18]), None);
    }
}
