//! Reads a sample's content: texts, conversation, and the faults that decoding shows.

use bytes::Bytes;
use dflop_loader::media::{DecodeLimits, Media, Modality, decode};
use dflop_loader::sample::document::{ContentPart, SampleMedia};
use dflop_loader::sample::{Field, Sample};
use dflop_loader::shard::{RawField, RawSample};
use serde_json::{Value, json};

use super::describe::content_kind;
use super::media::content_type;

/// Maximum length of a field that is decoded to find faults.
pub(super) const FIELD_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of text characters shown.
const TEXT_CHARACTERS_MAX: usize = 100_000;

/// Describes the sample content.
///
/// Returns an object with
/// - `fields`, in index order, each with `type` (the content type that browsers show), `text` and `is_cut`
///   for texts and documents, and `fault` (the reason for which the loader would skip the sample);
/// - `turns`, each with a `role` and `parts`, which are texts and positions of fields;
/// - `fault`, a mismatch between document and fields.
pub(super) fn content(raw: &RawSample) -> Value {
    let decoded: Vec<DecodedField> = raw.fields.iter().map(decode_field).collect();
    let fields = raw.fields.iter().zip(&decoded).map(|(field, decoded)| describe(field, decoded));
    let fields: Vec<Value> = fields.collect();
    let in_sample = |(field, decoded): (&RawField, DecodedField)| {
        Some(Field { extension: field.extension.clone(), media: decoded.media? })
    };
    let in_sample = raw.fields.iter().zip(decoded).filter_map(in_sample).collect();
    let sample = Sample::new(raw.key.clone(), in_sample);
    match turns(&sample, raw) {
        Ok(turns) => json!({"fields": fields, "turns": turns}),
        Err(fault) => json!({"fields": fields, "turns": [], "fault": fault}),
    }
}

/// Field as far as it is decoded: texts and documents, media without their values.
struct DecodedField {
    media: Option<Media>,
    fault: Option<String>,
}

fn decode_field(field: &RawField) -> DecodedField {
    let Some(payload) = &field.payload else {
        return DecodedField { media: Some(Media::Opaque(Bytes::new())), fault: None };
    };
    match decode(&field.extension, payload.clone(), &DecodeLimits::default()) {
        Ok(media @ (Media::Text(_) | Media::Json(_))) => DecodedField { media: Some(media), fault: None },
        // Decoded only to look for faults; the modality follows from the extension.
        Ok(_) => DecodedField { media: Some(Media::Opaque(Bytes::new())), fault: None },
        Err(error) => {
            // A medium keeps its place in the conversation, a text has no content to place.
            let is_medium = matches!(content_kind(&field.extension), "image" | "audio" | "video");
            let media = is_medium.then(|| Media::Opaque(Bytes::new()));
            DecodedField { media, fault: Some(error.to_string()) }
        }
    }
}

fn describe(field: &RawField, decoded: &DecodedField) -> Value {
    let mut described = serde_json::Map::new();
    let payload = field.payload.as_deref().unwrap_or_default();
    if let Some(shown) = content_type(&field.extension, payload) {
        described.insert("type".into(), shown.into());
    }
    let text = match (&decoded.media, content_kind(&field.extension)) {
        (Some(Media::Text(text)), _) => Some(text.clone()),
        (Some(Media::Json(document)), _) => serde_json::to_string_pretty(document).ok(),
        // What cannot be decoded is shown as it is.
        (None, "text" | "document") => Some(String::from_utf8_lossy(payload).into_owned()),
        _ => None,
    };
    if let Some(text) = text {
        let shown: String = text.chars().take(TEXT_CHARACTERS_MAX).collect();
        described.insert("is_cut".into(), (shown.len() < text.len()).into());
        described.insert("text".into(), shown.into());
    }
    if field.payload.is_none() {
        let most = FIELD_BYTES_MAX >> 20;
        described.insert("note".into(), format!("longer than {most} MiB, not checked").into());
    }
    if let Some(fault) = &decoded.fault {
        described.insert("fault".into(), fault.clone().into());
    }
    described.into()
}

/// Returns the conversation turns, or the content in order as a single turn without a role.
fn turns(sample: &Sample, raw: &RawSample) -> Result<Vec<Value>, String> {
    let media = SampleMedia::from_sample(sample).map_err(|fault| fault.reason)?;
    let turns = match media.turns().map_err(|fault| fault.reason)? {
        Some(turns) => turns.into_iter().map(|turn| (turn.role, turn.parts)).collect(),
        None => vec![("", media.parts().map_err(|fault| fault.reason)?)],
    };
    let mut characters = TEXT_CHARACTERS_MAX;
    let mut part = |part: &ContentPart<'_>| match *part {
        ContentPart::Text(text) => {
            let shown: String = text.chars().take(characters).collect();
            characters -= shown.chars().count();
            json!({"text": shown})
        }
        ContentPart::Medium(modality, at) => json!({"field": position(&media, raw, modality, at)}),
    };
    let turn = |(role, parts): &(&str, Vec<ContentPart<'_>>)| {
        let parts: Vec<Value> = parts.iter().map(&mut part).collect();
        json!({"role": role, "parts": parts})
    };
    Ok(turns.iter().map(turn).collect())
}

/// Returns the position of a medium among the sample fields.
fn position(media: &SampleMedia<'_>, raw: &RawSample, modality: Modality, at: usize) -> Option<usize> {
    let extension = &media.by_modality(modality).get(at)?.extension;
    raw.fields.iter().position(|field| field.extension == *extension)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(fields: &[(&str, &[u8])]) -> RawSample {
        let field = |(extension, payload): &(&str, &[u8])| RawField {
            extension: (*extension).into(),
            offset: 0,
            bytes: payload.len() as u64,
            payload: Some(Bytes::copy_from_slice(payload)),
            size: None,
        };
        let fields = fields.iter().map(field).collect();
        RawSample { key: "k".into(), shard: "s.tar".into(), offset: 0, epoch: 0, fields }
    }

    #[test]
    fn a_conversation_places_its_images_and_a_broken_one_has_a_reason() {
        let document = br#"{"images": ["1.jpg", "0.jpg"], "conversations": [
            {"from": "human", "value": "<image>and <image>?"}, {"from": "gpt", "value": "<b>Kites</b>"}]}"#;
        let content = content(&sample(&[("0.jpg", b"bad"), ("1.jpg", b"bad"), ("json", document)]));
        let parts = json!([{"field": 1}, {"text": "and "}, {"field": 0}, {"text": "?"}]);
        assert_eq!(content["turns"][0], json!({"role": "user", "parts": parts}));
        assert_eq!(content["turns"][1]["parts"][0]["text"], "<b>Kites</b>");
        assert!(content["fields"][0]["fault"].as_str().is_some_and(|fault| fault.contains("image")));
        assert!(content["fields"][2]["text"].as_str().is_some_and(|text| text.contains("conversations")));
    }

    #[test]
    fn mismatches_and_broken_documents_are_named() {
        let document = br#"{"conversations": [{"from": "human", "value": "<image>?"}]}"#;
        let mismatch = content(&sample(&[("json", document)]));
        assert!(mismatch["fault"].as_str().is_some_and(|fault| fault.contains("image")), "{mismatch}");
        let broken = content(&sample(&[("json", b"{\"a\": "), ("txt", b"a kite")]));
        assert!(broken["fields"][0]["fault"].is_string());
        assert_eq!(broken["fields"][0]["text"], "{\"a\": ");
        assert_eq!(broken["turns"][0], json!({"role": "", "parts": [{"text": "a kite"}]}));
    }

    #[test]
    fn long_texts_are_cut() {
        let long = "ä".repeat(TEXT_CHARACTERS_MAX + 1);
        let content = content(&sample(&[("txt", long.as_bytes())]));
        assert_eq!(content["fields"][0]["is_cut"], true);
        assert_eq!(
            content["fields"][0]["text"].as_str().map(|text| text.chars().count()),
            Some(TEXT_CHARACTERS_MAX)
        );
    }
}
