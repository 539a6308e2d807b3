//! Converts sample fields to turns.
//!
//! [`dflop_samples::sample::document`] reads the text, and also estimated the sample's tokens: a JSON
//! conversation takes precedence, then text fields, then a question and an answer, then a caption. Only text
//! that was counted is prepared.

use dflop_samples::inputs::PrepareError;
use dflop_samples::media::Modality;
use dflop_samples::sample::document::{ChatTurn, ContentPart, SampleMedia};
use dflop_samples::sample::{Field, Sample};

use crate::message::{Dialogue, Message, MessagePart, to_value};

/// Sample text, with media positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Conversation {
    /// Chat turns; assistant turns are training targets.
    Turns(Dialogue),
    /// Text without turns, such as a caption; all text is a training target.
    Plain(Vec<MessagePart>),
}

/// Conversation and media, in placeholder order.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleConversation {
    /// Turns or plain text.
    pub conversation: Conversation,
    /// Image indices in the sample's fields.
    pub images: Vec<usize>,
    /// Audio clip indices in the sample's fields.
    pub clips: Vec<usize>,
    /// Video indices in the sample's fields.
    pub videos: Vec<usize>,
}

/// Reads the conversation in a sample.
///
/// Media are matched with placeholders as in [`dflop_samples::sample::document`]. In a conversation, media
/// whose modality has no placeholder go before the first user turn. Media for which `takes` is false are
/// omitted.
///
/// # Errors
/// [`PrepareError::Conversation`] if turns cannot be read, or placeholders and media do not match.
pub fn read_conversation(
    sample: &Sample,
    takes: impl Fn(Modality) -> bool,
) -> Result<SampleConversation, PrepareError> {
    let media = SampleMedia::for_modalities(sample, takes)?;
    let mut placed = PlacedMedia { media: &media, placed: Default::default() };
    let mut conversation = match media.turns()? {
        Some(turns) => {
            let messages = messages(turns, &mut placed)?;
            let variables = media.variables().map(|(name, value)| (name.to_owned(), to_value(value)));
            Conversation::Turns(Dialogue { messages, variables: variables.collect() })
        }
        None => Conversation::Plain(join_texts(placed.parts(media.parts()?))),
    };
    if let Conversation::Turns(dialogue) = &mut conversation {
        // Each modality is put before the previous modality, so images end up first.
        for modality in [Modality::Video, Modality::Audio, Modality::Image] {
            placed.prepend_unplaced(&mut dialogue.messages, modality);
        }
    }
    let [images, clips, videos] = placed.placed.map(|fields| field_indices(sample, &fields));
    let has_media = [&images, &clips, &videos].iter().any(|indices| !indices.is_empty());
    if !has_media && is_empty(&conversation) {
        return Err(PrepareError::conversation(
            None,
            "the sample has no text and no media that this model takes",
        ));
    }
    Ok(SampleConversation { conversation, images, clips, videos })
}

/// Media with a position in the text, in placeholder order.
struct PlacedMedia<'m, 'a> {
    media: &'m SampleMedia<'a>,
    /// Media by modality, in the order of [`Modality::ALL`].
    placed: [Vec<&'a Field>; 3],
}

impl PlacedMedia<'_, '_> {
    fn parts(&mut self, parts: Vec<ContentPart<'_>>) -> Vec<MessagePart> {
        let part = |part| match part {
            ContentPart::Text(text) => MessagePart::Text(text.to_owned()),
            ContentPart::Medium(modality, at) => {
                self.placed[modality as usize].push(self.media.by_modality(modality)[at]);
                MessagePart::Medium(modality)
            }
        };
        parts.into_iter().map(part).collect()
    }

    /// Puts media without placeholders before the text of the first user turn.
    fn prepend_unplaced(&mut self, messages: &mut Vec<Message>, modality: Modality) {
        let (placed, media) = (&mut self.placed[modality as usize], self.media.by_modality(modality));
        if !placed.is_empty() || media.is_empty() || messages.is_empty() {
            return;
        }
        placed.extend(media);
        let at = messages.iter().position(|message| message.role == "user").unwrap_or_else(|| {
            let at = messages.iter().position(|message| message.role != "system").unwrap_or(messages.len());
            messages.insert(at, Message::new("user", Vec::new()));
            at
        });
        messages[at].content.splice(0..0, std::iter::repeat_n(MessagePart::Medium(modality), media.len()));
    }
}

/// Returns the indices of these fields in the sample.
fn field_indices(sample: &Sample, fields: &[&Field]) -> Vec<usize> {
    // By identity, because two fields may be equal.
    let index = |field: &&Field| sample.fields.iter().position(|known| std::ptr::eq(known, *field));
    fields.iter().filter_map(index).collect()
}

fn is_empty(conversation: &Conversation) -> bool {
    match conversation {
        Conversation::Turns(dialogue) => dialogue.messages.is_empty(),
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

fn messages(
    turns: Vec<ChatTurn<'_>>,
    placed: &mut PlacedMedia<'_, '_>,
) -> Result<Vec<Message>, PrepareError> {
    if turns.is_empty() {
        return Err(PrepareError::conversation(placed.media.text_name(), "the conversation has no turns"));
    }
    let message = |turn: ChatTurn<'_>| Message {
        role: turn.role.to_owned(),
        content: placed.parts(turn.parts),
        is_string: turn.is_string,
        is_target: turn.is_target,
        keys: turn.keys.into_iter().map(|(key, value)| (key.to_owned(), to_value(value))).collect(),
        call_text: turn.call_text.map(str::to_owned),
    };
    Ok(turns.into_iter().map(message).collect())
}
