//! Decodes field bytes to typed media, and reads shapes from headers.
//!
//! Defines errors that occur while decoding and probing a field.
//!
//! All decoders are pure functions over untrusted bytes: they check sizes before they allocate, return
//! [`DecodeError`] and never panic. A [`codec`] claims the fields with certain extensions. The caller is
//! responsible for threads and for recording bad samples.

mod audio;
pub mod augment;
pub mod codec;
#[cfg(test)]
mod fixtures;
mod image;
mod json;
mod numpy;
mod opus;
mod pcm;
pub mod probe;
mod shape;
#[cfg(test)]
mod tests;
mod video;

use super::error::BoxError;
use bytes::Bytes;
use serde_json::Value;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

pub use audio::{Audio, decode_audio};
pub use codec::{
    Codec, Content, Payload, decode, extension_codec, extension_content, extension_modality, is_decoded,
    probe_shape,
};
pub use image::{
    IMAGENET_DEVIATION, IMAGENET_MEAN, ImageTensorDecoder, Pixel, PixelBuffer, PixelFormat, PixelLayout,
    PixelStatistics, PixelType, RgbImage, decode_rgb, decode_rgb_into,
};
pub use json::{LONE_SURROGATE, decode_json, decode_text, repair_json};
pub use numpy::{NpyArray, decode_npy};
pub use shape::{
    AudioLimits, DecodeLimits, ImageLimits, MediaShape, Modality, SHAPE_NUMBERS, Strictness, TextLength,
};
pub use video::{Video, VideoLimits, VideoSampling};

/// Decoded field value.
#[derive(Clone, Debug, PartialEq)]
pub enum Media {
    /// An image, or the first animation frame.
    Image(RgbImage),
    /// An audio clip.
    Audio(Audio),
    /// Sampled video frames; requires the feature `video`.
    Video(Video),
    /// A text.
    Text(String),
    /// A JSON document.
    Json(Value),
    /// A NumPy array.
    Npy(NpyArray),
    /// Bytes from a field without a decoder, as stored.
    Opaque(Bytes),
    /// Value that user code created from a field.
    Custom(CustomMedia),
}

/// Opaque value that replaces a decoded field; created and read by user code.
///
/// Clones share the value. Two values are equal if they are the same object in memory.
///
/// # Examples
/// ```
/// use dflop_samples::media::CustomMedia;
/// let media = CustomMedia::new(vec![1.5, 2.5]);
/// assert_eq!(media.value::<Vec<f64>>().unwrap()[1], 2.5);
/// assert_eq!(media, media.clone());
/// assert!(media.value::<String>().is_none());
/// ```
#[derive(Clone)]
pub struct CustomMedia(Arc<dyn Any + Send + Sync>);

impl CustomMedia {
    /// Wraps a value.
    #[must_use]
    pub fn new(value: impl Any + Send + Sync) -> Self {
        Self(Arc::new(value))
    }

    /// Returns the value, if it has this type.
    #[must_use]
    pub fn value<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl From<Arc<dyn Any + Send + Sync>> for CustomMedia {
    fn from(value: Arc<dyn Any + Send + Sync>) -> Self {
        Self(value)
    }
}

impl PartialEq for CustomMedia {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl fmt::Debug for CustomMedia {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("CustomMedia").field(&Arc::as_ptr(&self.0)).finish()
    }
}

/// Reason why the bytes of a field are not a valid medium.
///
/// The field's sample is bad, except for [`PrefixTooShort`](Self::PrefixTooShort), which asks for more bytes.
/// Offsets count from the first byte of the field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum DecodeError {
    /// The file may be valid, but no decoder in this crate reads it.
    #[error("unsupported {format}: {reason}")]
    Unsupported { format: &'static str, reason: String },
    /// The bytes violate the format specification.
    #[error("malformed {format} at byte {offset}: {reason}")]
    Malformed { format: &'static str, offset: u64, reason: String },
    /// The bytes, or their coded content, end before the medium is complete.
    #[error("truncated {format}: it ends too early, at byte {offset}")]
    Truncated { format: &'static str, offset: u64 },
    /// The decoder rejected the bytes without reporting an offset.
    #[error("could not decode {format}")]
    Codec { format: &'static str, source: BoxError },
    /// The medium exceeds a size limit; no memory of that size was allocated.
    #[error("{format} of {actual} {unit} exceeds `{limit}` = {limit_value}")]
    TooLarge { format: &'static str, actual: u64, unit: &'static str, limit: &'static str, limit_value: u64 },
    /// Probing only: the header continues after the available bytes; retry with the whole field.
    #[error("the header is longer than the {prefix_bytes} available bytes; retry with the whole field")]
    PrefixTooShort { prefix_bytes: u64 },
}

impl DecodeError {
    pub(crate) fn malformed(format: &'static str, offset: usize, reason: impl Into<String>) -> Self {
        Self::Malformed { format, offset: offset as u64, reason: reason.into() }
    }

    pub(crate) fn truncated(format: &'static str, offset: usize) -> Self {
        Self::Truncated { format, offset: offset as u64 }
    }

    pub(crate) fn unsupported(format: &'static str, reason: impl Into<String>) -> Self {
        Self::Unsupported { format, reason: reason.into() }
    }

    /// Creates the error for a decoder that reports no offset.
    pub fn codec(format: &'static str, source: impl Into<BoxError>) -> Self {
        Self::Codec { format, source: source.into() }
    }
}
