//! Fields of a sample to turns.
//!
//! The rules are those by which [`crate::measure`] estimated the sample's tokens: a JSON conversation counts first, then
//! text fields, then a question and its answer, then a caption. Only words that it counted are prepared.

use serde_json::Value;

use super::chat_template::{Message, MessagePart};
use super::error::PrepareError;
use super::sample_media::SampleMedia;
use crate::batch::Sample;
use crate::decode::Media;
use crate::text::{
    ASSISTANT_ROLES, CAPTIONS, MediumSlot, PAIRS, Piece, has_turns, split_placeholders, turns,
};

/// What a sample says, with the places of its media.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Conversation {
    /// Turns of a chat; the assistant's are learned.
    Turns(Vec<Message>),
    /// A text without turns, such as a caption, all of which is learned.
    Plain(Vec<MessagePart>),
}

/// A conversation and which media it shows, in the order of their placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleConversation {
    /// The words.
    pub conversation: Conversation,
    /// Places in the sample's fields of the pictures.
    pub images: Vec<usize>,
    /// Places in the sample's fields of the clips.
    pub clips: Vec<usize>,
}

/// Turns, or text, and what the JSON says about its media.
struct Said<'a> {
    conversation: Conversation,
    field: Option<&'a str>,
    json: Option<&'a Value>,
    /// Names that content parts give to their media; `None` for a placeholder without a name.
    names: [Vec<Option<String>>; 2],
}

/// Reads what a sample says.
///
/// The n-th placeholder takes the n-th medium of its kind, in the order that `images` or `audios` in the JSON or the
/// content parts themselves name them, else in shard order. Media without any placeholder go in front of the first
/// turn of the user. Media of a kind that `takes` says the model does not take are left out.
///
/// # Errors
/// [`PrepareError::Conversation`] if turns cannot be read, [`PrepareError::Placeholders`] if placeholders and media
/// do not match.
pub fn read_conversation(
    sample: &Sample,
    takes: impl Fn(MediumSlot) -> bool,
) -> Result<SampleConversation, PrepareError> {
    let mut said = said(sample)?;
    let mut places = [Vec::new(), Vec::new()];
    for slot in [MediumSlot::Audio, MediumSlot::Image] {
        let media = if takes(slot) { SampleMedia::of(sample, slot) } else { SampleMedia::none(slot) };
        let names = &said.names[index(slot)];
        if names.is_empty() && !media.is_empty() {
            put_in_front(&mut said.conversation, slot, media.len());
        }
        places[index(slot)] = media.in_order(names, said.json).map_err(|error| error.in_field(said.field))?;
    }
    let [images, clips] = places;
    let conversation = said.conversation;
    if images.is_empty() && clips.is_empty() && is_empty(&conversation) {
        return Err(PrepareError::conversation(None, "the sample has neither text nor media for this model"));
    }
    Ok(SampleConversation { conversation, images, clips })
}

const fn index(slot: MediumSlot) -> usize {
    match slot {
        MediumSlot::Image => 0,
        MediumSlot::Audio => 1,
    }
}

fn is_empty(conversation: &Conversation) -> bool {
    match conversation {
        Conversation::Turns(messages) => messages.is_empty(),
        Conversation::Plain(parts) => parts.is_empty(),
    }
}

/// Media go before the words of the first user turn, or of the text.
fn put_in_front(conversation: &mut Conversation, slot: MediumSlot, media: usize) {
    let part = match slot {
        MediumSlot::Image => MessagePart::Image,
        MediumSlot::Audio => MessagePart::Audio,
    };
    let parts = match conversation {
        Conversation::Plain(parts) => parts,
        Conversation::Turns(messages) => {
            let at = messages.iter().position(|message| message.role == "user").unwrap_or_else(|| {
                let at =
                    messages.iter().position(|message| message.role != "system").unwrap_or(messages.len());
                messages.insert(at, Message { role: "user".to_owned(), content: Vec::new() });
                at
            });
            &mut messages[at].content
        }
    };
    parts.splice(0..0, std::iter::repeat_n(part, media));
}

fn said(sample: &Sample) -> Result<Said<'_>, PrepareError> {
    let jsons = || {
        sample.fields.iter().filter_map(|field| match &field.media {
            Media::Json(json) => Some((&*field.extension, json)),
            _ => None,
        })
    };
    let mut conversations = jsons().filter(|(_, json)| has_turns(json));
    if let Some((field, json)) = conversations.next() {
        if let Some((other, _)) = conversations.next() {
            return Err(PrepareError::conversation(
                Some(other),
                format!("`{field}` holds a conversation already"),
            ));
        }
        return said_in_turns(field, json);
    }
    let mut said = Said {
        conversation: Conversation::Plain(Vec::new()),
        field: None,
        json: None,
        names: [const { Vec::new() }; 2],
    };
    let mut texts = sample.fields.iter().filter_map(|field| match &field.media {
        Media::Text(text) => Some((&*field.extension, text.as_str())),
        _ => None,
    });
    if let Some((field, first)) = texts.next() {
        let text = texts.fold(first.to_owned(), |text, (_, more)| text + "\n" + more);
        let parts = parts_of_text(&text, &mut said.names);
        (said.field, said.conversation) = (Some(field), Conversation::Plain(parts));
        said.json = jsons().next().map(|(_, json)| json);
        return Ok(said);
    }
    for (field, json) in jsons() {
        if let Some(conversation) = without_turns(json, &mut said.names) {
            (said.field, said.json, said.conversation) = (Some(field), Some(json), conversation);
            return Ok(said);
        }
    }
    said.json = jsons().next().map(|(_, json)| json);
    Ok(said)
}

/// A question and its answer, or a caption.
fn without_turns(json: &Value, names: &mut [Vec<Option<String>>; 2]) -> Option<Conversation> {
    for pair in PAIRS {
        let [Some(asked), Some(answered)] = pair.map(|key| json.get(key)?.as_str()) else { continue };
        let mut turn =
            |role: &str, text| Message { role: role.to_owned(), content: parts_of_text(text, names) };
        return Some(Conversation::Turns(vec![turn("user", asked), turn("assistant", answered)]));
    }
    let caption = CAPTIONS.iter().find_map(|key| json.get(key)?.as_str())?;
    Some(Conversation::Plain(parts_of_text(caption, names)))
}

fn said_in_turns<'a>(field: &'a str, json: &'a Value) -> Result<Said<'a>, PrepareError> {
    let mut names = [const { Vec::new() }; 2];
    let mut messages = Vec::new();
    for (number, turn) in turns(json).into_iter().flatten().enumerate() {
        let message = message(turn, &mut names);
        let in_turn = |reason| PrepareError::conversation(Some(field), format!("turn {number}: {reason}"));
        messages.push(message.map_err(in_turn)?);
    }
    if messages.is_empty() {
        return Err(PrepareError::conversation(Some(field), "the conversation has no turns"));
    }
    Ok(Said { conversation: Conversation::Turns(messages), field: Some(field), json: Some(json), names })
}

fn message(turn: &Value, names: &mut [Vec<Option<String>>; 2]) -> Result<Message, String> {
    let role = ["from", "role"].iter().find_map(|key| turn.get(key)?.as_str()).ok_or("it has no role")?;
    let role = role.to_ascii_lowercase();
    let role = match role.as_str() {
        "human" => "user".to_owned(),
        name if ASSISTANT_ROLES.contains(&name) => "assistant".to_owned(),
        _ => role,
    };
    if turn.get("tool_calls").is_some_and(|calls| !calls.is_null()) {
        return Err("tool calls cannot be prepared".to_owned());
    }
    let content = match ["value", "content"].iter().find_map(|key| turn.get(key)) {
        Some(Value::String(text)) => parts_of_text(text, names),
        Some(Value::Array(parts)) => {
            parts.iter().map(|part| content_part(part, names)).collect::<Result<_, _>>()?
        }
        _ => return Err("its content is neither a string nor a list of parts".to_owned()),
    };
    Ok(Message { role, content })
}

fn parts_of_text(text: &str, names: &mut [Vec<Option<String>>; 2]) -> Vec<MessagePart> {
    let part = |piece| match piece {
        Piece::Text(words) => MessagePart::Text(words.to_owned()),
        Piece::Slot(slot) => {
            names[index(slot)].push(None);
            part_of(slot)
        }
    };
    split_placeholders(text).into_iter().map(part).collect()
}

const fn part_of(slot: MediumSlot) -> MessagePart {
    match slot {
        MediumSlot::Image => MessagePart::Image,
        MediumSlot::Audio => MessagePart::Audio,
    }
}

/// A part of a content list; the text of a part is taken as it stands, without placeholders.
fn content_part(part: &Value, names: &mut [Vec<Option<String>>; 2]) -> Result<MessagePart, String> {
    if let Value::String(text) = part {
        return Ok(MessagePart::Text(text.clone()));
    }
    let kind = part.get("type").and_then(Value::as_str);
    let (slot, keys) = match kind {
        Some("text") => {
            let text = part.get("text").and_then(Value::as_str).ok_or("a text part has no `text`")?;
            return Ok(MessagePart::Text(text.to_owned()));
        }
        Some("image" | "image_url") => (MediumSlot::Image, ["image", "path", "url"]),
        Some("audio" | "audio_url") => (MediumSlot::Audio, ["audio", "path", "url"]),
        Some(other) => return Err(format!("content part of type `{other}` cannot be prepared")),
        None => return Err("a content part has no type".to_owned()),
    };
    let name = keys.iter().find_map(|key| part.get(key)?.as_str()).map(str::to_owned);
    names[index(slot)].push(name);
    Ok(part_of(slot))
}
