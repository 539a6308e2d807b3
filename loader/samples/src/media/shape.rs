//! Shapes of media, and limits on what is decoded.

use super::DecodeError;
use super::video::VideoLimits;
use dflop_costmodel::{AudioLength, ImageSize, Module, SampleShape, VideoShape};
use serde::{Deserialize, Serialize};

/// Number of integers that hold any shape.
pub const SHAPE_NUMBERS: usize = 3;

/// Text length in tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TextLength {
    /// Number of tokens in the text.
    pub tokens: u32,
    /// Number of tokens in the loss; at most `tokens`.
    pub target_tokens: u32,
}

/// Shape of the medium in a field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MediaShape {
    /// No codec claims the field, or the content has no cost.
    #[default]
    Opaque,
    /// An image as displayed, or the first animation frame.
    Image(ImageSize),
    /// An audio clip.
    Audio(AudioLength),
    /// A video, after sampling and rotation.
    Video(VideoShape),
    /// A text, also inside JSON.
    Text(TextLength),
}

/// Shape codes in an index; a code never changes meaning.
const OPAQUE: u8 = 0;
const IMAGE: u8 = 1;
const AUDIO: u8 = 2;
const TEXT: u8 = 3;
const VIDEO: u8 = 4;

impl MediaShape {
    /// Returns the shape kind's code, and the shape as numbers: for an image, width and height in pixels; for
    /// audio, the lower 32 bits of the frame count, the sample rate in Hz, the upper 32 bits of the frame
    /// count; for text, tokens and target tokens; for video, frames, width and height.
    #[must_use]
    pub const fn to_numbers(self) -> (u8, [u32; SHAPE_NUMBERS]) {
        match self {
            Self::Opaque => (OPAQUE, [0; SHAPE_NUMBERS]),
            Self::Image(size) => (IMAGE, [size.width, size.height, 0]),
            Self::Audio(length) => {
                (AUDIO, [length.frames as u32, length.sample_rate_hz, (length.frames >> 32) as u32])
            }
            Self::Text(length) => (TEXT, [length.tokens, length.target_tokens, 0]),
            Self::Video(shape) => (VIDEO, [shape.frames, shape.width, shape.height]),
        }
    }

    /// Returns the shape for a code and numbers; an unknown code has no cost.
    #[must_use]
    pub fn from_numbers(kind: u8, [first, second, third]: [u32; SHAPE_NUMBERS]) -> Self {
        match kind {
            IMAGE => Self::Image(ImageSize { width: first, height: second }),
            AUDIO => Self::Audio(AudioLength {
                frames: u64::from(third) << 32 | u64::from(first),
                sample_rate_hz: second,
            }),
            TEXT => Self::Text(TextLength { tokens: first, target_tokens: second }),
            VIDEO => Self::Video(VideoShape { frames: first, width: second, height: third }),
            _ => Self::Opaque,
        }
    }

    /// Returns the module that processes the field; `None` if the field has no cost.
    #[must_use]
    pub const fn module(self) -> Option<Module> {
        match self {
            Self::Opaque => None,
            Self::Image(_) | Self::Video(_) => Some(Module::Vision),
            Self::Audio(_) => Some(Module::Audio),
            Self::Text(_) => Some(Module::Llm),
        }
    }

    /// Returns the decoded field size in memory in bytes: RGB pixels, f32 samples as mono audio (stereo is
    /// rare in training data), else the stored size.
    #[must_use]
    pub fn decoded_bytes(self, stored_bytes: u64) -> u64 {
        match self {
            Self::Image(size) => area(size.width, size.height).saturating_mul(3),
            Self::Audio(length) => length.frames.saturating_mul(size_of::<f32>() as u64),
            Self::Video(shape) => {
                area(shape.width, shape.height).saturating_mul(3).saturating_mul(shape.frames.into())
            }
            Self::Text(_) | Self::Opaque => stored_bytes,
        }
    }

    /// Adds the field to the sample shape.
    pub fn add_to(self, shape: &mut SampleShape) {
        match self {
            Self::Opaque => {}
            Self::Image(size) => shape.images.push(size),
            Self::Audio(length) => shape.audio.push(length),
            Self::Video(video) => shape.videos.push(video),
            Self::Text(length) => {
                shape.text_tokens = shape.text_tokens.saturating_add(length.tokens);
                shape.target_tokens = shape.target_tokens.saturating_add(length.target_tokens);
            }
        }
    }
}

fn area(width: u32, height: u32) -> u64 {
    u64::from(width) * u64::from(height)
}

/// Media modality.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Modality {
    /// An image.
    Image,
    /// An audio clip.
    Audio,
    /// A video.
    Video,
}

impl Modality {
    /// All modalities, in discriminant order.
    pub const ALL: [Self; 3] = [Self::Image, Self::Audio, Self::Video];

    /// Returns the name that datasets and chat templates use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Video => "video",
        }
    }

    /// Returns the plural used in messages.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Audio => "clips",
            Self::Video => "videos",
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shapes() -> impl Strategy<Value = MediaShape> {
        prop_oneof![
            Just(MediaShape::Opaque),
            any::<[u32; 2]>().prop_map(|[width, height]| MediaShape::Image(ImageSize { width, height })),
            any::<(u64, u32)>().prop_map(|(frames, sample_rate_hz)| MediaShape::Audio(AudioLength {
                frames,
                sample_rate_hz
            })),
            any::<[u32; 3]>().prop_map(|[frames, width, height]| MediaShape::Video(VideoShape {
                frames,
                width,
                height
            })),
            any::<[u32; 2]>()
                .prop_map(|[tokens, target_tokens]| MediaShape::Text(TextLength { tokens, target_tokens })),
        ]
    }

    proptest! {
        #[test]
        fn every_shape_comes_back_from_its_numbers(shape in shapes()) {
            let (kind, numbers) = shape.to_numbers();
            prop_assert_eq!(MediaShape::from_numbers(kind, numbers), shape);
        }
    }

    #[test]
    fn an_unknown_kind_costs_nothing() {
        assert_eq!(MediaShape::from_numbers(200, [1; SHAPE_NUMBERS]), MediaShape::Opaque);
    }
}
