//! NumPy arrays, a single array per file.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, decode_npy};

/// NumPy array codec; arrays have no cost.
#[derive(Debug)]
pub(super) struct NpyCodec;

impl Codec for NpyCodec {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["npy"]
    }

    fn content(&self) -> Content {
        Content::Value
    }

    fn payload(&self) -> Payload {
        Payload::Unused
    }

    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    fn decode(&self, bytes: Bytes, _: &DecodeLimits) -> Result<Media, DecodeError> {
        decode_npy(&bytes).map(Media::Npy)
    }
}
