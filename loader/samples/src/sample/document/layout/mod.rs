//! Recognizes the layout of a JSON document and reads the text: the only reader for conversations and
//! captions.
//!
//! Reads the flags that exclude a turn from training.
//!
//! Reads captions: a text, or a list or an object with texts, under a separate key.
//!
//! | layout | keys |
//! | --- | --- |
//! | turns | a list, or a JSON string of one, under `messages`, `conversations`, `conversation`, or alone |
//! | prompt and completion | lists of messages under `prompt` and `completion` |
//! | content | parts under `content`; `texts` next to `images` with complementary gaps |
//! | pair | a question and its answer, see [`pairs`] |
//! | caption | see [`captions`] |
//!
//! A document is recognized without reading the text, because only one document provides the sample text;
//! [`super::source`] selects the document. Other document content, such as `system` and `tools`, is read with
//! the turns.

#[cfg(test)]
mod tests;
mod turns;

use super::names::is_media_column;
use super::parts;
use super::parts::{UnplacedPart, readable};
use crate::error::{EXCERPT_CHARACTERS, excerpt, json_excerpt};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::LazyLock;
use turns::{ASSISTANT, Pair, SYSTEM, is_turns, read_turns};

pub(super) use turns::Turn;

/// Conversation keys, in order of precedence.
const TURN_KEYS: [&str; 4] = ["messages", "conversations", "conversation", "texts"];
/// Keys for the first part of a conversation, and for the rest.
const PROMPT: &str = "prompt";
const REST_KEYS: [&str; 3] = ["completion", "response", "answer"];
/// Keys for lists of turns that are not a conversation by themselves.
const OTHER_LISTS: [&str; 7] =
    ["history", "chosen", "rejected", "tools", "functions", "documents", "rejected_messages"];
/// System prompt keys, in order of precedence.
const SYSTEM_KEYS: [&str; 3] = ["system", "system_prompt", "system_message"];
/// Variables that `transformers` passes to a chat template in addition to the messages.
const DOCUMENTS: &str = "documents";
const TOOLS: &str = "tools";
const FUNCTIONS: &str = "functions";
const TEMPLATE_VARIABLES: &str = "chat_template_kwargs";
/// Preference training keys.
const PREFERENCE: [&str; 2] = ["chosen", "rejected"];
const PREFERENCE_FAULT: &str = "`chosen` and `rejected` are data for preference training; to train on one of \
     them, pack it under a name that is read, such as `completion` (`--map chosen=completion`)";
const UNPAIRED_PREFERENCE: [&str; 2] = ["label", "kto_tag"];
/// Keys for texts that `label` rates.
const RATED_KEYS: [&str; 3] = ["completion", "messages", "conversations"];

/// Document layout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::sample) enum Layout<'a> {
    /// Turns under a key; the key is empty if the document is the list itself.
    Turns(&'a str),
    /// Turns under `prompt`, and the remaining turns under another key.
    Continued(&'static str),
    /// Chosen and rejected answers.
    Preference,
    /// Parts in order.
    Content,
    /// Lists with texts and images.
    Interleaved,
    Pair(Pair),
    /// Plain text under a key.
    Caption(&'a str),
}

/// Returns whether a document column with this name is read as text or with the text.
///
/// # Examples
/// ```
/// use dflop_samples::sample::document::is_text_column;
/// assert!(is_text_column("completion") && !is_text_column("similarity"));
/// ```
#[must_use]
pub fn is_text_column(name: &str) -> bool {
    let beside = [PROMPT, DOCUMENTS, TOOLS, FUNCTIONS, TEMPLATE_VARIABLES];
    TURN_KEYS.contains(&name)
        || SYSTEM_KEYS.contains(&name)
        || beside.contains(&name)
        || turns::is_key(name)
        || is_key(name)
}

/// Document text.
#[derive(Debug)]
pub(super) enum Text<'a> {
    Dialogue(Dialogue<'a>),
    /// Content that describes the whole sample, including media.
    Content(Vec<UnplacedPart<'a>>),
    /// Text without turns.
    Caption(Vec<UnplacedPart<'a>>),
}

/// Turns, and chat template variables.
#[derive(Debug, Clone, Default)]
pub(super) struct Dialogue<'a> {
    pub(super) turns: Vec<Turn<'a>>,
    pub(super) variables: Vec<(Cow<'a, str>, Cow<'a, Value>)>,
}

impl<'a> Layout<'a> {
    /// Recognizes a document that has text.
    pub(super) fn of(json: &'a Value) -> Option<Self> {
        let object = match json {
            Value::Object(object) => object,
            list => return is_turns(list).then_some(Self::Turns("")),
        };
        let is_filled = |key: &&str| object.get(*key).is_some_and(|value| !is_blank(value));
        if PREFERENCE.iter().all(is_filled) {
            return Some(Self::Preference);
        }
        if let Some(key) = TURN_KEYS.into_iter().find(|key| is_conversation(key, object.get(*key))) {
            return Some(Self::Turns(key));
        }
        if object.get(PROMPT).is_some_and(is_turns)
            && let Some(rest) = REST_KEYS.into_iter().find(is_filled)
        {
            return Some(Self::Continued(rest));
        }
        if content_parts(object).is_some() {
            return Some(Self::Content);
        }
        if interleaved_lists(object).is_some() {
            return Some(Self::Interleaved);
        }
        if let Some(pair) = Pair::of(object) {
            return Some(Self::Pair(pair));
        }
        let is_other = |key: &str| OTHER_LISTS.contains(&key) || key == PROMPT;
        let mut lists = object.iter().filter(|(key, value)| !is_other(key) && is_turns(value));
        if let (Some((key, _)), None) = (lists.next(), lists.next()) {
            return Some(Self::Turns(key));
        }
        // An empty list of turns is a conversation, so that it is not overlooked.
        let is_empty = |key: &&str| object.get(*key).is_some_and(Value::is_array) && *key != "texts";
        let caption = caption_key(object).map(Self::Caption);
        caption.or_else(|| TURN_KEYS.into_iter().find(is_empty).map(Self::Turns))
    }

    /// Returns whether the layout describes the whole sample, including media.
    pub(in crate::sample) fn is_whole(self) -> bool {
        !matches!(self, Self::Pair(_) | Self::Caption(_))
    }

    /// Reads the document text.
    ///
    /// # Errors
    /// The reason, if the text cannot be read.
    pub(super) fn read(self, json: &'a Value, unread: &mut Unread) -> Result<Text<'a>, String> {
        static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        let object = json.as_object().unwrap_or(&EMPTY);
        let mut used: Vec<&str> = Vec::new();
        let text = match self {
            Self::Preference => return Err(PREFERENCE_FAULT.to_owned()),
            Self::Turns(key) => {
                used.push(key);
                let mut dialogue = Dialogue::default();
                let list = object.get(key).unwrap_or(json);
                read_turns(list, key, &mut dialogue.turns, unread)?;
                Text::Dialogue(with_context(dialogue, object, &mut used)?)
            }
            Self::Continued(rest) => {
                used.extend([PROMPT, rest]);
                Text::Dialogue(with_context(continued(object, rest, unread)?, object, &mut used)?)
            }
            Self::Pair(pair) => {
                used.extend(pair.keys());
                let mut dialogue = Dialogue::default();
                turns::read_pair(object, &pair, &mut dialogue.turns)?;
                Text::Dialogue(with_context(dialogue, object, &mut used)?)
            }
            Self::Content => {
                used.push("content");
                let parts = content_parts(object).unwrap_or(&Value::Null);
                Text::Content(parts::parse_content(parts)?.parts)
            }
            Self::Interleaved => {
                used.extend(["texts", "images"]);
                let (texts, images) = interleaved_lists(object).unwrap_or_default();
                Text::Content(parts::interleaved(texts, images)?)
            }
            Self::Caption(key) => {
                used.push(key);
                Text::Caption(parts::split_text(caption_text(key, &object[key])?)?)
            }
        };
        if unread.is_noted() {
            for (key, value) in object {
                if !used.contains(&key.as_str()) && !is_media_column(key, value) {
                    unread.note(key, value);
                }
            }
        }
        Ok(text)
    }
}

/// Returns whether a value is blank: null, a blank text, an empty list or object.
pub(super) fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.trim().is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Returns whether the value under a conversation key is a conversation; `texts` also names lists of plain
/// texts.
fn is_conversation(key: &str, value: Option<&Value>) -> bool {
    match value {
        Some(Value::Array(list)) if key == "texts" => {
            !list.is_empty()
                && list.iter().all(|turn| turn.as_object().is_some_and(|turn| Pair::of(turn).is_some()))
        }
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::String(text)) => key != "texts" && text.trim_start().starts_with('['),
        Some(Value::Object(columns)) => key != "texts" && columns.values().any(Value::is_array),
        _ => false,
    }
}

/// Returns content without turns: a list with texts and parts.
fn content_parts(object: &Map<String, Value>) -> Option<&Value> {
    let is_part = |value: &Value| value.is_string() || value.get("type").is_some_and(Value::is_string);
    let content = object.get("content")?;
    content.as_array().filter(|parts| !parts.is_empty() && parts.iter().all(is_part)).map(|_| content)
}

/// Returns the text and image lists if exactly one entry, text or image, is filled at each index.
fn interleaved_lists(object: &Map<String, Value>) -> Option<(&[Value], &[Value])> {
    let [texts, images] = ["texts", "images"].map(|name| object.get(name).and_then(Value::as_array));
    let (texts, images) = (texts?, images?);
    // Other datasets use the same keys with another meaning; only complementary gaps prove interleaving.
    let is_filled = texts.len() == images.len()
        && texts.iter().zip(images).all(|(text, image)| text.is_null() != image.is_null());
    is_filled.then_some((texts, images))
}

/// Reads a prompt without targets, and the messages that complete the prompt.
fn continued<'a>(
    object: &'a Map<String, Value>,
    rest: &str,
    unread: &mut Unread,
) -> Result<Dialogue<'a>, String> {
    let mut dialogue = Dialogue::default();
    let turns = &mut dialogue.turns;
    read_turns(&object[PROMPT], PROMPT, turns, unread)?;
    for turn in turns.iter_mut() {
        turn.is_target = false;
    }
    match &object[rest] {
        Value::String(text) => turns.push(Turn::from_text(ASSISTANT, text.into())?),
        Value::Object(_) => {
            let list = Value::Array(vec![object[rest].clone()]);
            let mut owned = Vec::new();
            read_turns(&list, rest, &mut owned, unread)?;
            turns.extend(owned.into_iter().map(Turn::into_owned));
        }
        list => read_turns(list, rest, turns, unread)?,
    }
    Ok(dialogue)
}

/// Adds document content other than turns: system prompt, tools, documents and other variables.
fn with_context<'a>(
    mut dialogue: Dialogue<'a>,
    object: &'a Map<String, Value>,
    used: &mut Vec<&'a str>,
) -> Result<Dialogue<'a>, String> {
    let is_flagged = |key: &&str| object.get(*key).is_some_and(Value::is_boolean);
    // Next to other questions, `label` is a class.
    let is_rated = |key: &&str| *key != "label" || RATED_KEYS.iter().any(|rated| object.contains_key(*rated));
    if let Some(key) = UNPAIRED_PREFERENCE.iter().filter(|key| is_rated(key)).find(|key| is_flagged(key)) {
        return Err(format!(
            "`{key}` is true or false: data for preference training, which no loss of next tokens fits"
        ));
    }
    let filled = |key: &str| object.get_key_value(key).filter(|(_, value)| !is_blank(value));
    if let Some((key, value)) = SYSTEM_KEYS.into_iter().find_map(filled) {
        let text = value.as_str().ok_or_else(|| format!("`{key}` must be a text"))?;
        // A system turn outranks the column, which is noted as unread.
        if dialogue.turns.first().is_none_or(|turn| turn.role != SYSTEM) {
            used.push(key);
            dialogue.turns.insert(0, Turn::from_text(SYSTEM, text.into())?);
        }
    }
    if let Some((key, value)) = filled(TOOLS) {
        used.push(key);
        dialogue.variables.push((TOOLS.into(), json_list(key, value)?));
    } else if let Some((key, value)) = filled(FUNCTIONS) {
        used.push(key);
        let functions = json_list(key, value)?;
        let tools = functions.as_array().into_iter().flatten();
        let tools: Value = tools.map(|function| json!({"type": "function", "function": function})).collect();
        dialogue.variables.push((TOOLS.into(), Cow::Owned(tools)));
    }
    if let Some((key, value)) = filled(DOCUMENTS) {
        used.push(key);
        dialogue.variables.push((DOCUMENTS.into(), json_list(key, value)?));
    }
    if let Some((key, Value::Object(variables))) = filled(TEMPLATE_VARIABLES) {
        used.push(key);
        let variable = |(name, value): (&'a String, &'a Value)| (name.into(), Cow::Borrowed(value));
        dialogue.variables.extend(variables.iter().map(variable));
    }
    Ok(dialogue)
}

/// Returns a list that may be written as JSON in a string; a single object is a list with one entry.
fn json_list<'a>(key: &str, value: &'a Value) -> Result<Cow<'a, Value>, String> {
    let parsed = match value {
        Value::String(text) => Cow::Owned(serde_json::from_str(text).map_err(|error| {
            let shown = excerpt(text, EXCERPT_CHARACTERS);
            format!("`{key}` is a string that is not JSON: {error}: `{shown}`")
        })?),
        value => Cow::Borrowed(value),
    };
    match &*parsed {
        Value::Array(_) => Ok(parsed),
        Value::Object(_) => Ok(Cow::Owned(Value::Array(vec![parsed.into_owned()]))),
        _ => Err(format!("`{key}` must be a list")),
    }
}

/// Maximum number of parts listed per document.
const PARTS_MAX: usize = 64;

/// Unread document parts, if requested.
#[derive(Debug, Default)]
pub(in crate::sample) struct Unread {
    parts: Option<Vec<(String, String)>>,
}

impl Unread {
    /// Creates an empty list.
    pub(in crate::sample) fn listed() -> Self {
        Self { parts: Some(Vec::new()) }
    }

    /// Returns whether parts are listed.
    fn is_noted(&self) -> bool {
        self.parts.is_some()
    }

    /// Returns the key path and the shortened value for each part.
    pub(in crate::sample) fn into_parts(self) -> Vec<(String, String)> {
        self.parts.unwrap_or_default()
    }

    /// Notes a nonempty part, once.
    fn note(&mut self, path: &str, value: &Value) {
        let Some(parts) = &mut self.parts else { return };
        let path = excerpt(path, EXCERPT_CHARACTERS);
        if !is_blank(value) && parts.len() < PARTS_MAX && !parts.iter().any(|(known, _)| *known == path) {
            parts.push((path.into_owned(), json_excerpt(value)));
        }
    }

    /// Notes the keys in a document without text, except keys that name media.
    pub(in crate::sample) fn note_document(&mut self, document: &Value) {
        for (key, value) in document.as_object().into_iter().flatten() {
            if !is_media_column(key, value) {
                self.note(key, value);
            }
        }
    }

    /// Notes the unread keys of an object in a list.
    fn note_keys(&mut self, object: &Map<String, Value>, list: &str, is_read: impl Fn(&str) -> bool) {
        if self.is_noted() {
            for (key, value) in object.iter().filter(|(key, value)| !is_blank(value) && !is_read(key)) {
                self.note(&format!("{list}[].{key}"), value);
            }
        }
    }
}

/// Flags on assistant turns: OpenAI's `weight`, ms-swift's `loss` and `loss_scale`, axolotl's `train` and
/// `training`.
const FLAGS: [&str; 5] = ["weight", "loss", "loss_scale", "train", "training"];
/// Flags that axolotl obeys on turns with any role.
const FLAGS_OF_ANY_ROLE: [&str; 2] = ["train", "training"];
/// Word prefixes in names of other switches, which must not be overlooked.
const SWITCH_WORDS: [&str; 7] = ["train", "loss", "mask", "weight", "learn", "supervis", "ignore"];

/// Returns whether a turn key is a flag.
fn is_flag(key: &str) -> bool {
    FLAGS.contains(&key)
}

/// Returns whether the flags keep a turn as a training target; without flags, an assistant turn is a target.
///
/// # Errors
/// A flag that is neither on nor off, that marks a turn with a different role as a target, or that is
/// unknown.
fn is_target(turn: &Map<String, Value>, is_assistant: bool) -> Result<bool, String> {
    let mut is_on = true;
    for (key, value) in turn {
        if value.is_null() || !is_switch(key, value) {
            continue;
        }
        if !is_flag(key) {
            return Err(format!(
                "`{key}` looks like a training flag that is not known; known flags are {}",
                FLAGS.map(|flag| format!("`{flag}`")).join(", ")
            ));
        }
        let is_set = match value.as_bool().or_else(|| value.as_f64().map(|number| number != 0.0)) {
            Some(_) if value.as_f64().is_some_and(|number| ![0.0, 1.0].contains(&number)) => None,
            is_set => is_set,
        };
        let Some(is_set) = is_set else {
            return Err(format!("`{key}` must be true or false, 1 or 0, found {}", json_excerpt(value)));
        };
        if is_set && !is_assistant && FLAGS_OF_ANY_ROLE.contains(&key.as_str()) {
            return Err(format!("`{key}` is true, but only turns of the assistant can be training targets"));
        }
        is_on &= is_set;
    }
    Ok(is_on && is_assistant)
}

/// Returns whether a turn key switches training: a known flag, a flag by name, or character ranges to train
/// on.
fn is_switch(key: &str, value: &Value) -> bool {
    if is_flag(key) {
        return true;
    }
    let is_short = value.is_boolean() || value.is_number() || key.ends_with("_detail");
    is_short && words(key).any(|word| SWITCH_WORDS.iter().any(|switch| word.starts_with(switch)))
}

/// Returns the words in a key such as `is_train` or `isTrain`, in lower case.
fn words(key: &str) -> impl Iterator<Item = String> {
    let mut spaced = String::with_capacity(key.len() + 1);
    for letter in key.chars() {
        if letter.is_uppercase() {
            spaced.push(' ');
        }
        spaced.extend(letter.to_lowercase());
    }
    let words: Vec<String> =
        spaced.split(|letter: char| !letter.is_alphanumeric()).map(str::to_owned).collect();
    words.into_iter()
}

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
fn is_key(name: &str) -> bool {
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
