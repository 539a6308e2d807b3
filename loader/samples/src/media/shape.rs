//! Describes field shapes: the medium properties that the cost model needs and the index stores.

use dflop_costmodel::{AudioLength, ImageSize, Module, SampleShape, VideoShape};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
