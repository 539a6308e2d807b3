//! Which words are learned: the assistant's, and the token that ends each of its turns.
//!
//! A conversation is rendered twice, as it is and with every text of the assistant replaced by a mark. What stands
//! between the marks is the template's own, so what is left of the first rendering is the assistant's, to the byte,
//! whatever the template looks like. A template that changes more than the white space around those texts is refused.

use std::ops::Range;

use super::chat_template::{ChatTemplate, Message, MessagePart};
use super::tokenizer::{Encoded, Tokenizer};
use crate::error::{Error, Result};

/// What the label of a token is that no loss is computed on.
pub const IGNORED: i32 = -100;

/// Characters for private use, which no template trims and no dataset holds in this order.
const MARK: [char; 2] = ['\u{F0000}', '\u{F0001}'];

/// A text and the bytes of it that are learned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marked {
    pub(super) text: String,
    pub(super) targets: Vec<Range<usize>>,
}

/// Renders conversations and finds what is learned in them.
#[derive(Debug, Clone)]
pub(super) struct Labeler {
    template: ChatTemplate,
    /// What the template writes behind every turn of the assistant, up to and with the first control token.
    end_of_turn: Option<String>,
}

impl Labeler {
    /// Tries the template on a question and its answer.
    ///
    /// # Errors
    /// [`Error::Config`] if the template cannot render them, or not so that the answer is found again.
    pub(super) fn new(template: ChatTemplate, tokenizer: &Tokenizer) -> Result<Self> {
        let text = |text: &str| vec![MessagePart::Text(text.to_owned())];
        let turn = |role: &str, words: &str| Message { role: role.to_owned(), content: text(words) };
        let mut labeler = Self { template, end_of_turn: None };
        let marked = labeler.render(&[turn("user", "question"), turn("assistant", "answer")]);
        let marked = marked.map_err(|reason| Error::Config { setting: "chat_template", reason })?;
        let tail = marked.targets.first().map_or("", |target| &marked.text[target.end..]);
        let blank = tail.len() - tail.trim_start().len();
        let controls = tokenizer.control_tokens();
        let control = controls.iter().find(|control| tail[blank..].starts_with(control.as_str()));
        labeler.end_of_turn = control.map(|control| tail[..blank + control.len()].to_owned());
        Ok(labeler)
    }

    /// Renders a conversation and finds what the assistant says in it.
    ///
    /// # Errors
    /// The template's refusal, or that it changes what the assistant says.
    pub(super) fn render(&self, messages: &[Message]) -> Result<Marked, String> {
        let text = self.template.render(messages, false)?;
        let (marked, said) = with_marks(messages);
        let marked = self.template.render(&marked, false)?;
        let own = between_marks(&marked, said.len())
            .ok_or("the chat template repeats or leaves out what the assistant says")?;
        let changed = || "the chat template changes what the assistant says".to_owned();
        let mut at = own[0].len();
        if !text.starts_with(own[0]) {
            return Err(changed());
        }
        let mut targets = Vec::with_capacity(said.len());
        for ((words, is_last_of_turn), next) in said.into_iter().zip(&own[1..]) {
            let end = at + written(&text[at..], words, next).ok_or_else(changed)?;
            let end_of_turn = self.end_of_turn.as_deref().filter(|_| is_last_of_turn);
            let end_of_turn = end_of_turn.filter(|end_of_turn| text[end..].starts_with(end_of_turn));
            targets.push(at..end + end_of_turn.map_or(0, str::len));
            at = end + next.len();
        }
        if at != text.len() {
            return Err(changed());
        }
        Ok(Marked { text, targets })
    }
}

/// The messages with marks for what the assistant says, and its texts with whether each ends its turn.
fn with_marks(messages: &[Message]) -> (Vec<Message>, Vec<(&str, bool)>) {
    let mut said: Vec<(&str, bool)> = Vec::new();
    let mut marked = messages.to_vec();
    for (message, marked) in messages.iter().zip(&mut marked) {
        if message.role != "assistant" {
            continue;
        }
        let before = said.len();
        for (part, marked) in message.content.iter().zip(&mut marked.content) {
            if let MessagePart::Text(words) = part {
                *marked = MessagePart::Text(mark(said.len()));
                said.push((words, false));
            }
        }
        if let Some((_, is_last_of_turn)) = said[before..].last_mut() {
            *is_last_of_turn = true;
        }
    }
    (marked, said)
}

fn mark(number: usize) -> String {
    format!("{}{number}{}", MARK[0], MARK[1])
}

/// What the template wrote around the marks: one piece more than marks, if each is there once and in order.
fn between_marks(marked: &str, marks: usize) -> Option<Vec<&str>> {
    let mut pieces = Vec::with_capacity(marks + 1);
    let mut rest = marked;
    for number in 0..marks {
        let (before, after) = rest.split_once(mark(number).as_str())?;
        pieces.push(before);
        rest = after;
    }
    pieces.push(rest);
    (!pieces.iter().any(|piece| piece.contains(MARK[0]))).then_some(pieces)
}

/// How many bytes of `text` are `words`, which the template may have trimmed, given what follows them.
fn written(text: &str, words: &str, next: &str) -> Option<usize> {
    let forms = [words, words.trim_end(), words.trim_start(), words.trim()];
    let fits = |form: &&str| text.strip_prefix(form).is_some_and(|rest| rest.starts_with(next));
    forms.into_iter().find(fits).map(str::len)
}

/// Which tokens stand for a target, in part or whole.
///
/// A tokenizer may join the template's last line break with one that the assistant begins with; such a token is
/// learned, as by the assistant masks of `transformers`.
///
/// A token of nothing but trimmed blanks has an empty range; it belongs to the target that its end lies in.
pub(super) fn target_tokens(encoded: &Encoded, targets: &[Range<usize>]) -> Vec<bool> {
    let is_in = |start: usize, end: usize, target: &Range<usize>| {
        let begins = if start < end { start < target.end } else { end <= target.end };
        begins && target.start < end
    };
    let mut next = 0;
    let is_target = |&(start, end): &(usize, usize)| {
        while targets.get(next).is_some_and(|target| target.end <= start && target.end < end) {
            next += 1;
        }
        targets.get(next).is_some_and(|target| is_in(start, end, target))
    };
    encoded.offsets.iter().map(is_target).collect()
}
