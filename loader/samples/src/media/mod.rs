//! Decodes field bytes to typed media, and reads shapes from headers.
//!
//! All decoders are pure functions over untrusted bytes: they check sizes before they allocate, return
//! [`DecodeError`] and never panic. A [`codec`] claims the fields with certain extensions. The caller is
//! responsible for threads and for recording bad samples.

mod audio;
pub mod augment;
pub mod codec;
mod custom;
mod error;
#[cfg(test)]
mod fixtures;
mod image;
mod json;
mod limits;
mod modality;
mod numpy;
mod opus;
mod pcm;
pub mod probe;
mod shape;
#[cfg(test)]
mod tests;
mod text;
mod video;

use bytes::Bytes;
use serde_json::Value;

pub use self::audio::{Audio, decode_audio};
pub use self::codec::{
    Codec, Content, Payload, decode, extension_codec, extension_content, extension_modality, is_decoded,
    probe_shape,
};
pub use self::custom::CustomMedia;
pub use self::error::DecodeError;
pub use self::image::Pixel;
pub use self::image::{IMAGENET_DEVIATION, IMAGENET_MEAN, ImageTensorDecoder, PixelStatistics};
pub use self::image::{PixelBuffer, PixelFormat, PixelLayout, PixelType};
pub use self::image::{RgbImage, decode_rgb, decode_rgb_into};
pub use self::json::{LONE_SURROGATE, decode_json, repair_json};
pub use self::limits::{AudioLimits, DecodeLimits, ImageLimits, Strictness};
pub use self::modality::Modality;
pub use self::numpy::{NpyArray, decode_npy};
pub use self::shape::{MediaShape, SHAPE_NUMBERS, TextLength};
pub use self::text::decode_text;
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
