//! Parts of a document: texts and media in order.

use super::names::{field_named, is_inline, is_url, no_field};
use super::{MediaFault, SampleMedia, SampleText, field_modality};
use crate::error::{EXCERPT_CHARACTERS, excerpt};
use crate::media::{LONE_SURROGATE, Media, Modality};
use crate::sample::{Field, Piece, split_placeholders};
use serde_json::Value;
use std::borrow::Cow;

/// Content piece in the final order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentPart<'a> {
    /// Text between media, never empty.
    Text(&'a str),
    /// A medium, by modality and index in [`SampleMedia::by_modality`].
    Medium(Modality, usize),
}

/// Conversation turn, as chat templates accept it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTurn<'a> {
    /// Role: `user`, `assistant`, `system`, `tool`, or any other role in lower case.
    pub role: &'a str,
    /// Texts and media in the turn, in order.
    pub parts: Vec<ContentPart<'a>>,
    /// Whether the content is a string in the document, rather than a list of parts.
    pub is_string: bool,
    /// Whether the turn is a training target: an assistant turn that no flag excludes.
    pub is_target: bool,
    /// Message keys other than role and content, such as `tool_calls`, in order.
    pub keys: Vec<(&'a str, &'a Value)>,
    /// Text of a tool call turn; `tool_calls` has the call parsed.
    pub call_text: Option<&'a str>,
}

impl SampleMedia<'_> {
    /// Returns the sample's turns, or `None` if the sample is not a conversation.
    ///
    /// Turns come from a document; without such a document, and without text fields, from a question and an
    /// answer in the first JSON field that has text. Content is either a string, in which `<image>`,
    /// `<audio>` and `<video>` represent the next medium and absorb one line break on either side, or a list
    /// of parts: `{"type": "text", "text": …}`, `{"type": "image"}` for the next image that no part names,
    /// `{"type": "image", "image": "0.jpg"}` or `{"type": "image_url", "image_url": {"url": "0.jpg"}}` for a
    /// named image, and likewise for audio and video. Media whose modality has no placeholders are not among
    /// the parts.
    ///
    /// # Errors
    /// [`MediaFault`] if the number of placeholders for a modality differs from the number of media, if a
    /// name has no field, if the conversation cannot be read, or if a second document has turns.
    pub fn turns(&self) -> Result<Option<Vec<ChatTurn<'_>>>, MediaFault> {
        let SampleText::Dialogue(field, dialogue) = self.text.as_ref().map_err(MediaFault::clone)? else {
            return Ok(None);
        };
        let contents: Vec<&[UnplacedPart<'_>]> =
            dialogue.turns.iter().map(|turn| &turn.content[..]).collect();
        let placed = self.place_media(field, &contents)?;
        let turns = dialogue.turns.iter().zip(placed).map(|(turn, parts)| ChatTurn {
            role: &turn.role,
            parts,
            is_string: turn.is_string,
            is_target: turn.is_target,
            keys: turn.keys().map(|(key, value)| (key.as_str(), value)).collect(),
            call_text: turn.call_text.as_deref(),
        });
        Ok(Some(turns.collect()))
    }

    /// Returns the chat template variables that a document defines in addition to turns: `tools`,
    /// `documents`.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Value)> {
        let variables = match &self.text {
            Ok(SampleText::Dialogue(_, dialogue)) => &dialogue.variables[..],
            _ => &[],
        };
        variables.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns the extension of the field that the text was read from; `None` without a document with text.
    #[must_use]
    pub fn text_name(&self) -> Option<&str> {
        match self.text.as_ref().ok()? {
            SampleText::Dialogue(field, _)
            | SampleText::Content(field, _)
            | SampleText::Caption(field, _) => Some(field),
            SampleText::Fields(..) => None,
        }
    }

    /// Returns the content of a sample that is not a conversation, in order.
    ///
    /// Content comes from the first of these sources: a part list under `content` in the document; the
    /// document's lists `texts` and `images` where exactly one entry is filled at each index; text fields and
    /// media fields by number, if all are numbered in the same way (`0.txt 1.jpg 2.txt`); text fields, or a
    /// caption in a JSON field, after all media whose modality has no placeholder in the text.
    ///
    /// # Errors
    /// See [`turns`](Self::turns).
    pub fn parts(&self) -> Result<Vec<ContentPart<'_>>, MediaFault> {
        let (field, words): (&str, &[UnplacedPart<'_>]) =
            match self.text.as_ref().map_err(MediaFault::clone)? {
                SampleText::Dialogue(..) => ("", &[]),
                SampleText::Content(field, parts) => return self.place_in_one(field, parts),
                SampleText::Caption(field, parts) | SampleText::Fields(field, parts) => (field, parts),
            };
        self.place_behind_media(field, words)
    }

    /// Places the text, preceded by all media whose modality has no placeholder in the text.
    fn place_behind_media<'s>(
        &'s self,
        field: &str,
        words: &'s [UnplacedPart<'_>],
    ) -> Result<Vec<ContentPart<'s>>, MediaFault> {
        let in_front = |&modality: &Modality| {
            !words.iter().any(|part| matches!(part, UnplacedPart::Media(of, _) if *of == modality))
        };
        let modalities = Modality::ALL.into_iter().filter(in_front);
        let mut content: Vec<ContentPart<'s>> = modalities
            .flat_map(|modality| {
                (0..self.by_modality(modality).len()).map(move |at| ContentPart::Medium(modality, at))
            })
            .collect();
        content.extend(self.place_in_one(field, words)?);
        Ok(content)
    }

    fn fault(&self, field: &str, reason: impl Into<String>) -> MediaFault {
        MediaFault::new(self.sample, field, reason)
    }

    fn place_in_one<'s>(
        &'s self,
        field: &str,
        content: &'s [UnplacedPart<'_>],
    ) -> Result<Vec<ContentPart<'s>>, MediaFault> {
        Ok(self.place_media(field, &[content])?.concat())
    }

    /// Replaces every placeholder by a medium.
    ///
    /// - `field`: field that the content comes from, for errors
    fn place_media<'s>(
        &self,
        field: &str,
        contents: &[&'s [UnplacedPart<'_>]],
    ) -> Result<Vec<Vec<ContentPart<'s>>>, MediaFault> {
        let orders = Modality::ALL.map(|modality| {
            let placeholders = contents.iter().copied().flatten().filter_map(|part| match part {
                UnplacedPart::Media(of, name) if *of == modality => Some(name.as_deref()),
                _ => None,
            });
            self.order(field, modality, &placeholders.collect::<Vec<_>>())
        });
        let [images, audio, videos] = orders;
        let mut orders = [images?.into_iter(), audio?.into_iter(), videos?.into_iter()];
        let mut part = |part: &'s UnplacedPart<'_>| match part {
            UnplacedPart::Text(text) => Some(ContentPart::Text(text)),
            UnplacedPart::Media(modality, _) => {
                orders[*modality as usize].next().map(|at| ContentPart::Medium(*modality, at))
            }
        };
        Ok(contents.iter().map(|content| content.iter().filter_map(&mut part).collect()).collect())
    }

    /// Returns the medium index for each placeholder: the named medium, else the next unnamed medium.
    fn order(
        &self,
        field: &str,
        modality: Modality,
        placeholders: &[Option<&str>],
    ) -> Result<Vec<usize>, MediaFault> {
        let media = self.by_modality(modality);
        let number = |name: &str| {
            let named = field_named(&self.sample.key, media, name)?;
            media.iter().position(|known| known.extension == named.extension)
        };
        let named: Vec<Option<usize>> = placeholders.iter().map(|name| name.and_then(number)).collect();
        if let Some(inline) = placeholders.iter().flatten().find(|name| is_inline(name)) {
            return Err(self.fault(inline, no_field(inline)));
        }
        // If no path is a field, the paths name the files that the fields were imported from.
        let mut wrong =
            placeholders.iter().zip(&named).filter(|(_, at)| at.is_none()).filter_map(|(name, _)| *name);
        if let Some(name) = wrong.next().filter(|_| named.iter().any(Option::is_some)) {
            return Err(self.fault(name, no_field(name)));
        }
        let is_named =
            |field: &Field| named.iter().flatten().any(|&at| media[at].extension == field.extension);
        let free: Vec<usize> = (0..media.len()).filter(|&at| !is_named(media[at])).collect();
        let unnamed = named.iter().filter(|at| at.is_none()).count();
        if !placeholders.is_empty() && unnamed != free.len() {
            if let Some(url) = placeholders.iter().flatten().find(|name| is_url(name)) {
                return Err(self.fault(url, no_field(url)));
            }
            let (placeholders, media) = (placeholders.len(), media.len());
            let (name, plural) = (modality.name(), modality.plural());
            return Err(self.fault(field, format!("{placeholders} {name} placeholders for {media} {plural}")));
        }
        let mut free = free.into_iter();
        Ok(named.into_iter().filter_map(|at| at.or_else(|| free.next())).collect())
    }
}

/// Returns a field's content: text split at placeholders, or a medium.
pub(super) fn content_of_field(field: &Field) -> Result<Vec<UnplacedPart<'_>>, String> {
    match (&field.media, field_modality(field)) {
        (Media::Text(text), _) => split_text(text),
        (_, Some(modality)) => Ok(vec![UnplacedPart::Media(modality, Some((&*field.extension).into()))]),
        _ => Ok(Vec::new()),
    }
}

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
