//! Reads the content of a JSON document: texts and placeholders, not yet matched with fields.

use serde_json::Value;

use crate::sample::text;
use crate::sample::text::{MediumSlot, Piece, split_placeholders};

/// Piece of content whose placeholder is not matched with a field yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content<'a> {
    /// Text between media, never empty.
    Text(&'a str),
    /// Position of a medium, and the name of its field if it has one.
    Medium(MediumSlot, Option<&'a str>),
}

/// Turn whose placeholders are not matched with fields yet.
pub(super) struct Spoken<'a> {
    pub(super) role: &'a str,
    pub(super) content: Vec<Content<'a>>,
}

/// Keys of the speaker and of the content of a turn.
const ROLES: [&str; 2] = ["from", "role"];
const CONTENTS: [&str; 2] = ["value", "content"];
/// Roles of a question and its answer.
const ASKED_ANSWERED: [&str; 2] = ["user", "assistant"];

/// Returns the turns of a conversation; fails with the number of the malformed turn and the reason.
pub(super) fn turns(turns: &[Value]) -> Result<Vec<Spoken<'_>>, String> {
    let mut spoken = Vec::with_capacity(turns.len());
    for (number, turn) in turns.iter().enumerate() {
        let role = ROLES.iter().find_map(|name| turn.get(name)?.as_str()).unwrap_or_default();
        let said = CONTENTS.iter().find_map(|name| turn.get(name)).unwrap_or(&Value::Null);
        let content = of_value(said).map_err(|reason| format!("turn {number}: {reason}"))?;
        spoken.push(Spoken { role, content });
    }
    Ok(spoken)
}

/// Returns a question and its answer as two turns.
pub(super) fn pair(json: &Value) -> Option<Vec<Spoken<'_>>> {
    let pair = |names: &[&str; 2]| {
        let [asked, answered] = names.map(|name| json.get(name).and_then(Value::as_str));
        Some([asked?, answered?])
    };
    let said = text::PAIRS.iter().find_map(pair)?;
    let turn = |(role, text)| Spoken { role, content: of_text(text) };
    Some(ASKED_ANSWERED.into_iter().zip(said).map(turn).collect())
}

/// Returns the text of a sample that is not a conversation.
pub(super) fn caption(json: &Value) -> Option<Vec<Content<'_>>> {
    text::CAPTIONS.iter().find_map(|name| json.get(name)?.as_str()).map(of_text)
}

/// Merges two lists of equal length, where exactly one of text and image is filled at each index.
pub(super) fn interleaved<'a>(texts: &'a [Value], images: &[Value]) -> Result<Vec<Content<'a>>, String> {
    let mut content = Vec::new();
    for (number, (text, image)) in texts.iter().zip(images).enumerate() {
        match text.as_str() {
            Some(text) => push_text(text, &mut content),
            None if !image.is_null() => content.push(Content::Medium(MediumSlot::Image, None)),
            None => return Err(format!("entry {number} of `texts` must be a string")),
        }
    }
    Ok(content)
}

/// Reads content: a string with placeholders, or a list of parts whose texts are taken literally.
pub(super) fn of_value(content: &Value) -> Result<Vec<Content<'_>>, String> {
    match content {
        Value::String(text) => Ok(of_text(text)),
        Value::Array(values) => {
            let mut parts = Vec::with_capacity(values.len());
            for value in values {
                match of_part(value)? {
                    Content::Text(text) => push_text(text, &mut parts),
                    medium @ Content::Medium(..) => parts.push(medium),
                }
            }
            Ok(parts)
        }
        _ => Err("its content must be a string or a list of parts".to_owned()),
    }
}

/// Splits a text at its placeholders.
pub(super) fn of_text(text: &str) -> Vec<Content<'_>> {
    let piece = |piece| match piece {
        Piece::Text(words) => Content::Text(words),
        Piece::Slot(slot) => Content::Medium(slot, None),
    };
    split_placeholders(text).into_iter().map(piece).collect()
}

/// Returns the names of all media parts of one modality in a document; `None` for a part without a name.
pub(super) fn media_parts(json: &Value, slot: MediumSlot) -> impl Iterator<Item = Option<&str>> {
    let contents = text::turns(json).into_iter().flatten().filter_map(|turn| turn.get("content"));
    let parts = contents.chain(text::content(json)).filter_map(Value::as_array).flatten();
    parts.filter_map(medium_of_part).filter(move |(of, _)| *of == slot).map(|(_, name)| name)
}

fn of_part(part: &Value) -> Result<Content<'_>, String> {
    if let Some(text) = part.as_str() {
        return Ok(Content::Text(text));
    }
    if let Some((slot, name)) = medium_of_part(part) {
        return Ok(Content::Medium(slot, name));
    }
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text" | "input_text" | "output_text") | None, Some(text)) => Ok(Content::Text(text)),
        (Some("text" | "input_text" | "output_text"), None) => {
            Err("a content part of type `text` must have a `text`".to_owned())
        }
        (Some(other), _) => Err(format!("unknown content part of type `{other}`")),
        (None, None) => Err("a content part must have a `type`".to_owned()),
    }
}

/// Returns the modality and name of a part that represents a medium.
fn medium_of_part(part: &Value) -> Option<(MediumSlot, Option<&str>)> {
    let stated = part.get("type")?.as_str()?;
    let plain = stated.trim_start_matches("input_").trim_end_matches("_url");
    let slot = MediumSlot::ALL.into_iter().find(|slot| slot.name() == plain)?;
    let value = [stated, plain, "path", "url"].iter().find_map(|name| part.get(name));
    Some((slot, value.and_then(|value| url_of(value).unwrap_or(value).as_str())))
}

fn url_of(object: &Value) -> Option<&Value> {
    ["url", "path", "file"].iter().find_map(|name| object.get(name))
}

fn push_text<'a>(text: &'a str, content: &mut Vec<Content<'a>>) {
    if !text.is_empty() {
        content.push(Content::Text(text));
    }
}
