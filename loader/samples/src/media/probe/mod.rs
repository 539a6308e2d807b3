//! Parses image and audio headers, without decoding the content.
//!
//! The results agree with the output of [`crate::media::decode`], which a test checks.

mod aiff;
mod audio;
#[cfg(feature = "avif")]
mod avif;
mod foreign;
mod image;
mod jpeg;
mod mpeg;
mod pcm;
mod png;
mod tiff;
mod wav;

use dflop_costmodel::{AudioLength, ImageSize};

pub use self::audio::AudioFormat;
pub use self::image::ImageFormat;

pub(crate) use self::audio::{
    Content, audio_content, audio_shape, audio_track, declared_frames, open_reader, packet_frames,
    pcm_header, symphonia_error,
};
#[cfg(feature = "avif")]
pub(crate) use self::avif::{AvifHeader, ColorCoding, read_avif_header};
pub(crate) use self::image::{ImageHeader, ends_before_pixels, image_header};
pub(crate) use self::jpeg::{JpegColors, JpegHeader, read_jpeg_header};
pub(crate) use self::mpeg::MpegKind;
pub(crate) use self::pcm::{AdpcmBlock, PcmCoding, PcmHeader};
pub(crate) use self::tiff::{TiffHeader, TiffKind, read_tiff_header};

/// Reads big- and little-endian integers; returns `None` past the end.
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
