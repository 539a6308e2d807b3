//! Images: JPEG, PNG, WebP, GIF, BMP, TIFF, with the feature `avif` AVIF, recognized by content. Other image
//! extensions are claimed as well, so that an undecodable field is rejected by name instead of ignored.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::probe::{ImageFormat, ends_before_pixels, image_header};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, decode_rgb};

/// Extensions of decoded formats, then of formats that are not decoded.
const EXTENSIONS: [&str; 54] = [
    "jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "mpo", "avif",
    "avifs", "heic", "heics", "heif", "heifs", "hif", "jp2", "j2k", "j2c", "jpc", "jpf", "jpx", "jpm", "jxl",
    "jxr", "wdp", "svg", "svgz", "ico", "cur", "icns", "psd", "psb", "exr", "hdr", "tga", "pcx", "dds",
    "qoi", "ppm", "pgm", "pbm", "pnm", "pam", "dng", "cr2", "cr3", "nef", "arw", "raf",
];
/// Number of extensions with decoded formats.
const DECODED: usize = if cfg!(feature = "avif") { 15 } else { 13 };

/// Image codec; an animation is represented by the first frame.
#[derive(Debug)]
pub(super) struct ImageCodec;

impl Codec for ImageCodec {
    fn name(&self) -> &'static str {
        "image"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &EXTENSIONS
    }

    fn content(&self) -> Content {
        Content::Medium(Modality::Image)
    }

    fn decoded_extensions(&self) -> &'static [&'static str] {
        &EXTENSIONS[..DECODED]
    }

    fn payload(&self) -> Payload {
        Payload::Prefix
    }

    /// Only JPEG always stores the orientation before the pixels; the AVIF orientation is part of the header.
    fn is_settled(&self, prefix: &[u8]) -> bool {
        matches!(ImageFormat::from_bytes(prefix), Some(ImageFormat::Jpeg | ImageFormat::Avif))
    }

    fn probe(&self, prefix: &[u8], field_bytes: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        let header = image_header(prefix)?;
        if (prefix.len() as u64) < field_bytes && ends_before_pixels(prefix) {
            return Err(DecodeError::PrefixTooShort { prefix_bytes: prefix.len() as u64 });
        }
        Ok(MediaShape::Image(header.display_size()))
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_rgb(&bytes, &limits.image).map(Media::Image)
    }
}
