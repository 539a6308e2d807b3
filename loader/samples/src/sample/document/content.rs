//! Reads the content of a JSON document: texts and placeholders, not yet matched with fields.

use serde_json::Value;

use crate::media::Modality;
use crate::sample::text;
use crate::sample::text::{Piece, split_placeholders};

/// Piece of content whose placeholder is not matched with a field yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnplacedPart<'a> {
    /// Text between media, never empty.
    Text(&'a str),
    /// Position of a medium, and the name of its field if it has one.
    Media(Modality, Option<&'a str>),
}

/// Turn whose placeholders are not matched with fields yet.
pub(super) struct UnplacedTurn<'a> {
    pub(super) role: &'a str,
    pub(super) content: Vec<UnplacedPart<'a>>,
}

/// Keys of the speaker and of the content of a turn.
const ROLE_KEYS: [&str; 2] = ["from", "role"];
const CONTENT_KEYS: [&str; 2] = ["value", "content"];
/// Roles of a question and its answer.
const PAIR_ROLES: [&str; 2] = ["user", "assistant"];

/// Returns the turns of a conversation; fails with the number of the malformed turn and the reason.
pub(super) fn turns(turns: &[Value]) -> Result<Vec<UnplacedTurn<'_>>, String> {
    let mut turns_read = Vec::with_capacity(turns.len());
    for (number, turn) in turns.iter().enumerate() {
        let role = ROLE_KEYS.iter().find_map(|name| turn.get(name)?.as_str()).unwrap_or_default();
        let value = CONTENT_KEYS.iter().find_map(|name| turn.get(name)).unwrap_or(&Value::Null);
        let content = parse_content(value).map_err(|reason| format!("turn {number}: {reason}"))?;
        turns_read.push(UnplacedTurn { role, content });
    }
    Ok(turns_read)
}

/// Returns a question and its answer as two turns.
pub(super) fn pair(json: &Value) -> Option<Vec<UnplacedTurn<'_>>> {
    let pair = |names: &[&str; 2]| {
        let [asked, answered] = names.map(|name| json.get(name).and_then(Value::as_str));
        Some([asked?, answered?])
    };
    let texts = text::QUESTION_ANSWER_KEYS.iter().find_map(pair)?;
    let turn = |(role, text)| UnplacedTurn { role, content: split_text(text) };
    Some(PAIR_ROLES.into_iter().zip(texts).map(turn).collect())
}

/// Returns the text of a sample that is not a conversation.
pub(super) fn caption(json: &Value) -> Option<Vec<UnplacedPart<'_>>> {
    text::CAPTION_KEYS.iter().find_map(|name| json.get(name)?.as_str()).map(split_text)
}

/// Merges two lists of equal length, where exactly one of text and image is filled at each index.
pub(super) fn interleaved<'a>(texts: &'a [Value], images: &[Value]) -> Result<Vec<UnplacedPart<'a>>, String> {
    let mut content = Vec::new();
    for (number, (text, image)) in texts.iter().zip(images).enumerate() {
        match text.as_str() {
            Some(text) => push_text(text, &mut content),
            None if !image.is_null() => content.push(UnplacedPart::Media(Modality::Image, None)),
            None => return Err(format!("entry {number} of `texts` must be a string")),
        }
    }
    Ok(content)
}

/// Reads content: a string with placeholders, or a list of parts whose texts are taken literally.
pub(super) fn parse_content(content: &Value) -> Result<Vec<UnplacedPart<'_>>, String> {
    match content {
        Value::String(text) => Ok(split_text(text)),
        Value::Array(values) => {
            let mut parts = Vec::with_capacity(values.len());
            for value in values {
                match parse_part(value)? {
                    UnplacedPart::Text(text) => push_text(text, &mut parts),
                    medium @ UnplacedPart::Media(..) => parts.push(medium),
                }
            }
            Ok(parts)
        }
        _ => Err("its content must be a string or a list of parts".to_owned()),
    }
}

/// Splits a text at its placeholders.
pub(super) fn split_text(text: &str) -> Vec<UnplacedPart<'_>> {
    let piece = |piece| match piece {
        Piece::Text(text) => UnplacedPart::Text(text),
        Piece::Media(modality) => UnplacedPart::Media(modality, None),
    };
    split_placeholders(text).into_iter().map(piece).collect()
}

/// Returns the names of all media parts of one modality in a document; `None` for a part without a name.
pub(super) fn media_parts(json: &Value, modality: Modality) -> impl Iterator<Item = Option<&str>> {
    let contents = text::turns(json).into_iter().flatten().filter_map(|turn| turn.get("content"));
    let parts = contents.chain(text::content(json)).filter_map(Value::as_array).flatten();
    parts.filter_map(media_part).filter(move |(of, _)| *of == modality).map(|(_, name)| name)
}

fn parse_part(part: &Value) -> Result<UnplacedPart<'_>, String> {
    if let Some(text) = part.as_str() {
        return Ok(UnplacedPart::Text(text));
    }
    if let Some((modality, name)) = media_part(part) {
        return Ok(UnplacedPart::Media(modality, name));
    }
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text" | "input_text" | "output_text") | None, Some(text)) => Ok(UnplacedPart::Text(text)),
        (Some("text" | "input_text" | "output_text"), None) => {
            Err("a content part of type `text` must have a `text`".to_owned())
        }
        (Some(other), _) => Err(format!("unknown content part of type `{other}`")),
        (None, None) => Err("a content part must have a `type`".to_owned()),
    }
}

/// Returns the modality and name of a part that represents a medium.
fn media_part(part: &Value) -> Option<(Modality, Option<&str>)> {
    let stated = part.get("type")?.as_str()?;
    let plain = stated.trim_start_matches("input_").trim_end_matches("_url");
    let modality = Modality::ALL.into_iter().find(|modality| modality.name() == plain)?;
    let value = [stated, plain, "path", "url"].iter().find_map(|name| part.get(name));
    Some((modality, value.and_then(|value| url_value(value).unwrap_or(value).as_str())))
}

fn url_value(object: &Value) -> Option<&Value> {
    ["url", "path", "file"].iter().find_map(|name| object.get(name))
}

fn push_text<'a>(text: &'a str, content: &mut Vec<UnplacedPart<'a>>) {
    if !text.is_empty() {
        content.push(UnplacedPart::Text(text));
    }
}
