//! Measures the shape of every sample field, from headers and texts.
//!
//! The index stores the shapes, and the cost model predicts from them. Content that no decoder could read is
//! a fault, so that a bad sample is known before planning; see [`crate::media::probe`] for the information in
//! headers.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::SampleShape;

use serde_json::Value;

use super::document::{
    TextSource, TwoDocuments, Unread, measure_document, names_media, second_document, select_text,
};
use super::measure_text;
use crate::error::{BoxError, EXCERPT_CHARACTERS, Skipped, error_reason, excerpt, guarded, json_excerpt};
use crate::media::{
    Content, DecodeLimits, Media, MediaShape, Payload, TextLength, extension_codec, extension_modality,
    is_decoded, probe_shape,
};
use crate::{RawField, RawSample};

/// Estimates the memory size of a decoded sample in bytes, from media headers.
///
/// An unreadable header counts as the field size: the decoder will reject the header before it allocates
/// more.
#[must_use]
pub fn decoded_bytes(sample: &RawSample, limits: &DecodeLimits) -> u64 {
    let of_field = |field: &RawField| {
        let payload = field.payload.as_deref().unwrap_or_default();
        // A codec from another crate may panic on damaged bytes.
        let shape = guarded(|| probe_shape(payload, field.bytes, &field.extension, limits));
        shape.ok().and_then(Result::ok).unwrap_or_default().decoded_bytes(field.bytes)
    };
    sample.fields.iter().map(of_field).fold(0, u64::saturating_add)
}

/// A field that makes a sample bad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldFault {
    /// Field extension.
    pub field: Arc<str>,
    /// Fault description.
    pub reason: String,
}

impl FieldFault {
    /// Creates the skip record for the sample.
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
    /// The errors of [`measure_sample`].
    pub fn shape(&self) -> Result<SampleShape, FieldFault> {
        let mut shape = SampleShape::default();
        measure_sample(self)?.into_iter().for_each(|field| field.add_to(&mut shape));
        Ok(shape)
    }
}

/// Sample part that no reader uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    /// Field extension.
    pub field: Arc<str>,
    /// Key path in a document, such as `similarity` or `messages[].flag`; empty for the whole field.
    pub part: String,
    /// Part value, cut at 200 characters.
    pub example: String,
}

/// Sample shapes, and unused sample parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeasuredSample {
    /// Shape of every field, in order.
    pub shapes: Vec<MediaShape>,
    /// Parts that neither a decoder nor a document reader uses, including identifiers and media properties.
    pub unused: Vec<Unused>,
    /// Reason why no processor can read the sample text, which then counts as empty.
    pub unreadable: Option<FieldFault>,
}

/// Measures every sample field, in order.
///
/// Counts the texts that a preparer would prepare, see [`measure_within`].
///
/// # Errors
/// The first field whose header or text cannot be read.
pub fn measure_sample(sample: &RawSample) -> Result<Vec<MediaShape>, FieldFault> {
    let limits = DecodeLimits::default();
    let (mut shapes, texts) = decode_texts(sample, &limits)?;
    texts.measure(sample, &mut shapes, &mut None);
    Ok(shapes)
}

/// Measures every sample field, with the video frames and the maximum text length from `limits`, and lists
/// unused parts.
///
/// Counts the texts that a preparer would prepare: a JSON conversation, or content that JSON lists in order
/// with media; else all text fields; else the first JSON field with a question and an answer, or a caption.
///
/// # Errors
/// The first field whose header or text cannot be read.
pub fn measure_within(sample: &RawSample, limits: &DecodeLimits) -> Result<MeasuredSample, FieldFault> {
    let (mut shapes, texts) = decode_texts(sample, limits)?;
    let mut unused = Some(Vec::new());
    let unreadable = texts.measure(sample, &mut shapes, &mut unused);
    Ok(MeasuredSample { shapes, unused: unused.unwrap_or_default(), unreadable })
}

/// Decoded texts and documents in a sample, with field numbers.
#[derive(Debug, Default)]
struct Texts {
    fields: Vec<(usize, String)>,
    documents: Vec<(usize, Value)>,
}

/// Measures media by header, and decodes texts.
fn decode_texts(sample: &RawSample, limits: &DecodeLimits) -> Result<(Vec<MediaShape>, Texts), FieldFault> {
    let mut shapes = Vec::with_capacity(sample.fields.len());
    let mut texts = Texts::default();
    for (number, field) in sample.fields.iter().enumerate() {
        let payload = field.payload.clone().unwrap_or_default();
        // A codec from another crate may panic on damaged bytes.
        let measured = guarded(|| measure_field(&field.extension, payload, field.bytes, limits));
        if !matches!(measured, Ok(Ok(_))) && has_readable_twin(sample, &field.extension) {
            shapes.push(MediaShape::Opaque);
            continue;
        }
        let measured = measured.and_then(|measured| measured.map_err(|error| error_reason(&*error)));
        let (shape, text) =
            measured.map_err(|reason| FieldFault { field: field.extension.clone(), reason })?;
        shapes.push(shape);
        match text {
            Some(Media::Text(text)) => texts.fields.push((number, text)),
            Some(Media::Json(json)) => texts.documents.push((number, json)),
            _ => {}
        }
    }
    Ok((shapes, texts))
}

/// Returns whether a sample with an undecodable medium also has a decodable medium with the same modality:
/// such a sample is useful if the other field is selected.
fn has_readable_twin(sample: &RawSample, extension: &str) -> bool {
    let Some(modality) = extension_modality(extension).filter(|_| !is_decoded(extension)) else {
        return false;
    };
    let is_twin = |field: &RawField| {
        extension_modality(&field.extension) == Some(modality) && is_decoded(&field.extension)
    };
    sample.fields.iter().any(is_twin)
}

fn measure_field(
    extension: &str,
    payload: Bytes,
    field_bytes: u64,
    limits: &DecodeLimits,
) -> Result<(MediaShape, Option<Media>), BoxError> {
    let Some(codec) = extension_codec(extension) else { return Ok((MediaShape::Opaque, None)) };
    match codec.content() {
        Content::Text | Content::Document => Ok((MediaShape::Opaque, Some(codec.decode(payload, limits)?))),
        Content::Medium(_) if payload.is_empty() && codec.payload() != Payload::Unused => {
            Err("the field is empty".into())
        }
        Content::Medium(_) | Content::Value => {
            Ok((probe_shape(&payload, field_bytes, extension, limits)?, None))
        }
    }
}

impl Texts {
    /// Measures the sample text; returns the reason if the text cannot be read.
    ///
    /// - `unused`: list of unused parts, if requested
    fn measure(
        &self,
        sample: &RawSample,
        shapes: &mut [MediaShape],
        unused: &mut Option<Vec<Unused>>,
    ) -> Option<FieldFault> {
        let source = select_text(self.documents.iter().map(|(_, json)| json), !self.fields.is_empty());
        let fault = self.measure_source(source, sample, shapes, unused);
        if let Some(unused) = unused {
            self.list_unused(source, sample, unused);
        }
        fault
    }

    fn measure_source(
        &self,
        source: Result<TextSource<'_>, TwoDocuments>,
        sample: &RawSample,
        shapes: &mut [MediaShape],
        unused: &mut Option<Vec<Unused>>,
    ) -> Option<FieldFault> {
        let name = |number: usize| sample.fields[self.documents[number].0].extension.clone();
        match source {
            Ok(TextSource::Document(number, layout)) => {
                let (field, document) = &self.documents[number];
                let mut unread = if unused.is_some() { Unread::listed() } else { Unread::default() };
                let measured = measure_document(document, layout, &mut unread);
                if let Some(unused) = unused {
                    unused.extend(in_field(&name(number), unread));
                }
                shapes[*field] = MediaShape::Text(measured.as_ref().ok().copied().unwrap_or_default());
                measured.err().map(|reason| FieldFault { field: name(number), reason })
            }
            Ok(TextSource::Fields) => {
                for (field, text) in &self.fields {
                    shapes[*field] = MediaShape::Text(measure_text(text));
                }
                None
            }
            Ok(TextSource::Nothing) => {
                // A document without text has no cost, but it is a document.
                for (field, _) in &self.documents {
                    shapes[*field] = MediaShape::Text(TextLength::default());
                }
                None
            }
            Err(TwoDocuments(first, second)) => {
                Some(FieldFault { field: name(second), reason: second_document(&name(first)) })
            }
        }
    }

    /// Lists the fields that no reader uses, and the keys in documents that only name media.
    fn list_unused(
        &self,
        source: Result<TextSource<'_>, TwoDocuments>,
        sample: &RawSample,
        unused: &mut Vec<Unused>,
    ) {
        let selected = match source {
            Ok(TextSource::Document(number, _)) => Some(self.documents[number].0),
            _ => None,
        };
        let has_other_text = source.is_err() || source != Ok(TextSource::Nothing);
        for (field, document) in self.documents.iter().filter(|(field, _)| Some(*field) != selected) {
            let name = &sample.fields[*field].extension;
            if has_other_text && !names_media(document) {
                let example = json_excerpt(document);
                unused.push(Unused { field: name.clone(), part: String::new(), example });
            } else {
                let mut unread = Unread::listed();
                unread.note_document(document);
                unused.extend(in_field(name, unread));
            }
        }
        let whole = |field: usize, example: &str| Unused {
            field: sample.fields[field].extension.clone(),
            part: String::new(),
            example: excerpt(example, EXCERPT_CHARACTERS).into_owned(),
        };
        if source != Ok(TextSource::Fields) {
            unused.extend(self.fields.iter().map(|(field, text)| whole(*field, text)));
        }
        for (number, field) in sample.fields.iter().enumerate() {
            let codec = extension_codec(&field.extension);
            if codec.is_none_or(|codec| codec.content() == Content::Value) {
                // If no codec reads the payload, an index may not have it.
                let is_read = codec.is_some_and(|codec| codec.payload() != Payload::Unused);
                let payload = field.payload.as_deref().filter(|_| is_read).unwrap_or_default();
                let head = &payload[..payload.len().min(EXCERPT_CHARACTERS)];
                unused.push(whole(number, std::str::from_utf8(head).unwrap_or_default()));
            }
        }
    }
}

fn in_field(field: &Arc<str>, unread: Unread) -> impl Iterator<Item = Unused> {
    let parts = unread.into_parts().into_iter();
    parts.map(|(part, example)| Unused { field: field.clone(), part, example })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(fields: &[(&str, &str)]) -> RawSample {
        let raw = |(extension, text): &(&str, &str)| RawField {
            extension: (*extension).into(),
            offset: 0,
            bytes: text.len() as u64,
            payload: Some(Bytes::copy_from_slice(text.as_bytes())),
            size: None,
        };
        let fields = fields.iter().map(raw).collect();
        RawSample { key: "k".into(), shard: "s".into(), offset: 0, epoch: 0, fields }
    }

    /// Returns the tokens in every field, by the estimate's rules.
    fn tokens(fields: &[(&str, &str)]) -> Vec<u32> {
        let tokens = |shape| match shape {
            MediaShape::Text(length) => length.tokens,
            _ => 0,
        };
        measure_sample(&sample(fields)).unwrap().into_iter().map(tokens).collect()
    }

    /// Returns unused parts, as `field:part=example`.
    fn unused(fields: &[(&str, &str)]) -> Vec<String> {
        let measured = measure_within(&sample(fields), &DecodeLimits::default()).unwrap();
        assert_eq!(measured.unreadable, None);
        let shown = |unused: Unused| format!("{}:{}={}", unused.field, unused.part, unused.example);
        measured.unused.into_iter().map(shown).collect()
    }

    #[test]
    fn what_nobody_reads_is_listed() {
        let turns = r#"{"id": 3, "conversations": [{"from": "gpt", "value": "a kite", "mood": "calm"}]}"#;
        let caption = r#"{"caption": "a red kite", "width": 56}"#;
        assert_eq!(unused(&[("txt", "a kite")]), [] as [&str; 0]);
        assert_eq!(unused(&[("json", turns)]), ["json:conversations[].mood=\"calm\"", "json:id=3"]);
        assert_eq!(unused(&[("json", caption)]), ["json:width=56"]);
        assert_eq!(
            unused(&[("txt", "one"), ("json", caption)]),
            [r#"json:={"caption":"a red kite","width":56}"#]
        );
        assert_eq!(
            unused(&[("txt", "one"), ("json", r#"{"conversations": [{"from": "gpt", "value": "a"}]}"#)]),
            ["txt:=one"]
        );
        // An index does not read payloads that no codec measures.
        assert_eq!(unused(&[("transcript", "a kite"), ("cls", "3"), ("foo", "bar")]), ["cls:=", "foo:="]);
        assert_eq!(unused(&[("json", r#"{"summary": "s", "image": "0.png"}"#)]), ["json:summary=\"s\""]);
        let listed = r#"{"images": ["0.png"], "score": 1}"#;
        assert_eq!(unused(&[("a.json", listed), ("txt", "one")]), ["a.json:score=1"]);
    }

    #[test]
    fn a_text_that_cannot_be_read_counts_nothing_and_has_a_reason() {
        for (fields, field, reason) in [
            (
                vec![("json", r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#)],
                "json",
                "preference training",
            ),
            (
                vec![("a.json", r#"{"messages": ["a"]}"#), ("b.json", r#"{"messages": ["a"]}"#)],
                "b.json",
                "only one",
            ),
        ] {
            let measured = measure_within(&sample(&fields), &DecodeLimits::default()).unwrap();
            let fault = measured.unreadable.unwrap();
            assert_eq!(&*fault.field, field);
            assert!(fault.reason.contains(reason), "{fault:?}");
            assert!(tokens(&fields).iter().all(|&tokens| tokens == 0));
        }
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
