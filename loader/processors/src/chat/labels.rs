//! Finds the training targets: the text of the assistant, and the token that ends each of its turns.
//!
//! A conversation is rendered twice, once unchanged and once with every text of the assistant replaced by a
//! mark. The text between the marks is the template's own, so the rest of the first rendering is the
//! assistant's, to the byte, for any template. A template that changes more than the white space around those
//! texts is rejected.

use std::ops::Range;

use dflop_samples::{Error, Result};

use super::chat_template::ChatTemplate;
use super::tokenizer::{Encoded, Tokenizer};
use crate::message::{Message, MessagePart};

/// Private-use characters, which no template trims and no dataset contains in this order.
const MARK: [char; 2] = ['\u{F0000}', '\u{F0001}'];

/// Text with the byte ranges that are training targets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MarkedText {
    pub(crate) text: String,
    pub(crate) targets: Vec<Range<usize>>,
}

/// Renders conversations and finds the targets in them.
#[derive(Debug, Clone)]
pub(crate) struct Labeler {
    template: ChatTemplate,
    /// Text that the template writes after every turn of the assistant, up to and including the first control
    /// token.
    end_of_turn: Option<String>,
}

impl Labeler {
    /// Tests the template on a question and its answer.
    ///
    /// # Errors
    /// [`Error::Config`] if the template cannot render them, or changes the answer so that it is not found
    /// again.
    pub(crate) fn new(template: ChatTemplate, tokenizer: &Tokenizer) -> Result<Self> {
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

    /// Renders a conversation and finds the text of the assistant in it.
    ///
    /// # Errors
    /// The error of the template, or that it changes the text of the assistant.
    pub(crate) fn render(&self, messages: &[Message]) -> Result<MarkedText, String> {
        let text = self.template.render(messages, false)?;
        let (marked, assistant_texts) = with_marks(messages);
        let marked = self.template.render(&marked, false)?;
        let own = between_marks(&marked, assistant_texts.len())
            .ok_or("the chat template repeats or omits the text of the assistant")?;
        let changed = || "the chat template changes the text of the assistant".to_owned();
        let mut at = own[0].len();
        if !text.starts_with(own[0]) {
            return Err(changed());
        }
        let mut targets = Vec::with_capacity(assistant_texts.len());
        for ((words, is_last_of_turn), next) in assistant_texts.into_iter().zip(&own[1..]) {
            let end = at + written_length(&text[at..], words, next).ok_or_else(changed)?;
            let end_of_turn = self.end_of_turn.as_deref().filter(|_| is_last_of_turn);
            let end_of_turn = end_of_turn.filter(|end_of_turn| text[end..].starts_with(end_of_turn));
            targets.push(at..end + end_of_turn.map_or(0, str::len));
            at = end + next.len();
        }
        // Text left over means that the template renders marks differently from other texts.
        if at != text.len() {
            return Err(changed());
        }
        Ok(MarkedText { text, targets })
    }
}

/// Returns the messages with marks in place of the assistant's texts, and these texts with whether each ends
/// a turn.
fn with_marks(messages: &[Message]) -> (Vec<Message>, Vec<(&str, bool)>) {
    let mut assistant_texts: Vec<(&str, bool)> = Vec::new();
    let mut marked = messages.to_vec();
    for (message, marked) in messages.iter().zip(&mut marked) {
        if message.role != "assistant" {
            continue;
        }
        let before = assistant_texts.len();
        for (part, marked) in message.content.iter().zip(&mut marked.content) {
            if let MessagePart::Text(words) = part {
                *marked = MessagePart::Text(mark(assistant_texts.len()));
                assistant_texts.push((words, false));
            }
        }
        if let Some((_, is_last_of_turn)) = assistant_texts[before..].last_mut() {
            *is_last_of_turn = true;
        }
    }
    (marked, assistant_texts)
}

fn mark(number: usize) -> String {
    format!("{}{number}{}", MARK[0], MARK[1])
}

/// Returns the template's text around the marks, one piece more than marks, if each occurs once and in order.
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

/// Returns the length of `words` in `text`, where the template may have trimmed it before `next`.
fn written_length(text: &str, words: &str, next: &str) -> Option<usize> {
    // Templates commonly trim a text; whichever form the following text fits is the right one.
    let forms = [words, words.trim_end(), words.trim_start(), words.trim()];
    let fits = |form: &&str| text.strip_prefix(form).is_some_and(|rest| rest.starts_with(next));
    forms.into_iter().find(fits).map(str::len)
}

/// Returns for each token whether it lies in a target, at least in part.
///
/// A tokenizer may merge the template's last line break with a leading one of the assistant; such a token is
/// a target, as in the assistant masks of `transformers`.
///
/// A token of nothing but trimmed spaces has an empty range; it belongs to the target that contains its end.
pub(crate) fn target_tokens(encoded: &Encoded, targets: &[Range<usize>]) -> Vec<bool> {
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
