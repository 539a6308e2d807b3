//! Converts the fields of a sample to turns.
//!
//! The rules are those of [`crate::sample::document`], by which [`crate::sample`] estimated the sample's
//! tokens: a JSON conversation takes precedence, then text fields, then a question and its answer, then a
//! caption. Only text that was counted is prepared.

use super::chat_template::{Message, MessagePart};
use super::error::PrepareError;
use crate::sample::document::{Part, SampleMedia, Turn};
use crate::sample::text::{ASSISTANT_ROLES, MediumSlot, turns};
use crate::sample::{Field, Sample};

/// Text of a sample, with the positions of its media.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Conversation {
    /// Turns of a chat; those of the assistant are training targets.
    Turns(Vec<Message>),
    /// Text without turns, such as a caption, all of which is a training target.
    Plain(Vec<MessagePart>),
}

/// Conversation with the media it contains, in the order of their placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleConversation {
    /// Turns or plain text.
    pub conversation: Conversation,
    /// Indices of the images in the sample's fields.
    pub images: Vec<usize>,
    /// Indices of the audio clips in the sample's fields.
    pub clips: Vec<usize>,
    /// Indices of the videos in the sample's fields.
    pub videos: Vec<usize>,
}

/// Reads the conversation of a sample.
///
/// Media are matched with placeholders as in [`crate::sample::document`]. In a conversation, media of a
/// modality without any placeholder go before the first turn of the user. Media for which `takes` is false
/// are left out.
///
/// # Errors
/// [`PrepareError::Conversation`] if turns cannot be read, or placeholders and media do not match.
pub fn read_conversation(
    sample: &Sample,
    takes: impl Fn(MediumSlot) -> bool,
) -> Result<SampleConversation, PrepareError> {
    let media = SampleMedia::of_kinds(sample, takes)?;
    let mut shown = Shown { media: &media, images: Vec::new(), clips: Vec::new(), videos: Vec::new() };
    let mut conversation = match media.turns()? {
        Some(turns) => Conversation::Turns(messages(turns, &mut shown)?),
        None => Conversation::Plain(join_texts(shown.parts(media.parts()?))),
    };
    if let Conversation::Turns(messages) = &mut conversation {
        for slot in [MediumSlot::Video, MediumSlot::Audio, MediumSlot::Image] {
            shown.put_in_front(messages, slot);
        }
    }
    let [images, clips, videos] =
        [&shown.images, &shown.clips, &shown.videos].map(|fields| places(sample, fields));
    let has_media = [&images, &clips, &videos].iter().any(|places| !places.is_empty());
    if !has_media && is_empty(&conversation) {
        return Err(PrepareError::conversation(
            None,
            "the sample has no text and no media that this model takes",
        ));
    }
    Ok(SampleConversation { conversation, images, clips, videos })
}

/// Media with a position in the text, in the order of their placeholders.
struct Shown<'m, 'a> {
    media: &'m SampleMedia<'a>,
    images: Vec<&'a Field>,
    clips: Vec<&'a Field>,
    videos: Vec<&'a Field>,
}

impl Shown<'_, '_> {
    fn parts(&mut self, parts: Vec<Part<'_>>) -> Vec<MessagePart> {
        let part = |part| match part {
            Part::Text(text) => MessagePart::Text(text.to_owned()),
            Part::Image(at) => {
                self.images.push(self.media.images[at]);
                MessagePart::Image
            }
            Part::Audio(at) => {
                self.clips.push(self.media.audio[at]);
                MessagePart::Audio
            }
            Part::Video(at) => {
                self.videos.push(self.media.videos[at]);
                MessagePart::Video
            }
        };
        parts.into_iter().map(part).collect()
    }

    /// Puts media without placeholders before the text of the first user turn.
    fn put_in_front(&mut self, messages: &mut Vec<Message>, slot: MediumSlot) {
        let (shown, part) = match slot {
            MediumSlot::Image => (&mut self.images, MessagePart::Image),
            MediumSlot::Audio => (&mut self.clips, MessagePart::Audio),
            MediumSlot::Video => (&mut self.videos, MessagePart::Video),
        };
        let media = self.media.of_slot(slot);
        if !shown.is_empty() || media.is_empty() || messages.is_empty() {
            return;
        }
        shown.extend(media);
        let at = messages.iter().position(|message| message.role == "user").unwrap_or_else(|| {
            let at = messages.iter().position(|message| message.role != "system").unwrap_or(messages.len());
            messages.insert(at, Message { role: "user".to_owned(), content: Vec::new() });
            at
        });
        messages[at].content.splice(0..0, std::iter::repeat_n(part, media.len()));
    }
}

/// Returns the indices of these fields among those of the sample.
fn places(sample: &Sample, fields: &[&Field]) -> Vec<usize> {
    let place = |field: &&Field| sample.fields.iter().position(|known| std::ptr::eq(known, *field));
    fields.iter().filter_map(place).collect()
}

fn is_empty(conversation: &Conversation) -> bool {
    match conversation {
        Conversation::Turns(messages) => messages.is_empty(),
        Conversation::Plain(parts) => parts.is_empty(),
    }
}

/// Joins adjacent texts, which come from different fields or entries, with a line break.
fn join_texts(parts: Vec<MessagePart>) -> Vec<MessagePart> {
    let mut joined: Vec<MessagePart> = Vec::with_capacity(parts.len());
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(MessagePart::Text(before)), MessagePart::Text(text)) => {
                before.push('\n');
                before.push_str(&text);
            }
            (_, part) => joined.push(part),
        }
    }
    joined
}

fn messages(spoken: Vec<Turn<'_>>, shown: &mut Shown<'_, '_>) -> Result<Vec<Message>, PrepareError> {
    let written = shown.media.json.and_then(turns);
    let field = written.map(|_| shown.media.json_name());
    if spoken.is_empty() {
        return Err(PrepareError::conversation(field, "the conversation has no turns"));
    }
    let mut messages = Vec::with_capacity(spoken.len());
    for (number, turn) in spoken.into_iter().enumerate() {
        let in_turn = |reason| PrepareError::conversation(field, format!("turn {number}: {reason}"));
        let calls = written.and_then(|turns| turns.get(number)?.get("tool_calls"));
        if calls.is_some_and(|calls| !calls.is_null()) {
            return Err(in_turn("tool calls are not supported"));
        }
        if turn.role.is_empty() {
            return Err(in_turn("a role is required"));
        }
        messages.push(Message { role: role(turn.role), content: shown.parts(turn.parts) });
    }
    Ok(messages)
}

/// Converts a role to the name that chat templates use.
fn role(name: &str) -> String {
    match name.to_ascii_lowercase().as_str() {
        "human" => "user".to_owned(),
        name if ASSISTANT_ROLES.contains(&name) => "assistant".to_owned(),
        name => name.to_owned(),
    }
}
