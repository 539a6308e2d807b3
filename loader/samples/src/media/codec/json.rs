//! JSON documents, with or without texts.

use bytes::Bytes;

use super::{Codec, Content};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, decode_json};

/// Codec of JSON documents.
#[derive(Debug)]
pub(super) struct JsonCodec;

impl Codec for JsonCodec {
    fn name(&self) -> &'static str {
        "json"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["json"]
    }

    fn content(&self) -> Content {
        Content::Document
    }

    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_json(&bytes, limits.text_bytes_max).map(Media::Json)
    }
}
