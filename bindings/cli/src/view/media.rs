//! Recognizes media by their bytes, and scales images down.

use dflop_loader::media::probe::{AudioFormat, ImageFormat};
use dflop_loader::media::{ImageLimits, Modality, decode_rgb, extension_modality};

use crate::report::collect::shrunk_jpeg;

/// Bytes that a format is recognized by.
pub(super) const PREFIX_BYTES: u64 = 4_096;
/// Longer sides in pixels for scaled images, and the JPEG qualities.
pub(super) const THUMBNAIL: (u32, u8) = (144, 70);
pub(super) const RENDERED: (u32, u8) = (1_600, 85);

/// Returns the content type of a medium that browsers show; `None` for everything else, documents that
/// contain scripts (HTML, SVG) above all, which is then only downloaded.
///
/// - `extension`: field extension; `prefix`: first field bytes
pub(super) fn content_type(extension: &str, prefix: &[u8]) -> Option<&'static str> {
    match extension_modality(extension)? {
        Modality::Image => match ImageFormat::from_bytes(prefix)? {
            ImageFormat::Jpeg => Some("image/jpeg"),
            ImageFormat::Png => Some("image/png"),
            ImageFormat::WebP => Some("image/webp"),
            ImageFormat::Gif => Some("image/gif"),
            ImageFormat::Bmp => Some("image/bmp"),
            ImageFormat::Avif => Some("image/avif"),
            ImageFormat::Tiff => None,
        },
        // A tag may be longer than the prefix.
        Modality::Audio if prefix.starts_with(b"ID3") => Some("audio/mpeg"),
        Modality::Audio => match AudioFormat::from_bytes(prefix)? {
            AudioFormat::Wav => Some("audio/wav"),
            AudioFormat::Aiff => Some("audio/aiff"),
            AudioFormat::Au => Some("audio/basic"),
            AudioFormat::Flac => Some("audio/flac"),
            AudioFormat::Mp3 => Some("audio/mpeg"),
            AudioFormat::Ogg => Some("audio/ogg"),
        },
        Modality::Video => match prefix {
            [_, _, _, _, b'f', b't', b'y', b'p', ..] => Some("video/mp4"),
            [0x1A, 0x45, 0xDF, 0xA3, ..] => Some("video/webm"),
            _ => None,
        },
    }
}

/// Decodes an image and scales it down to a JPEG.
///
/// # Errors
/// Why the image cannot be decoded or scaled.
pub(super) fn scaled(payload: &[u8], (side, quality): (u32, u8)) -> Result<Vec<u8>, String> {
    let image = decode_rgb(payload, &ImageLimits::default()).map_err(|error| error.to_string())?;
    shrunk_jpeg(&image, side, quality).ok_or_else(|| "the image cannot be scaled".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_media_get_a_type_that_browsers_show() {
        assert_eq!(content_type("jpg", &[0xFF, 0xD8, 0xFF, 0xE0]), Some("image/jpeg"));
        assert_eq!(content_type("png", &[0xFF, 0xD8, 0xFF, 0xE0]), Some("image/jpeg"));
        assert_eq!(content_type("mp3", b"ID3\x04\0\0\0\0\x7F\x7F"), Some("audio/mpeg"));
        assert_eq!(content_type("mp4", b"\0\0\0\x18ftypmp42"), Some("video/mp4"));
        for (extension, bytes) in [
            ("html", &b"<script>alert(1)</script>"[..]),
            ("svg", b"<svg onload='alert(1)'/>"),
            ("jpg", b"<svg onload='alert(1)'/>"),
            ("jpg", b"<!DOCTYPE html><script>"),
            ("txt", b"BMW"),
            ("json", b"GIF89a"),
            ("mp4", b"RIFF"),
        ] {
            assert_eq!(content_type(extension, bytes), None, "{extension}");
        }
    }

    #[test]
    fn a_broken_image_has_a_reason() {
        assert!(scaled(b"no image", THUMBNAIL).unwrap_err().contains("image"));
    }
}
