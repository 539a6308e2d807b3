//! Images: JPEG, PNG, WebP, GIF, BMP, TIFF, with the feature `avif` AVIF, recognized by their content. Other
//! images are claimed as well, so that a field that no decoder reads is refused by its name instead of passed
//! over.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::probe::{ImageFormat, ends_before_pixels, image_header};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, decode_rgb};

/// Extensions of formats that are decoded, then of those that are not.
const EXTENSIONS: [&str; 54] = [
    "jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "mpo", "avif",
    "avifs", "heic", "heics", "heif", "heifs", "hif", "jp2", "j2k", "j2c", "jpc", "jpf", "jpx", "jpm", "jxl",
    "jxr", "wdp", "svg", "svgz", "ico", "cur", "icns", "psd", "psb", "exr", "hdr", "tga", "pcx", "dds",
    "qoi", "ppm", "pgm", "pbm", "pnm", "pam", "dng", "cr2", "cr3", "nef", "arw", "raf",
];
/// Number of the extensions whose formats are decoded.
const DECODED: usize = if cfg!(feature = "avif") { 15 } else { 13 };

/// Codec of images; an animation is its first frame.
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

    /// Only a JPEG stores its orientation before the pixels in any case; that of AVIF is part of the header.
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
