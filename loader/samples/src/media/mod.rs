//! Decodes the bytes of one field to typed media, one file per modality.
//!
//! All decoders are pure functions over untrusted bytes: they check sizes before they allocate, return
//! [`DecodeError`] and never panic. The extension selects the decoder of a field ([`kind_of_extension`]); for
//! images and audio the content determines the format. Threads and the account of bad samples are the
//! caller's.

mod audio;
pub mod augment;
mod custom;
mod error;
#[cfg(test)]
mod fixtures;
mod image;
mod json;
mod kind;
mod limits;
mod numpy;
pub mod probe;
#[cfg(test)]
mod tests;
mod text;
mod video;

use bytes::Bytes;
use serde_json::Value;

pub use self::audio::{Audio, decode_audio};
pub use self::custom::CustomMedia;
pub use self::error::DecodeError;
pub use self::image::Pixel;
pub use self::image::{IMAGENET_DEVIATION, IMAGENET_MEAN, ImageTensorDecoder, PixelStatistics};
pub use self::image::{PixelBuffer, PixelFormat, PixelLayout, PixelType};
pub use self::image::{RgbImage, decode_rgb, decode_rgb_into};
pub use self::json::decode_json;
pub use self::kind::{FieldKind, IMAGE_EXTENSIONS, is_video_extension, kind_of_extension};
pub use self::limits::{AudioLimits, DecodeLimits, ImageLimits, Strictness};
pub use self::numpy::{NpyArray, decode_npy};
pub use self::text::decode_text;
#[cfg(feature = "video")]
pub(crate) use self::video::video_shape;
pub use self::video::{Video, VideoLimits, VideoSampling};

/// Decoded value of one field.
#[derive(Clone, Debug, PartialEq)]
pub enum Media {
    /// An image, or the first frame of an animation.
    Image(RgbImage),
    /// An audio clip.
    Audio(Audio),
    /// Sampled frames of a video; requires the feature `video`.
    Video(Video),
    /// A text.
    Text(String),
    /// A JSON document.
    Json(Value),
    /// A NumPy array.
    Npy(NpyArray),
    /// Bytes of a field without a decoder, as stored.
    Opaque(Bytes),
    /// Value that user code made of a field.
    Custom(CustomMedia),
}

/// Decodes one field by its extension; fields without a decoder are returned undecoded.
///
/// # Errors
/// See [`DecodeError`].
///
/// # Examples
/// ```
/// use dflop_samples::media::{DecodeLimits, Media, decode};
/// let media = decode("caption.txt", "a red kite".into(), &DecodeLimits::default())?;
/// assert_eq!(media, Media::Text("a red kite".to_owned()));
/// # Ok::<(), dflop_samples::media::DecodeError>(())
/// ```
pub fn decode(extension: &str, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
    match kind_of_extension(extension) {
        FieldKind::Image => decode_rgb(&bytes, &limits.image).map(Media::Image),
        FieldKind::Audio => decode_audio(&bytes, &limits.audio).map(Media::Audio),
        #[cfg(feature = "video")]
        FieldKind::Video => video::decode_video(&bytes, &limits.video).map(Media::Video),
        FieldKind::Text => decode_text(&bytes, limits.text_bytes_max).map(Media::Text),
        FieldKind::Json => decode_json(&bytes, limits.text_bytes_max).map(Media::Json),
        FieldKind::Npy => decode_npy(&bytes).map(Media::Npy),
        FieldKind::Opaque => Ok(Media::Opaque(bytes)),
    }
}
