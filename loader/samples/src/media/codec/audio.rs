//! Audio: WAV, FLAC, MP3, Ogg Vorbis, Ogg Opus, recognized by their content.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::probe::audio_shape;
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, decode_audio};

/// Codec of audio clips.
#[derive(Debug)]
pub(super) struct AudioCodec;

impl Codec for AudioCodec {
    fn name(&self) -> &'static str {
        "audio"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["wav", "wave", "flac", "mp3", "ogg", "oga", "opus"]
    }

    fn content(&self) -> Content {
        Content::Medium(Modality::Audio)
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
