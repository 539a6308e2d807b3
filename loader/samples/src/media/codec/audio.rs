//! Audio: WAV, AIFF, AU, FLAC, MP3, Ogg Vorbis, Ogg Opus, recognized by content. Other audio extensions are
//! claimed as well, so that an undecodable field is rejected by name instead of ignored.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::probe::audio_shape;
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, decode_audio};

/// Extensions of decoded formats, then of formats that are not decoded.
const EXTENSIONS: [&str; DECODED + 20] = [
    "wav", "wave", "rf64", "w64", "aif", "aiff", "aifc", "au", "snd", "flac", "mp3", "mp2", "mpga", "ogg",
    "oga", "opus", "aac", "m4a", "m4b", "m4r", "alac", "wma", "amr", "awb", "ac3", "eac3", "dts", "caf",
    "ape", "wv", "tta", "mpc", "spx", "gsm", "weba", "mka",
];
/// Number of extensions with decoded formats.
const DECODED: usize = 16;

/// Audio clip codec.
#[derive(Debug)]
pub(super) struct AudioCodec;

impl Codec for AudioCodec {
    fn name(&self) -> &'static str {
        "audio"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &EXTENSIONS
    }

    fn content(&self) -> Content {
        Content::Medium(Modality::Audio)
    }

    fn decoded_extensions(&self) -> &'static [&'static str] {
        &EXTENSIONS[..DECODED]
    }

    fn payload(&self) -> Payload {
        Payload::Whole
    }

    fn probe(&self, prefix: &[u8], field_bytes: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        audio_shape(prefix, field_bytes).map(|(length, _)| MediaShape::Audio(length))
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_audio(&bytes, &limits.audio).map(Media::Audio)
    }
}
