//! Codecs: the fields they claim, the shape in a field header, and the decoded value.
//!
//! A codec is a file in this module and a line in `BUILT_IN`, or a type in another crate that is
//! [`register`]ed. The last part of a field's extension selects the codec; within a codec the content
//! decides, so a PNG named `.jpg` is decoded as a PNG. Everything else asks the codec: indexing for the bytes
//! that the shape depends on ([`Codec::payload`]), planning for the shape ([`Codec::probe`]), documents for
//! the modality ([`Codec::content`]), loaders for the value ([`Codec::decode`]).

mod audio;
mod image;
mod json;
mod npy;
mod registry;
mod text;
mod video;

use std::fmt;

use bytes::Bytes;

use super::shape::{DecodeLimits, Modality};
use super::{DecodeError, Media, MediaShape};

pub use self::registry::{
    CodecConflict, extension_codec, extension_content, extension_modality, is_decoded, modality_extensions,
    register, registered, registered_codec,
};

/// Built-in codecs. No two codecs claim the same extension.
const BUILT_IN: [&dyn Codec; 7] = [
    &image::ImageCodec,
    &audio::AudioCodec,
    &video::VideoCodec,
    &text::TextCodec,
    &json::JsonCodec,
    &json::JsonLinesCodec,
    &npy::NpyCodec,
];

/// Kind of content that a codec decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// A medium of this modality, with the shape in the header.
    Medium(Modality),
    /// Text, [`Media::Text`], counted in tokens.
    Text,
    /// A document, [`Media::Json`], whose texts are counted.
    Document,
    /// A value that no model reads and that has no cost.
    Value,
}

/// Field bytes that determine the shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// None: every field has the same shape.
    Unused,
    /// The first bytes, as far as [`Codec::is_settled`] agrees.
    Prefix,
    /// All bytes.
    Whole,
}

/// Decodes fields with certain extensions, and reads shapes from headers.
///
/// Fields are untrusted bytes: sizes are checked before memory is allocated, errors are returned, nothing
/// panics.
///
/// # Examples
/// A codec for PGM images, which this crate does not decode:
/// ```
/// use dflop_costmodel::ImageSize;
/// use dflop_samples::media::codec::{Codec, Content, Payload, register};
/// use dflop_samples::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, RgbImage, decode};
///
/// /// `P5 WIDTH HEIGHT 255`, then one byte per pixel.
/// #[derive(Debug)]
/// struct Pgm;
///
/// fn header(bytes: &[u8]) -> Option<(u32, u32, usize)> {
///     let text = std::str::from_utf8(bytes.get(..bytes.iter().position(|&byte| byte == b'\n')?)?).ok()?;
///     let mut words = text.strip_prefix("P5 ")?.split(' ');
///     let [width, height] = [words.next()?.parse().ok()?, words.next()?.parse().ok()?];
///     (words.next()? == "255").then_some((width, height, text.len() + 1))
/// }
///
/// impl Codec for Pgm {
///     fn name(&self) -> &'static str {
///         "pgm"
///     }
///     fn extensions(&self) -> &'static [&'static str] {
///         &["pgm"]
///     }
///     fn content(&self) -> Content {
///         Content::Medium(Modality::Image)
///     }
///     fn payload(&self) -> Payload {
///         Payload::Prefix
///     }
///     fn probe(&self, prefix: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
///         let (width, height, _) = header(prefix).ok_or_else(|| DecodeError::codec("pgm", "no header"))?;
///         Ok(MediaShape::Image(ImageSize { width, height }))
///     }
///     fn decode(&self, bytes: bytes::Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
///         let (width, height, start) =
///             header(&bytes).ok_or_else(|| DecodeError::codec("pgm", "no header"))?;
///         let pixels = u64::from(width) * u64::from(height);
///         if pixels > limits.image.pixels_max || bytes.len() as u64 - start as u64 != pixels {
///             return Err(DecodeError::codec("pgm", "expected one byte per pixel"));
///         }
///         let pixels = bytes[start..].iter().flat_map(|&gray| [gray; 3]).collect();
///         Ok(Media::Image(RgbImage { width, height, pixels, is_truncated: false }))
///     }
/// }
///
/// register(&Pgm)?;
/// let media = decode("0.pgm", "P5 2 1 255\n\x00\x7f".into(), &DecodeLimits::default()).unwrap();
/// assert!(matches!(media, Media::Image(image) if image.pixels == [0, 0, 0, 127, 127, 127]));
/// # Ok::<(), dflop_samples::media::codec::CodecConflict>(())
/// ```
pub trait Codec: fmt::Debug + Send + Sync {
    /// Returns a short name, for messages and indexes. An index records the names of registered codecs and is
    /// rebuilt if they change; change a codec's name when the shapes change.
    fn name(&self) -> &'static str;

    /// Returns the extensions that the codec claims: the part after the last dot, in lower case.
    fn extensions(&self) -> &'static [&'static str];

    /// Returns the claimed extensions whose usual formats are decoded; a field with any other claimed
    /// extension is rejected, unless the content can be decoded. Default: all.
    fn decoded_extensions(&self) -> &'static [&'static str] {
        self.extensions()
    }

    /// Returns the kind of content.
    fn content(&self) -> Content;

    /// Returns the bytes that determine the shape; texts and documents must return all. Default: all.
    fn payload(&self) -> Payload {
        Payload::Whole
    }

    /// Returns whether a prefix from which [`probe`](Self::probe) read a shape determines the shape. Default:
    /// yes.
    fn is_settled(&self, _prefix: &[u8]) -> bool {
        true
    }

    /// Reads the shape of a field.
    ///
    /// - `prefix`: first bytes of the field, by [`payload`](Self::payload)
    /// - `field_bytes`: field length in bytes
    ///
    /// Not called for texts and documents, which are measured after decoding.
    ///
    /// # Errors
    /// [`DecodeError::PrefixTooShort`] or [`DecodeError::Truncated`] if the header continues after `prefix`;
    /// another variant if the field is damaged.
    fn probe(
        &self,
        prefix: &[u8],
        field_bytes: u64,
        limits: &DecodeLimits,
    ) -> Result<MediaShape, DecodeError>;

    /// Decodes a field.
    ///
    /// # Errors
    /// See [`DecodeError`].
    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError>;
}

/// Decodes a field by extension; fields without a codec are returned undecoded.
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
    match extension_codec(extension) {
        Some(codec) => codec.decode(bytes, limits),
        None => Ok(Media::Opaque(bytes)),
    }
}

/// Reads a field's shape from `prefix`, without decoding the field; texts and fields without a codec are
/// opaque, because texts are measured by sample ([`crate::sample::measure_sample`]).
///
/// - `prefix`: the whole field, or the first bytes
/// - `field_bytes`: field length in bytes
/// - `extension`: WebDataset extension, everything after the first dot of the file name
///
/// JPEG, PNG, GIF, BMP, WAV and FLAC need a few kB at most, unless long metadata come first; TIFF, WebP with
/// EXIF, MP3, Ogg and FLAC with unknown length need the whole field, because frames are counted.
///
/// # Errors
/// [`DecodeError::PrefixTooShort`] if the header continues after `prefix`; another variant if the field is
/// damaged or the content does not match the extension.
pub fn probe_shape(
    prefix: &[u8],
    field_bytes: u64,
    extension: &str,
    limits: &DecodeLimits,
) -> Result<MediaShape, DecodeError> {
    let is_read = |codec: &&dyn Codec| !matches!(codec.content(), Content::Text | Content::Document);
    let Some(codec) = extension_codec(extension).filter(is_read) else { return Ok(MediaShape::Opaque) };
    match codec.probe(prefix, field_bytes, limits) {
        // The header may continue after the prefix, so this is a request for more bytes rather than damage.
        Err(DecodeError::Truncated { .. }) if (prefix.len() as u64) < field_bytes => {
            Err(DecodeError::PrefixTooShort { prefix_bytes: prefix.len() as u64 })
        }
        shape => shape,
    }
}
