//! Measures the shape of every field of a sample, from headers and texts.
//!
//! The index stores the shapes, and the cost model predicts from them. Content that no decoder could read is
//! a fault, so that a bad sample is known before anything is planned; see [`crate::media::probe`] for what
//! headers can tell.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::SampleShape;

use super::text::{has_content, measure_json, measure_text};
use crate::error::{BoxError, Skipped, guarded, reason_of};
use crate::media::{
    Content, DecodeLimits, Media, MediaShape, Payload, TextLength, codec_of, is_decoded, modality_of,
    probe_shape,
};
use crate::raw_sample::{RawField, RawSample};

/// Estimates the bytes that a decoded sample takes in memory, from the headers of its media.
///
/// A header that cannot be read counts as its field: the decoder will refuse it before it allocates more.
#[must_use]
pub fn decoded_bytes(sample: &RawSample, limits: &DecodeLimits) -> u64 {
    let of_field = |field: &RawField| {
        let payload = field.payload.as_deref().unwrap_or_default();
        // A codec of another crate may panic on damaged bytes.
        let shape = guarded(|| probe_shape(payload, field.bytes, &field.extension, limits));
        shape.ok().and_then(Result::ok).unwrap_or_default().decoded_bytes(field.bytes)
    };
    sample.fields.iter().map(of_field).fold(0, u64::saturating_add)
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
pub fn measure_sample(sample: &RawSample) -> Result<Vec<MediaShape>, FieldFault> {
    measure_within(sample, &DecodeLimits::default())
}

/// Measures every field of a sample, with the frames of videos and the longest text of `limits`.
///
/// # Errors
/// Those of [`measure_sample`].
pub fn measure_within(sample: &RawSample, limits: &DecodeLimits) -> Result<Vec<MediaShape>, FieldFault> {
    let mut measured = Vec::with_capacity(sample.fields.len());
    for field in &sample.fields {
        let payload = field.payload.clone().unwrap_or_default();
        // A codec of another crate may panic on damaged bytes.
        let shape = guarded(|| measure_field(&field.extension, payload, field.bytes, limits));
        if !matches!(shape, Ok(Ok(_))) && has_readable_twin(sample, &field.extension) {
            measured.push((MediaShape::Opaque, None));
            continue;
        }
        let shape = shape.and_then(|shape| shape.map_err(|error| reason_of(&*error)));
        measured.push(shape.map_err(|reason| FieldFault { field: field.extension.clone(), reason })?);
    }
    let counted = measured.iter().filter_map(|(_, rank)| *rank).min();
    let mut is_first = true;
    let shape = |(shape, rank): &(MediaShape, Option<TextRank>)| {
        let is_counted = match rank {
            None => true,
            Some(TextRank::Text) => *rank == counted,
            Some(_) => *rank == counted && std::mem::take(&mut is_first),
        };
        if is_counted { *shape } else { MediaShape::Opaque }
    };
    Ok(measured.iter().map(shape).collect())
}

/// Returns whether a medium that no codec reads is beside one of its modality that is decoded: such a sample
/// is of use to those who select the other field.
fn has_readable_twin(sample: &RawSample, extension: &str) -> bool {
    let Some(modality) = modality_of(extension).filter(|_| !is_decoded(extension)) else { return false };
    let is_twin =
        |field: &RawField| modality_of(&field.extension) == Some(modality) && is_decoded(&field.extension);
    sample.fields.iter().any(is_twin)
}

/// Order of the texts of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TextRank {
    Conversation,
    Text,
    Json,
}

fn measure_field(
    extension: &str,
    payload: Bytes,
    field_bytes: u64,
    limits: &DecodeLimits,
) -> Result<(MediaShape, Option<TextRank>), BoxError> {
    let Some(codec) = codec_of(extension) else { return Ok((MediaShape::Opaque, None)) };
    match codec.content() {
        Content::Text | Content::Document => Ok(measure_decoded(&codec.decode(payload, limits)?)),
        Content::Medium(_) if payload.is_empty() && codec.payload() != Payload::Unused => {
            Err("the field is empty".into())
        }
        Content::Medium(_) | Content::Value => {
            Ok((probe_shape(&payload, field_bytes, extension, limits)?, None))
        }
    }
}

/// Measures a text or a document; anything else that a codec makes of a field costs nothing.
fn measure_decoded(media: &Media) -> (MediaShape, Option<TextRank>) {
    match media {
        Media::Text(text) => (MediaShape::Text(measure_text(text)), Some(TextRank::Text)),
        Media::Json(json) => {
            let rank = if has_content(json) { TextRank::Conversation } else { TextRank::Json };
            let length = measure_json(json);
            let has_text = rank == TextRank::Conversation || length != TextLength::default();
            (MediaShape::Text(length), has_text.then_some(rank))
        }
        _ => (MediaShape::Opaque, None),
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
            MediaShape::Text(length) => length.tokens,
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

    #[test]
    fn a_medium_that_no_codec_reads_makes_its_sample_bad_unless_another_one_is_read() {
        let field = |extension: &str, payload: &[u8]| RawField {
            extension: extension.into(),
            offset: 0,
            bytes: payload.len() as u64,
            payload: Some(Bytes::copy_from_slice(payload)),
            size: None,
        };
        let sample = |fields: Vec<RawField>| RawSample {
            key: "k".into(),
            shard: "s".into(),
            offset: 0,
            epoch: 0,
            fields,
        };
        let heic = || field("heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic");
        let bmp =
            [&b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0"[..], &[0; 28]]
                .concat();
        let fault = measure_sample(&sample(vec![heic(), field("txt", b"a kite")])).unwrap_err();
        assert_eq!(&*fault.field, "heic");
        assert!(fault.reason.contains("it is HEIC"), "{}", fault.reason);
        let shapes = measure_sample(&sample(vec![heic(), field("bmp", &bmp)])).unwrap();
        assert!(matches!(shapes[..], [MediaShape::Opaque, MediaShape::Image(_)]));
        let renamed = measure_sample(&sample(vec![field("heic", &bmp)])).unwrap();
        assert!(matches!(renamed[..], [MediaShape::Image(_)]), "the content decides");
    }
}
