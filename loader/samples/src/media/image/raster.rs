//! Decodes PNG, WebP, BMP and the usual kinds of TIFF to RGB.
//!
//! For an animation, the first frame is decoded. Palettes are looked up, 16 bits become 8, gray is repeated,
//! alpha is dropped without blending, as in Pillow's `convert("RGB")`. Checksums of critical PNG chunks are
//! verified; a PNG may end without the last chunk.

use std::io::Cursor;

use image::{ColorType, DynamicImage, ImageDecoder, ImageReader, Limits};

use super::RgbImage;
use crate::media::error::DecodeError;
use crate::media::limits::{ImageLimits, check_limit};
use crate::media::probe::ImageFormat;

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
        super::webp::check_first_frame(bytes, width, height)?;
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
