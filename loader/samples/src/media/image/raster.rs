//! Rows of pixels of any type.
//!
//! Image parts, and their resampling.
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
use dflop_costmodel::ImageSize;
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use half::bf16;
use image::metadata::Orientation;
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

    /// Copies a range of values.
    ///
    /// # Panics
    /// If the range ends after the values.
    #[must_use]
    pub fn range(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(values[range].to_vec()),
            Self::Bf16(values) => Self::Bf16(values[range].to_vec()),
            Self::U8(values) => Self::U8(values[range].to_vec()),
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

impl RgbImage {
    /// Returns the image in another size, bilinear and antialiased.
    ///
    /// # Errors
    /// [`DecodeError::Codec`] if the resizer rejects the sizes.
    pub fn resized(&self, size: ImageSize) -> Result<RgbImage, DecodeError> {
        let whole =
            CropBox { left: 0.0, top: 0.0, width: f64::from(self.width), height: f64::from(self.height) };
        resize_owned(self, whole, size)
    }
}

/// Cuts a rectangle out of an image and resizes the rectangle.
pub(crate) fn resize_crop(image: &RgbImage, crop: Crop, size: ImageSize) -> Result<RgbImage, DecodeError> {
    resize_owned(image, CropBox::from(crop), size)
}

fn resize_owned(image: &RgbImage, part: CropBox, size: ImageSize) -> Result<RgbImage, DecodeError> {
    let mut pixels = vec![0; 3 * size.width as usize * size.height as usize];
    resize_part(&mut Resizer::new(), image, part, size, &mut pixels)?;
    Ok(RgbImage { width: size.width, height: size.height, pixels, is_truncated: image.is_truncated })
}

/// Resamples the image part `part` to `size`, bilinear and antialiased.
///
/// - `out`: `[size.height, size.width, 3]`, overwritten
pub(super) fn resize_part(
    resizer: &mut Resizer,
    image: &RgbImage,
    part: CropBox,
    size: ImageSize,
    out: &mut [u8],
) -> Result<(), DecodeError> {
    let refusal = |error: &dyn std::fmt::Display| DecodeError::codec("image", error.to_string());
    let source = TypedImageRef::<U8x3>::from_buffer(image.width, image.height, &image.pixels)
        .map_err(|error| refusal(&error))?;
    let mut target =
        TypedImage::<U8x3>::from_buffer(size.width, size.height, out).map_err(|error| refusal(&error))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).crop(
        part.left,
        part.top,
        part.width,
        part.height,
    );
    resizer.resize_typed(&source, &mut target, &options).map_err(|error| refusal(&error))
}

/// Nonempty rectangle inside an image, in whole pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crop {
    pub(crate) left: u32,
    pub(crate) top: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// Part of an image, in fractional pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CropBox {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl From<Crop> for CropBox {
    fn from(crop: Crop) -> Self {
        let [left, top, width, height] = [crop.left, crop.top, crop.width, crop.height].map(f64::from);
        Self { left, top, width, height }
    }
}

impl CropBox {
    /// Returns the part that a center crop keeps.
    ///
    /// The part is defined by resizing to whole pixels with the shorter side at `side`, then cropping around
    /// the center, as torchvision does; only this part needs to be resampled.
    pub(super) fn center(size: ImageSize, side: u32) -> Self {
        let scale = f64::from(side) / f64::from(size.width.min(size.height));
        let [(left, width), (top, height)] = [size.width, size.height].map(|length| {
            let length = f64::from(length);
            let resized = (length * scale).round_ties_even().max(f64::from(side));
            let margin = (resized - f64::from(side)) / 2.0;
            let start = margin / resized * length;
            let end = ((margin + f64::from(side)) / resized * length).min(length);
            (start, end - start)
        });
        Self { left, top, width, height }
    }

    /// Returns the same part in the stored image, before the orientation is applied.
    pub(super) fn to_stored(self, stored: ImageSize, orientation: Orientation) -> Self {
        let (width, height) = (f64::from(stored.width), f64::from(stored.height));
        let point = |x: f64, y: f64| match orientation {
            Orientation::NoTransforms => (x, y),
            Orientation::FlipHorizontal => (width - x, y),
            Orientation::Rotate180 => (width - x, height - y),
            Orientation::FlipVertical => (x, height - y),
            Orientation::Rotate90 => (y, height - x),
            Orientation::Rotate270 => (width - y, x),
            Orientation::Rotate90FlipH => (y, x),
            Orientation::Rotate270FlipH => (width - y, height - x),
        };
        let (x0, y0) = point(self.left, self.top);
        let (x1, y1) = point(self.left + self.width, self.top + self.height);
        Self { left: x0.min(x1), top: y0.min(y1), width: (x1 - x0).abs(), height: (y1 - y0).abs() }
    }

    /// Returns the same part in an image that was decoded at a reduced size.
    pub(super) fn in_decoded(self, stored: ImageSize, decoded: ImageSize) -> Self {
        let scale_x = f64::from(decoded.width) / f64::from(stored.width);
        let scale_y = f64::from(decoded.height) / f64::from(stored.height);
        let (left, top) = (self.left * scale_x, self.top * scale_y);
        let width = (self.width * scale_x).min(f64::from(decoded.width) - left);
        let height = (self.height * scale_y).min(f64::from(decoded.height) - top);
        Self { left, top, width, height }
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

    #[test]
    fn the_center_is_cut_from_the_longer_side() {
        let center = CropBox::center(ImageSize { width: 448, height: 224 }, 224);
        assert_eq!(center, CropBox { left: 112.0, top: 0.0, width: 224.0, height: 224.0 });
    }

    #[test]
    fn a_corner_of_the_shown_image_is_found_in_the_stored_one() {
        let stored = ImageSize { width: 40, height: 20 };
        let corner = CropBox { left: 0.0, top: 0.0, width: 2.0, height: 1.0 };
        let table = [
            (Orientation::NoTransforms, [0.0, 0.0, 2.0, 1.0]),
            (Orientation::FlipHorizontal, [38.0, 0.0, 2.0, 1.0]),
            (Orientation::Rotate180, [38.0, 19.0, 2.0, 1.0]),
            (Orientation::FlipVertical, [0.0, 19.0, 2.0, 1.0]),
            (Orientation::Rotate90, [0.0, 18.0, 1.0, 2.0]),
            (Orientation::Rotate270, [39.0, 0.0, 1.0, 2.0]),
            (Orientation::Rotate90FlipH, [0.0, 0.0, 1.0, 2.0]),
            (Orientation::Rotate270FlipH, [39.0, 18.0, 1.0, 2.0]),
        ];
        for (orientation, [left, top, width, height]) in table {
            let found = corner.to_stored(stored, orientation);
            assert_eq!(found, CropBox { left, top, width, height }, "{orientation:?}");
        }
    }

    #[test]
    fn a_reduced_image_has_the_same_part() {
        let whole = CropBox { left: 0.0, top: 3.0, width: 9.0, height: 4.0 };
        let (stored, decoded) = (ImageSize { width: 9, height: 7 }, ImageSize { width: 5, height: 4 });
        let found = whole.in_decoded(stored, decoded);
        assert!((found.width - 5.0).abs() < 1e-9 && (found.top + found.height - 4.0).abs() < 1e-9);
    }
}
