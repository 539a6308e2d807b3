//! Plain text in UTF-8.

use bytes::Bytes;

use super::{Codec, Content};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, decode_text};

/// Plain text codec.
#[derive(Debug)]
pub(super) struct TextCodec;

impl Codec for TextCodec {
    fn name(&self) -> &'static str {
        "text"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["txt", "text", "caption", "transcript"]
    }

    fn content(&self) -> Content {
        Content::Text
    }

    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_text(&bytes, limits.text_bytes_max).map(Media::Text)
    }
}
