//! Content of a sample for the page: recognized media, scaled images.

use super::table::content_kind;
use crate::report::collect::shrunk_jpeg;
use bytes::Bytes;
use dflop_loader::media::probe::{AudioFormat, ImageFormat};
use dflop_loader::media::{
    DecodeLimits, ImageLimits, Media, Modality, decode, decode_rgb, extension_modality,
};
use dflop_loader::sample::document::{ContentPart, SampleMedia};
use dflop_loader::sample::{Field, Sample};
use dflop_loader::shard::{RawField, RawSample};
use serde_json::{Value, json};

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

/// Bytes that a format is recognized by.
pub(super) const PREFIX_BYTES: u64 = 4_096;
/// Longer sides in pixels for scaled images, and the JPEG qualities.
pub(super) const THUMBNAIL: (u32, u8) = (144, 70);
pub(super) const RENDERED: (u32, u8) = (1_600, 85);

/// Returns the content type of a medium that browsers show; `None` for everything else, documents that
/// contain scripts (HTML, SVG) above all, which is then only downloaded.
///
/// - `extension`: field extension; `prefix`: first field bytes
pub(super) fn content_type(extension: &str, prefix: &[u8]) -> Option<&'static str> {
    match extension_modality(extension)? {
        Modality::Image => match ImageFormat::from_bytes(prefix)? {
            ImageFormat::Jpeg => Some("image/jpeg"),
            ImageFormat::Png => Some("image/png"),
            ImageFormat::WebP => Some("image/webp"),
            ImageFormat::Gif => Some("image/gif"),
            ImageFormat::Bmp => Some("image/bmp"),
            ImageFormat::Avif => Some("image/avif"),
            ImageFormat::Tiff => None,
        },
        // A tag may be longer than the prefix.
        Modality::Audio if prefix.starts_with(b"ID3") => Some("audio/mpeg"),
        Modality::Audio => match AudioFormat::from_bytes(prefix)? {
            AudioFormat::Wav => Some("audio/wav"),
            AudioFormat::Aiff => Some("audio/aiff"),
            AudioFormat::Au => Some("audio/basic"),
            AudioFormat::Flac => Some("audio/flac"),
            AudioFormat::Mp3 => Some("audio/mpeg"),
            AudioFormat::Ogg => Some("audio/ogg"),
        },
        Modality::Video => match prefix {
            [_, _, _, _, b'f', b't', b'y', b'p', ..] => Some("video/mp4"),
            [0x1A, 0x45, 0xDF, 0xA3, ..] => Some("video/webm"),
            _ => None,
        },
    }
}

/// Decodes an image and scales it down to a JPEG.
///
/// # Errors
/// Why the image cannot be decoded or scaled.
pub(super) fn scaled(payload: &[u8], (side, quality): (u32, u8)) -> Result<Vec<u8>, String> {
    let image = decode_rgb(payload, &ImageLimits::default()).map_err(|error| error.to_string())?;
    shrunk_jpeg(&image, side, quality).ok_or_else(|| "the image cannot be scaled".to_owned())
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

    #[test]
    fn only_media_get_a_type_that_browsers_show() {
        assert_eq!(content_type("jpg", &[0xFF, 0xD8, 0xFF, 0xE0]), Some("image/jpeg"));
        assert_eq!(content_type("png", &[0xFF, 0xD8, 0xFF, 0xE0]), Some("image/jpeg"));
        assert_eq!(content_type("mp3", b"ID3\x04\0\0\0\0\x7F\x7F"), Some("audio/mpeg"));
        assert_eq!(content_type("mp4", b"\0\0\0\x18ftypmp42"), Some("video/mp4"));
        for (extension, bytes) in [
            ("html", &b"<script>alert(1)</script>"[..]),
            ("svg", b"<svg onload='alert(1)'/>"),
            ("jpg", b"<svg onload='alert(1)'/>"),
            ("jpg", b"<!DOCTYPE html><script>"),
            ("txt", b"BMW"),
            ("json", b"GIF89a"),
            ("mp4", b"RIFF"),
        ] {
            assert_eq!(content_type(extension, bytes), None, "{extension}");
        }
    }

    #[test]
    fn a_broken_image_has_a_reason() {
        assert!(scaled(b"no image", THUMBNAIL).unwrap_err().contains("image"));
    }
}
