//! Finds the training targets: assistant text, and the token that ends each assistant turn.
//!
//! A template with `{% generation %}` blocks marks the targets itself, as for the assistant masks in
//! `transformers`. With any other template a conversation is rendered twice, once unchanged and once with
//! marks in place of texts, see [`super::marks`]: the text between the marks comes from the template.
//!
//! - If assistant turns have only content, the marks replace the content. The rest of the first rendering is
//!   assistant text, to the byte.
//! - If assistant turns have calls or reasoning, or if the template rewrites the content, the marks replace
//!   all other turns. A target is the text after the generation prompt, up to the token that ends the turn.

use std::ops::Range;

use dflop_samples::{Error, Result};

use super::chat_template::ChatTemplate;
use super::marks::{Aligned, Marked, align};
use super::tokenizer::{Encoded, Tokenizer};
use crate::message::{Dialogue, Message, MessagePart};

/// Private-use characters; a pair that does not occur in a text delimits generation blocks.
const BOUNDS: [[&str; 2]; 3] =
    [["\u{F0002}", "\u{F0003}"], ["\u{F0004}", "\u{F0005}"], ["\u{F0006}", "\u{F0007}"]];

/// Text with training target byte ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MarkedText {
    pub(crate) text: String,
    pub(crate) targets: Vec<Range<usize>>,
}

/// Renders conversations and finds the targets.
#[derive(Debug, Clone)]
pub(crate) struct Labeler {
    template: ChatTemplate,
    /// Text that the template writes after every assistant turn, up to and including the first control token.
    end_of_turn: Option<String>,
    /// Text that asks for an assistant turn; empty if there is none.
    generation_prompt: String,
    control_tokens: Vec<String>,
}

impl Labeler {
    /// Tests the template with a question and an answer.
    ///
    /// # Errors
    /// [`Error::Config`] if the template cannot render the test, or changes the answer so that it is not
    /// found again.
    pub(crate) fn new(template: ChatTemplate, tokenizer: &Tokenizer) -> Result<Self> {
        let turn = |role: &str, words: &str| Message::new(role, vec![MessagePart::Text(words.to_owned())]);
        let question = Dialogue::new(vec![turn("user", "question")]);
        let answered = Dialogue::new(vec![turn("user", "question"), turn("assistant", "answer")]);
        let prompts = [true, false].map(|has_prompt| template.render(&question, has_prompt));
        let generation_prompt = match &prompts {
            [Ok(with), Ok(without)] => with.strip_prefix(without.as_str()).unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        let control_tokens = tokenizer.control_tokens();
        let mut labeler = Self { template, end_of_turn: None, generation_prompt, control_tokens };
        let text = labeler.template.render(&answered, false);
        let marked = text.and_then(|text| labeler.mark_contents(text, &answered));
        let marked = marked.map_err(|reason| Error::Config { setting: "chat_template", reason })?;
        let tail = marked.targets.first().map_or("", |target| &marked.text[target.end..]);
        let blank = tail.len() - tail.trim_start().len();
        let control =
            labeler.control_tokens.iter().find(|control| tail[blank..].starts_with(control.as_str()));
        labeler.end_of_turn = control.map(|control| tail[..blank + control.len()].to_owned());
        Ok(labeler)
    }

    /// Renders a conversation and finds the targets.
    ///
    /// # Errors
    /// The template error, or the reason why the targets cannot be found.
    pub(crate) fn render(&self, mut dialogue: Dialogue) -> Result<MarkedText, String> {
        self.check_written(&mut dialogue)?;
        let text = self.template.render(&dialogue, false)?;
        if self.template.has_generation() {
            return self.mark_generation(text, &dialogue);
        }
        let assistant = || dialogue.messages.iter().filter(|message| message.is_assistant());
        if assistant().any(Message::has_more_than_content) {
            return self.mark_turns(text, &dialogue);
        }
        self.mark_contents(text.clone(), &dialogue)
            .or_else(|reason| self.mark_turns(text, &dialogue).map_err(|_| reason))
    }

    /// Rejects content that the template would drop; calls with known text become text.
    fn check_written(&self, dialogue: &mut Dialogue) -> Result<(), String> {
        let written = self.template.written();
        let dropped =
            |what: &str| Err(format!("the chat template does not write {what}, which the sample has"));
        if !written.calls && !dialogue.messages.iter_mut().all(Message::write_calls) {
            return dropped("the calls of tools");
        }
        let has_tools = dialogue.variables.iter().any(|(name, value)| name == "tools" && value.is_true());
        if !written.tools && has_tools {
            return dropped("`tools`");
        }
        if !written.reasoning && dialogue.messages.iter().any(Message::has_reasoning) {
            return dropped("`reasoning_content`");
        }
        Ok(())
    }

    /// Finds the template's generation blocks, and keeps the blocks of target turns.
    fn mark_generation(&self, text: String, dialogue: &Dialogue) -> Result<MarkedText, String> {
        let bounds = BOUNDS.into_iter().find(|bounds| !bounds.iter().any(|bound| text.contains(bound)));
        let bounds = bounds.ok_or("the text has the characters that mark its generation blocks")?;
        let bounded = self.template.render_bounds(dialogue, bounds)?;
        let (plain, mut targets) =
            blocks(&bounded, bounds).ok_or("the generation blocks of the chat template overlap")?;
        if plain != text {
            return Err("the chat template renders its generation blocks in different ways".to_owned());
        }
        let turns: Vec<&Message> =
            dialogue.messages.iter().filter(|message| message.is_assistant()).collect();
        if turns.iter().any(|turn| !turn.is_target) {
            if turns.len() != targets.len() {
                let (turns, blocks) = (turns.len(), targets.len());
                return Err(format!(
                    "flags exclude turns from training, but the chat template has {blocks} generation blocks for \
                     {turns} turns of the assistant"
                ));
            }
            let mut turns = turns.into_iter();
            targets.retain(|_| turns.next().is_some_and(|turn| turn.is_target));
        }
        targets.retain(|target| !target.is_empty());
        Ok(MarkedText { text, targets })
    }

    /// Finds assistant contents by marks that replace them.
    fn mark_contents(&self, text: String, dialogue: &Dialogue) -> Result<MarkedText, String> {
        let marked = Marked::new(dialogue, Message::is_assistant);
        let rendered = self.template.render(&marked.dialogue, false)?;
        let aligned = align(&text, &rendered, &marked.words)?;
        let is_in_order = aligned.iter().map(|mark| mark.number).eq(0..marked.words.len());
        if !is_in_order {
            return Err("the chat template repeats or omits the text of the assistant".to_owned());
        }
        let mut targets = Vec::with_capacity(aligned.len());
        for (place, mark) in aligned.iter().enumerate() {
            let message = marked.messages[mark.number];
            if !dialogue.messages[message].is_target {
                continue;
            }
            let is_last = aligned.get(place + 1).is_none_or(|next| marked.messages[next.number] != message);
            let Range { start, end } = mark.range.clone();
            let end_of_turn = self.end_of_turn.as_deref().filter(|_| is_last);
            let end_of_turn = end_of_turn.filter(|end_of_turn| text[end..].starts_with(end_of_turn));
            let target = start..end + end_of_turn.map_or(0, str::len);
            if !target.is_empty() {
                targets.push(target);
            }
        }
        Ok(MarkedText { text, targets })
    }

    /// Finds whole assistant turns by marks that replace the other turns.
    fn mark_turns(&self, text: String, dialogue: &Dialogue) -> Result<MarkedText, String> {
        let marked = Marked::new(dialogue, |message| !message.is_assistant());
        let rendered = self.template.render(&marked.dialogue, false)?;
        let aligned = align(&text, &rendered, &marked.words)?;
        let mut targets: Vec<Range<usize>> = Vec::new();
        // End of the last assistant turn, and the next mark after that turn.
        let (mut from, mut next_mark) = (0, 0);
        for (number, message) in dialogue.messages.iter().enumerate() {
            if !message.is_assistant() {
                continue;
            }
            let is_after_turn = number > 0 && dialogue.messages[number - 1].is_assistant();
            if number > 0 && !is_after_turn {
                let is_previous = |mark: &Aligned| marked.messages[mark.number] + 1 == number;
                let last = aligned.iter().rposition(is_previous);
                let last = last.ok_or("the chat template omits a turn before one of the assistant")?;
                (from, next_mark) = (aligned[last].range.end, last + 1);
            }
            let until = aligned.get(next_mark).map_or(text.len(), |mark| mark.range.start);
            let segment = text.get(from..until).ok_or("the chat template turns the conversation around")?;
            let start = if is_after_turn {
                self.after_prompt(segment)
            } else {
                self.after_header(segment, &marked, number).or_else(|| self.after_prompt(segment))
            };
            let start = start.ok_or("the start of a turn of the assistant was not found")?;
            let is_followed = dialogue.messages.get(number + 1).is_some_and(Message::is_assistant);
            let length = self
                .turn_length(&segment[start..], &dialogue.messages[..=number], dialogue, is_followed)
                .ok_or("the end of a turn of the assistant was not found")?;
            let target = from + start..from + start + length;
            from = target.end;
            if message.is_target && length > 0 {
                targets.push(target);
            }
        }
        Ok(MarkedText { text, targets })
    }

    /// Returns the position after the generation prompt.
    fn after_prompt(&self, segment: &str) -> Option<usize> {
        let prompt = self.generation_prompt.as_str();
        segment.find(prompt).filter(|_| !prompt.is_empty()).map(|at| at + prompt.len())
    }

    /// Returns the position after the text that the template writes between the previous turn and this turn:
    /// as far as the text equals the generation prompt.
    fn after_header(&self, segment: &str, marked: &Marked<'_>, number: usize) -> Option<usize> {
        let before = Dialogue {
            messages: marked.dialogue.messages[..number].to_vec(),
            variables: marked.dialogue.variables.clone(),
        };
        let asked = self.template.render(&before, true).ok()?;
        let header = marked.after_last_mark(&asked);
        if segment.starts_with(header) {
            return Some(header.len());
        }
        let common =
            segment.char_indices().zip(header.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at)?;
        // A word that only starts like the header, such as a tag, belongs to the turn.
        let line = segment[..common].rfind('\n').map(|at| at + 1);
        let control =
            |control: &String| segment[..common].rfind(control.as_str()).map(|at| at + control.len());
        self.control_tokens.iter().filter_map(control).chain(line).max()
    }

    /// Returns the turn length, including the token that ends the turn.
    ///
    /// - `messages`: conversation up to the turn
    /// - `is_followed`: whether the next turn is an assistant turn too
    fn turn_length(
        &self,
        rest: &str,
        messages: &[Message],
        dialogue: &Dialogue,
        is_followed: bool,
    ) -> Option<usize> {
        let place = |end: &str| {
            let at = if is_followed { rest.find(end) } else { rest.rfind(end) };
            at.map(|at| at + end.len())
        };
        if let Some(length) = self.end_of_turn.as_deref().and_then(place) {
            return Some(length);
        }
        // Some templates end a call differently.
        let variables = dialogue.variables.clone();
        let upto = self.template.render(&Dialogue { messages: messages.to_vec(), variables }, false).ok()?;
        let upto = upto.trim_end();
        let control = self.control_tokens.iter().find(|control| upto.ends_with(control.as_str()));
        match control {
            Some(control) => place(control),
            None => (messages.len() == dialogue.messages.len()).then_some(rest.len()),
        }
    }
}

/// Splits a text at generation block bounds; returns the text without bounds, and the blocks.
fn blocks(bounded: &str, [open, close]: [&str; 2]) -> Option<(String, Vec<Range<usize>>)> {
    let mut text = String::with_capacity(bounded.len());
    let mut found = Vec::new();
    let mut rest = bounded;
    while let Some((before, after)) = rest.split_once(open) {
        let (inside, after) = after.split_once(close)?;
        if before.contains(close) || inside.contains(open) {
            return None;
        }
        text.push_str(before);
        let start = text.len();
        text.push_str(inside);
        found.push(start..text.len());
        rest = after;
    }
    if rest.contains(close) {
        return None;
    }
    text.push_str(rest);
    Some((text, found))
}

/// Returns for each token whether it is in a target, at least in part.
///
/// A tokenizer may merge the template's last line break with a leading line break in the assistant text; such
/// a token is a target, as in the assistant masks in `transformers`.
///
/// A token that consists only of trimmed spaces has an empty range; it belongs to the target that contains
/// the range end.
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
