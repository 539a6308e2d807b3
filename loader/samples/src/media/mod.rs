//! Decodes field bytes to typed media, and reads shapes from headers.
//!
//! All decoders are pure functions over untrusted bytes: they check sizes before they allocate, return
//! [`DecodeError`] and never panic. A [`codec`] claims the fields with certain extensions. The caller is
//! responsible for threads and for recording bad samples.

mod audio;
pub mod augment;
pub mod codec;
mod error;
#[cfg(test)]
mod fixtures;
mod image;
mod json;
mod limits;
mod numpy;
mod opus;
mod pcm;
pub mod probe;
mod shape;
mod video;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

pub use self::audio::{Audio, decode_audio};
pub use self::codec::{
    Codec, Content, Payload, decode, extension_codec, extension_content, extension_modality, is_decoded,
    probe_shape,
};
pub use self::error::DecodeError;
pub use self::image::{
    IMAGENET_DEVIATION, IMAGENET_MEAN, ImageTensorDecoder, Pixel, PixelBuffer, PixelFormat, PixelLayout,
    PixelStatistics, PixelType, RgbImage, decode_rgb, decode_rgb_into,
};
pub use self::json::{LONE_SURROGATE, decode_json, decode_text, repair_json};
pub use self::limits::{AudioLimits, DecodeLimits, ImageLimits, Strictness};
pub use self::numpy::{NpyArray, decode_npy};
pub use self::shape::{MediaShape, Modality, SHAPE_NUMBERS, TextLength};
pub use self::video::{Video, VideoLimits, VideoSampling};

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

#[cfg(test)]
mod tests;
