//! Reads captions: a text, or a list or an object with texts, under a separate key.

use serde_json::{Map, Value};

use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::sample::document::content::readable;

/// Plain-text keys, in order of precedence.
const CAPTION_KEYS: [&str; 9] = [
    "caption",
    "captions",
    "text",
    "transcript",
    "transcription",
    "sentence",
    "content",
    "description",
    "alt_text",
];
/// Words that occur in other plain-text keys.
const CAPTION_WORDS: [&str; 2] = ["caption", "transcri"];
/// Text keys in a caption object.
const INNER_KEYS: [&str; 7] = ["caption", "text", "raw", "value", "en", "eng", "transcript"];

/// Returns whether a key names plain text.
pub(super) fn is_key(name: &str) -> bool {
    CAPTION_KEYS.contains(&name)
}

/// Returns the text key in a document that is neither a conversation nor a pair.
///
/// A key that only contains `caption` counts if it is the only such key.
pub(in crate::sample::document) fn caption_key(object: &Map<String, Value>) -> Option<&str> {
    let is_filled = |key: &str| object.get(key).is_some_and(is_caption);
    if let Some(known) = CAPTION_KEYS.into_iter().find(|key| is_filled(key)) {
        return Some(known);
    }
    let is_named = |key: &str| CAPTION_WORDS.iter().any(|word| key.to_ascii_lowercase().contains(word));
    let mut named = object.iter().filter(|(key, value)| is_named(key) && is_caption(value));
    let (key, _) = named.next()?;
    named.next().is_none().then_some(key)
}

/// Returns whether a value has the form of a caption: a text, or a list or an object with texts.
fn is_caption(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(values) => {
            let is_text = |value: &Value| value.is_string() || value.is_object();
            values.iter().any(is_caption) && values.iter().all(is_text)
        }
        Value::Object(object) => {
            INNER_KEYS.iter().any(|key| object.get(*key).is_some_and(is_caption))
                || (!object.is_empty() && object.values().all(Value::is_string))
        }
        _ => false,
    }
}

/// Returns the caption text: the first text in a list; in an object the text under a known key or the only
/// text.
///
/// # Errors
/// An object with several texts, all under unknown keys.
pub(in crate::sample::document) fn caption_text<'a>(key: &str, value: &'a Value) -> Result<&'a str, String> {
    match value {
        Value::String(text) => readable(text),
        Value::Array(values) => match values.iter().find(|value| is_caption(value)) {
            Some(first) => caption_text(key, first),
            None => Ok(""),
        },
        Value::Object(object) => {
            let known = INNER_KEYS.iter().find_map(|key| object.get(*key).filter(|value| is_caption(value)));
            let mut texts = object.values().filter(|value| is_caption(value));
            match (known, texts.next(), texts.next()) {
                (Some(known), ..) | (None, Some(known), None) => caption_text(key, known),
                _ => {
                    let keys: Vec<&str> = object.keys().map(String::as_str).collect();
                    let keys = keys.join(", ");
                    let shown = excerpt(&keys, EXCERPT_CHARACTERS);
                    Err(format!("`{key}` holds several texts ({shown}), none under a known key"))
                }
            }
        }
        _ => Ok(""),
    }
}
