//! Videos: MP4, MOV, Matroska, WebM, AVI and others through FFmpeg; undecoded and without a shape in a build
//! without it.

use bytes::Bytes;

use super::{Codec, Content, Payload};
use crate::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality};

/// Video codec.
#[derive(Debug)]
pub(super) struct VideoCodec;

impl Codec for VideoCodec {
    fn name(&self) -> &'static str {
        "video"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &[
            "mp4", "m4v", "mkv", "webm", "avi", "mov", "mpg", "mpeg", "m2ts", "mts", "vob", "wmv", "asf",
            "flv", "f4v", "3gp", "3g2", "ogv",
        ]
    }

    fn content(&self) -> Content {
        Content::Medium(Modality::Video)
    }

    fn payload(&self) -> Payload {
        if cfg!(feature = "video") { Payload::Whole } else { Payload::Unused }
    }

    #[cfg(feature = "video")]
    fn probe(&self, prefix: &[u8], _: u64, limits: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        crate::media::video::video_shape(prefix, &limits.video.sampling).map(MediaShape::Video)
    }

    #[cfg(not(feature = "video"))]
    fn probe(&self, _: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        Ok(MediaShape::Opaque)
    }

    #[cfg(feature = "video")]
    fn decode(&self, bytes: Bytes, limits: &DecodeLimits) -> Result<Media, DecodeError> {
        crate::media::video::decode_video(&bytes, &limits.video).map(Media::Video)
    }

    #[cfg(not(feature = "video"))]
    fn decode(&self, bytes: Bytes, _: &DecodeLimits) -> Result<Media, DecodeError> {
        Ok(Media::Opaque(bytes))
    }
}
