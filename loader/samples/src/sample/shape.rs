//! The shape of every field of a sample, from headers and texts.
//!
//! What the index stores and what the cost model needs. Content that no decoder could read is a fault, so
//! that a bad sample is known before anything is planned; see [`crate::media::probe`] for what headers can
//! tell.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::{AudioLength, ImageSize, SampleShape, VideoShape};

use super::text::{TextLength, has_content, measure_json, measure_text};
use crate::error::{Skipped, reason_of};
use crate::media::probe::{MediaShape, probe_shape};
use crate::media::{DecodeLimits, FieldKind, VideoSampling, decode_json, decode_text, kind_of_extension};
use crate::raw_sample::{RawField, RawSample};

/// The shape of a field's medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldShape {
    /// No decoder claims the field, or its content costs nothing.
    Opaque,
    /// An image.
    Image(ImageSize),
    /// A clip.
    Audio(AudioLength),
    /// A video, after sampling and turning.
    Video(VideoShape),
    /// A text, also inside JSON.
    Text(TextLength),
}

impl FieldShape {
    /// Returns the bytes that the decoded field takes in memory: RGB pixels, f32 samples of mono audio
    /// (stereo is rare in training data), else as many as are stored.
    #[must_use]
    pub fn decoded_bytes(self, stored_bytes: u64) -> u64 {
        match self {
            Self::Image(size) => area(size.width, size.height).saturating_mul(3),
            Self::Audio(length) => length.frames.saturating_mul(size_of::<f32>() as u64),
            Self::Video(shape) => {
                area(shape.width, shape.height).saturating_mul(3).saturating_mul(shape.frames.into())
            }
            Self::Text(_) | Self::Opaque => stored_bytes,
        }
    }

    /// Adds the field to the shape of its sample.
    pub fn add_to(self, shape: &mut SampleShape) {
        match self {
            Self::Opaque => {}
            Self::Image(size) => shape.images.push(size),
            Self::Audio(length) => shape.audio.push(length),
            Self::Video(video) => shape.videos.push(video),
            Self::Text(length) => {
                shape.text_tokens = shape.text_tokens.saturating_add(length.tokens);
                shape.target_tokens = shape.target_tokens.saturating_add(length.target_tokens);
            }
        }
    }
}

/// Estimates the bytes that a decoded sample takes in memory, from the headers of its media.
///
/// A header that cannot be read counts as its field: the decoder will refuse it before it allocates more.
#[cfg_attr(not(feature = "video"), expect(unused_variables, reason = "no video is decoded"))]
#[must_use]
pub fn decoded_bytes(sample: &RawSample, sampling: &VideoSampling) -> u64 {
    let of_field = |field: &RawField| {
        let payload = field.payload.as_deref().unwrap_or_default();
        let shape = match kind_of_extension(&field.extension) {
            FieldKind::Image | FieldKind::Audio => probe_shape(payload, field.bytes, &field.extension).ok(),
            _ => None,
        };
        let shape = shape.map(field_shape);
        #[cfg(feature = "video")]
        let shape = shape.or_else(|| {
            let is_video = kind_of_extension(&field.extension) == FieldKind::Video;
            is_video
                .then(|| crate::media::video_shape(payload, sampling).ok())
                .flatten()
                .map(FieldShape::Video)
        });
        let shape = shape.unwrap_or(FieldShape::Opaque);
        shape.decoded_bytes(field.bytes)
    };
    sample.fields.iter().map(of_field).fold(0, u64::saturating_add)
}

fn area(width: u32, height: u32) -> u64 {
    u64::from(width) * u64::from(height)
}

/// A field that makes its sample bad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldFault {
    /// Its extension.
    pub field: Arc<str>,
    /// Description of the fault.
    pub reason: String,
}

impl FieldFault {
    /// Accounts for the sample.
    #[must_use]
    pub fn in_sample(self, sample: &RawSample) -> Skipped {
        Skipped {
            shard: sample.shard.to_string(),
            offset: sample.offset,
            key: Some(sample.key.clone()),
            field: Some(self.field.to_string()),
            reason: self.reason,
        }
    }
}

impl RawSample {
    /// Returns the shape of the whole sample.
    ///
    /// # Errors
    /// Those of [`measure_sample`].
    pub fn shape(&self) -> Result<SampleShape, FieldFault> {
        let mut shape = SampleShape::default();
        measure_sample(self)?.into_iter().for_each(|field| field.add_to(&mut shape));
        Ok(shape)
    }
}

/// Measures every field of a sample, in order.
///
/// Of its texts those count that a preparer would prepare: a JSON conversation, or content that JSON
/// lists in order with its media; without one all text fields; without those the first JSON field with a
/// question and its answer, or a caption.
///
/// # Errors
/// The first field whose header or text cannot be read.
pub fn measure_sample(sample: &RawSample) -> Result<Vec<FieldShape>, FieldFault> {
    measure_sampled(sample, &VideoSampling::default())
}

/// Measures every field of a sample, with this many frames of a video.
///
/// # Errors
/// Those of [`measure_sample`].
pub fn measure_sampled(sample: &RawSample, sampling: &VideoSampling) -> Result<Vec<FieldShape>, FieldFault> {
    let mut measured = Vec::with_capacity(sample.fields.len());
    for field in &sample.fields {
        let payload = field.payload.clone().unwrap_or_default();
        let shape = measure_field(&field.extension, &payload, field.bytes, sampling);
        measured.push(shape.map_err(|reason| FieldFault { field: field.extension.clone(), reason })?);
    }
    let counted = measured.iter().filter_map(|(_, rank)| *rank).min();
    let mut is_first = true;
    let shape = |(shape, rank): &(FieldShape, Option<TextRank>)| {
        let is_counted = match rank {
            None => true,
            Some(TextRank::Text) => *rank == counted,
            Some(_) => *rank == counted && std::mem::take(&mut is_first),
        };
        if is_counted { *shape } else { FieldShape::Opaque }
    };
    Ok(measured.iter().map(shape).collect())
}

/// Order of the texts of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TextRank {
    Conversation,
    Text,
    Json,
}

#[cfg_attr(not(feature = "video"), expect(unused_variables, reason = "no video is sampled"))]
fn measure_field(
    extension: &str,
    payload: &Bytes,
    field_bytes: u64,
    sampling: &VideoSampling,
) -> Result<(FieldShape, Option<TextRank>), String> {
    let text_bytes_max = DecodeLimits::default().text_bytes_max;
    match kind_of_extension(extension) {
        FieldKind::Text => {
            let text = decode_text(payload, text_bytes_max).map_err(|error| reason_of(&error))?;
            Ok((FieldShape::Text(measure_text(&text)), Some(TextRank::Text)))
        }
        FieldKind::Json => {
            let json = decode_json(payload, text_bytes_max).map_err(|error| reason_of(&error))?;
            let rank = if has_content(&json) { TextRank::Conversation } else { TextRank::Json };
            let length = measure_json(&json);
            let has_text = rank == TextRank::Conversation || length != TextLength::default();
            Ok((FieldShape::Text(length), has_text.then_some(rank)))
        }
        #[cfg(feature = "video")]
        FieldKind::Video => {
            let shape = crate::media::video_shape(payload, sampling);
            shape.map(|shape| (FieldShape::Video(shape), None)).map_err(|error| reason_of(&error))
        }
        FieldKind::Image | FieldKind::Audio if payload.is_empty() => Err("the field is empty".into()),
        _ => {
            let shape = probe_shape(payload, field_bytes, extension);
            Ok((field_shape(shape.map_err(|error| reason_of(&error))?), None))
        }
    }
}

fn field_shape(shape: MediaShape) -> FieldShape {
    match shape {
        MediaShape::Image(size) => FieldShape::Image(size),
        MediaShape::Audio { length, .. } => FieldShape::Audio(length),
        MediaShape::Text { .. } | MediaShape::Opaque => FieldShape::Opaque,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of every field, by the rules of the estimate.
    fn tokens(fields: &[(&str, &str)]) -> Vec<u32> {
        let raw = |(extension, text): &(&str, &str)| RawField {
            extension: (*extension).into(),
            offset: 0,
            bytes: text.len() as u64,
            payload: Some(Bytes::copy_from_slice(text.as_bytes())),
            size: None,
        };
        let fields = fields.iter().map(raw).collect();
        let sample = RawSample { key: "k".into(), shard: "s".into(), offset: 0, epoch: 0, fields };
        let tokens = |shape| match shape {
            FieldShape::Text(length) => length.tokens,
            _ => 0,
        };
        measure_sample(&sample).unwrap().into_iter().map(tokens).collect()
    }

    #[test]
    fn a_sample_has_one_text() {
        let turns = r#"{"conversations": [{"from": "gpt", "value": "a kite"}]}"#;
        let caption = r#"{"caption": "a red kite"}"#;
        assert_eq!(tokens(&[("txt", "one"), ("json", turns), ("b.json", caption)]), [0, 2, 0]);
        assert_eq!(tokens(&[("json", caption), ("txt", "one"), ("b.txt", "two")]), [0, 1, 1]);
        let parts = r#"{"content": [{"type": "image"}, "a kite"]}"#;
        assert_eq!(tokens(&[("txt", "one"), ("json", parts)]), [0, 2]);
        assert_eq!(tokens(&[("a.json", "{}"), ("b.json", caption), ("c.json", caption)]), [0, 3, 0]);
    }
}
