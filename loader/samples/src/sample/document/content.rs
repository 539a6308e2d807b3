//! Reads the content of a turn, or of a document: texts and placeholders, not yet matched with fields.

use std::borrow::Cow;

use serde_json::Value;

use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::media::{LONE_SURROGATE, Modality};
use crate::sample::text::{Piece, split_placeholders};

/// Content piece whose placeholder is not matched with a field yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum UnplacedPart<'a> {
    /// Text between media, never empty.
    Text(Cow<'a, str>),
    /// Position of a medium, and the field name if there is one.
    Media(Modality, Option<Cow<'a, str>>),
}

impl UnplacedPart<'_> {
    /// Copies borrowed data.
    pub(super) fn into_owned<'b>(self) -> UnplacedPart<'b> {
        match self {
            Self::Text(text) => UnplacedPart::Text(Cow::Owned(text.into_owned())),
            Self::Media(modality, name) => {
                UnplacedPart::Media(modality, name.map(|name| Cow::Owned(name.into_owned())))
            }
        }
    }
}

/// Turn content.
#[derive(Debug, Default)]
pub(super) struct Content<'a> {
    pub(super) parts: Vec<UnplacedPart<'a>>,
    /// Text from reasoning parts; it is not part of the answer.
    pub(super) reasoning: Option<String>,
}

/// Part types with text, and with reasoning.
const TEXT_TYPES: [&str; 4] = ["text", "input_text", "output_text", "refusal"];
const REASONING_TYPES: [&str; 2] = ["thinking", "reasoning"];
/// Part keys that are read.
const PART_KEYS: [&str; 3] = ["type", "path", "url"];

/// Reads content: a string with placeholders, a list of parts with literal texts, or null.
pub(super) fn parse_content(content: &Value) -> Result<Content<'_>, String> {
    match content {
        Value::Null => Ok(Content::default()),
        Value::String(text) => Ok(Content { parts: split_text(text)?, reasoning: None }),
        Value::Array(values) => {
            let mut content = Content { parts: Vec::with_capacity(values.len()), reasoning: None };
            for value in values {
                parse_part(value, &mut content)?;
            }
            Ok(content)
        }
        _ => Err("its content must be a string or a list of parts".to_owned()),
    }
}

/// Splits a text at placeholders.
pub(super) fn split_text(text: &str) -> Result<Vec<UnplacedPart<'_>>, String> {
    let piece = |piece| match piece {
        Piece::Text(text) => UnplacedPart::Text(Cow::Borrowed(text)),
        Piece::Media(modality) => UnplacedPart::Media(modality, None),
    };
    Ok(split_placeholders(readable(text)?).into_iter().map(piece).collect())
}

/// Splits an owned text at placeholders.
pub(super) fn split_owned(text: Cow<'_, str>) -> Result<Vec<UnplacedPart<'_>>, String> {
    match text {
        Cow::Borrowed(text) => split_text(text),
        Cow::Owned(text) => Ok(split_text(&text)?.into_iter().map(UnplacedPart::into_owned).collect()),
    }
}

/// Merges two lists with equal lengths, where exactly one entry, text or image, is filled at each index.
pub(super) fn interleaved<'a>(texts: &'a [Value], images: &[Value]) -> Result<Vec<UnplacedPart<'a>>, String> {
    let mut content = Vec::new();
    for (number, (text, image)) in texts.iter().zip(images).enumerate() {
        match text.as_str() {
            Some(text) => push_text(readable(text)?, &mut content),
            None if !image.is_null() => content.push(UnplacedPart::Media(Modality::Image, None)),
            None => return Err(format!("entry {number} of `texts` must be a string")),
        }
    }
    Ok(content)
}

/// Returns the text; fails if the JSON text contains a lone surrogate.
pub(super) fn readable(text: &str) -> Result<&str, String> {
    if text.contains(LONE_SURROGATE) {
        let shown = text.replace(LONE_SURROGATE, "\u{FFFD}");
        let shown = excerpt(&shown, EXCERPT_CHARACTERS);
        return Err(format!("the text `{shown}` has a lone surrogate, which is no character"));
    }
    Ok(text)
}

/// Returns the keys of a part that no reader uses.
pub(super) fn unused_keys(part: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let stated = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let plain = plain_type(stated);
    let is_text = stated.is_empty() || TEXT_TYPES.contains(&stated) || REASONING_TYPES.contains(&stated);
    let is_read = move |key: &str| {
        PART_KEYS.contains(&key) || key == stated || key == plain || (is_text && key == "text")
    };
    let keys = part.as_object().into_iter().flatten();
    keys.map(|(key, value)| (key.as_str(), value)).filter(move |(key, _)| !is_read(key))
}

fn parse_part<'a>(part: &'a Value, content: &mut Content<'a>) -> Result<(), String> {
    if let Some(text) = part.as_str() {
        push_text(readable(text)?, &mut content.parts);
        return Ok(());
    }
    if let Some((modality, name)) = media_name(part) {
        if name.is_none() && has_inline(part) {
            let name = modality.name();
            return Err(format!("a content part holds its {name} inline; write it to a field of the sample"));
        }
        content.parts.push(UnplacedPart::Media(modality, name.map(Cow::Borrowed)));
        return Ok(());
    }
    let stated = part.get("type").and_then(Value::as_str);
    let text = [stated.unwrap_or("text"), "text"].into_iter().find_map(|key| part.get(key)?.as_str());
    match (stated, text) {
        (Some(kind), Some(text)) if REASONING_TYPES.contains(&kind) => {
            content.reasoning.get_or_insert_default().push_str(readable(text)?);
        }
        (None, Some(text)) => push_text(readable(text)?, &mut content.parts),
        (Some(kind), Some(text)) if TEXT_TYPES.contains(&kind) => {
            push_text(readable(text)?, &mut content.parts);
        }
        (Some(kind), None) if TEXT_TYPES.contains(&kind) || REASONING_TYPES.contains(&kind) => {
            return Err(format!("a content part of type `{kind}` must have a `text`"));
        }
        (Some(other), _) => {
            let shown = excerpt(other, EXCERPT_CHARACTERS);
            return Err(format!("unknown content part of type `{shown}`"));
        }
        (None, None) => return Err("a content part must have a `type`".to_owned()),
    }
    Ok(())
}

fn plain_type(stated: &str) -> &str {
    stated.trim_start_matches("input_").trim_end_matches("_url")
}

/// Returns modality and name for a part that represents a medium.
pub(super) fn media_name(part: &Value) -> Option<(Modality, Option<&str>)> {
    let stated = part.get("type")?.as_str()?;
    let plain = plain_type(stated);
    let modality = Modality::ALL.into_iter().find(|modality| modality.name() == plain)?;
    let value = [stated, plain, "path", "url"].iter().find_map(|name| part.get(name));
    Some((modality, value.and_then(|value| url_value(value).unwrap_or(value).as_str())))
}

/// Returns whether a part has an inline base64 medium, as in OpenAI's `input_audio` and Anthropic's `source`.
fn has_inline(part: &Value) -> bool {
    let objects = part.as_object().into_iter().flatten().filter_map(|(_, value)| value.as_object());
    objects.chain(part.as_object()).any(|object| object.get("data").is_some_and(Value::is_string))
}

fn url_value(object: &Value) -> Option<&Value> {
    ["url", "path", "file"].iter().find_map(|name| object.get(name))
}

fn push_text<'a>(text: &'a str, content: &mut Vec<UnplacedPart<'a>>) {
    if !text.is_empty() {
        content.push(UnplacedPart::Text(Cow::Borrowed(text)));
    }
}
