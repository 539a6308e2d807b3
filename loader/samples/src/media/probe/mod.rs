//! Reads the shape of a medium from its header bytes, without decoding it.
//!
//! A *shape* is what the cost model needs: the width and height of an image as displayed, the frames and
//! sample rate of an audio clip, the bytes of a text. The *kind* of a field follows from the last part of its
//! extension and selects the decoder; within a kind the content decides, so a PNG named
//! `.jpg` is decoded as a PNG. Shapes agree with the output of [`crate::media`], which a test checks.

mod audio;
mod exif;
mod flac;
mod image;
mod jpeg;
mod ogg;
mod wav;

use dflop_costmodel::{AudioLength, ImageSize};

use super::error::DecodeError;
use crate::media::kind::{FieldKind, kind_of_extension, last_part};

pub use self::audio::AudioFormat;
pub use self::image::ImageFormat;

pub(crate) use self::audio::{audio_format, audio_track, counted_frames, open_reader, symphonia_error};
pub(crate) use self::image::{ImageHeader, image_header};
pub(crate) use self::jpeg::{JpegHeader, read_jpeg_header};
pub(crate) use self::wav::{WavHeader, read_wav_header};

/// Shape of the medium in one field, as declared by its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaShape {
    /// An image, or the first frame of an animation.
    Image(ImageSize),
    /// An audio clip.
    Audio {
        /// Frames and rate.
        length: AudioLength,
        /// Channels, at least 1.
        channels: u16,
    },
    /// A text.
    Text {
        /// Bytes of the field, as stored.
        bytes: u64,
    },
    /// Anything whose cost does not depend on its content.
    Opaque,
}

/// Reads the shape of one field from `prefix`, its first bytes, without decoding it.
///
/// - `prefix`: the whole field, or its first bytes
/// - `field_bytes`: length of the whole field
/// - `extension`: WebDataset extension, see [`kind_of_extension`]
///
/// JPEG, PNG, GIF, BMP, WAV and FLAC need a few kB at most, unless long metadata come first; TIFF, WebP with
/// EXIF, MP3 and Ogg need the whole field; the frames of an MP3 without the number in its header are counted.
/// Ogg Opus has a shape although no decoder handles it.
///
/// # Errors
/// [`DecodeError::PrefixTooShort`] if the header continues after `prefix`; another variant if the field is
/// damaged or its content does not match its extension.
pub fn probe_shape(prefix: &[u8], field_bytes: u64, extension: &str) -> Result<MediaShape, DecodeError> {
    let shape = match kind_of_extension(extension) {
        FieldKind::Image => {
            image::image_header(prefix).map(|header| MediaShape::Image(header.display_size()))
        }
        FieldKind::Audio => audio::audio_shape(prefix, field_bytes),
        FieldKind::Opaque if last_part(extension) == "opus" => audio::audio_shape(prefix, field_bytes),
        FieldKind::Text => Ok(MediaShape::Text { bytes: field_bytes }),
        #[cfg(feature = "video")]
        FieldKind::Video => Ok(MediaShape::Opaque),
        FieldKind::Json | FieldKind::Npy | FieldKind::Opaque => Ok(MediaShape::Opaque),
    };
    let is_prefix = (prefix.len() as u64) < field_bytes;
    match shape {
        Ok(MediaShape::Image(_)) if is_prefix && image::ends_before_pixels(prefix) => {
            Err(DecodeError::PrefixTooShort { prefix_bytes: prefix.len() as u64 })
        }
        // The header may continue after the prefix, so this is a request for more bytes rather than damage.
        Err(DecodeError::Truncated { .. }) if is_prefix => {
            Err(DecodeError::PrefixTooShort { prefix_bytes: prefix.len() as u64 })
        }
        other => other,
    }
}

/// Reads big- and little-endian integers; returns `None` past the end of the bytes.
pub(crate) mod field {
    fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
        bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
    }

    pub(crate) fn u16_be(bytes: &[u8], offset: usize) -> Option<u16> {
        array(bytes, offset).map(u16::from_be_bytes)
    }

    pub(crate) fn u16_le(bytes: &[u8], offset: usize) -> Option<u16> {
        array(bytes, offset).map(u16::from_le_bytes)
    }

    pub(crate) fn u32_be(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_be_bytes)
    }

    pub(crate) fn u32_le(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_le_bytes)
    }
}
