//! Defines decoder memory limits and the accepted damage.

use super::error::DecodeError;
use super::video::VideoLimits;

/// Treatment for damaged media that are partly readable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// Any damage is an error, even if all pixels and frames can be decoded.
    Strict,
    /// A medium that ends too early is an error; damage inside is not, as in Pillow with default settings,
    /// and is flagged as truncated where pixels are invented. The default.
    #[default]
    Standard,
    /// The readable part is delivered and flagged as truncated.
    Lenient,
}

/// Limits for [`decode_rgb`](super::decode_rgb), all checked before memory of that size is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Maximum width x height in pixels. Default: 89,478,485 pixels, which are 256 MiB as RGB.
    pub pixels_max: u64,
    /// Maximum number of bytes that a decoder may allocate for an image. Default: 1 GiB.
    pub alloc_bytes_max: u64,
    /// Treatment for damaged JPEGs. Files in other formats have to be complete.
    pub strictness: Strictness,
    /// Whether the EXIF orientation is applied. Default: true.
    pub is_orientation_applied: bool,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            pixels_max: 89_478_485,
            alloc_bytes_max: 1 << 30,
            strictness: Strictness::default(),
            is_orientation_applied: true,
        }
    }
}

/// Limits for [`decode_audio`](super::decode_audio).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioLimits {
    /// Maximum number of bytes for f32 samples, over all channels. Default: 256 MiB, 70 minutes of 16 kHz
    /// mono.
    pub decoded_bytes_max: u64,
    /// Maximum number of channels. Default: 64.
    pub channels_max: u16,
    /// Whether damage found by checksums or frame counts is an error. A WAV, MP3 or Ogg stream that merely
    /// ends early is delivered and flagged in both modes, because the available part is intact.
    pub strictness: Strictness,
}

impl Default for AudioLimits {
    fn default() -> Self {
        Self { decoded_bytes_max: 256 << 20, channels_max: 64, strictness: Strictness::default() }
    }
}

/// Limits for [`decode`](super::decode), by modality.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeLimits {
    /// Limits for images.
    pub image: ImageLimits,
    /// Limits for audio.
    pub audio: AudioLimits,
    /// Limits for video, with the feature `video`.
    pub video: VideoLimits,
    /// Maximum size of a text or JSON document in bytes. Default: 64 MiB.
    pub text_bytes_max: u64,
}

impl Default for DecodeLimits {
    fn default() -> Self {
        Self {
            image: ImageLimits::default(),
            audio: AudioLimits::default(),
            video: VideoLimits::default(),
            text_bytes_max: 64 << 20,
        }
    }
}

/// Returns an error if `actual` exceeds the named limit.
pub(super) fn check_limit(
    format: &'static str,
    actual: u64,
    unit: &'static str,
    limit: &'static str,
    limit_value: u64,
) -> Result<(), DecodeError> {
    if actual > limit_value {
        return Err(DecodeError::TooLarge { format, actual, unit, limit, limit_value });
    }
    Ok(())
}
