//! Finds conversation texts in the rendered form, by rendering the conversation again with marks in place of
//! the texts.

use std::ops::Range;

use crate::message::{Dialogue, Message, MessagePart};

/// Private-use characters around a mark number, which no template trims.
const MARK: [char; 2] = ['\u{F0000}', '\u{F0001}'];

/// Conversation with marks that replace the texts of some messages.
#[derive(Debug)]
pub(super) struct Marked<'a> {
    pub(super) dialogue: Dialogue,
    /// The replaced texts, by mark number.
    pub(super) words: Vec<&'a str>,
    /// Message index for each mark.
    pub(super) messages: Vec<usize>,
}

impl<'a> Marked<'a> {
    /// Replaces the texts of the wanted messages. A message that does not end with a text, because it is
    /// empty or ends with a medium, gets an empty final text, so that the message end is found.
    pub(super) fn new(dialogue: &'a Dialogue, is_wanted: impl Fn(&Message) -> bool) -> Self {
        let mut marked = Self { dialogue: dialogue.clone(), words: Vec::new(), messages: Vec::new() };
        for (number, message) in dialogue.messages.iter().enumerate() {
            if !is_wanted(message) {
                continue;
            }
            for (at, part) in message.content.iter().enumerate() {
                if let MessagePart::Text(words) = part {
                    marked.dialogue.messages[number].content[at] = marked.replace(words, number);
                }
            }
            if !matches!(message.content.last(), Some(MessagePart::Text(_))) {
                let end = marked.replace("", number);
                marked.dialogue.messages[number].content.push(end);
            }
        }
        marked
    }

    fn replace(&mut self, words: &'a str, message: usize) -> MessagePart {
        let mark = format!("{}{}{}", MARK[0], self.words.len(), MARK[1]);
        self.words.push(words);
        self.messages.push(message);
        MessagePart::Text(mark)
    }

    /// Returns the part of a rendered text after the last mark.
    pub(super) fn after_last_mark<'t>(&self, rendered: &'t str) -> &'t str {
        let mut rest = rendered;
        while let Some((_, _, after)) = split_mark(rest, self.words.len()) {
            rest = after;
        }
        rest
    }
}

/// Text that was found again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Aligned {
    /// Mark number.
    pub(super) number: usize,
    /// Byte range in the rendered text, where the template may have trimmed the text.
    pub(super) range: Range<usize>,
}

/// Finds the words for every mark of `marked` in `text`, in the order of the rendered text.
///
/// # Errors
/// The reason, if the template writes a mark twice, or renders marks differently from other texts.
pub(super) fn align(text: &str, marked: &str, words: &[&str]) -> Result<Vec<Aligned>, String> {
    let changed = || "the chat template changes the text of the conversation".to_owned();
    let mut aligned: Vec<Aligned> = Vec::with_capacity(words.len());
    let (first, mut rest) = match split_mark(marked, words.len()) {
        Some((before, number, after)) => (before, Some((number, after))),
        None => (marked, None),
    };
    if !text.starts_with(first) {
        return Err(changed());
    }
    let mut at = first.len();
    while let Some((number, after)) = rest {
        if aligned.iter().any(|known| known.number == number) {
            return Err("the chat template repeats or omits the text of the conversation".to_owned());
        }
        let (own, next) = match split_mark(after, words.len()) {
            Some((before, number, after)) => (before, Some((number, after))),
            None => (after, None),
        };
        let end = at + written_length(&text[at..], words[number], own).ok_or_else(changed)?;
        aligned.push(Aligned { number, range: at..end });
        at = end + own.len();
        rest = next;
    }
    // Remaining text means that the template renders marks differently from other texts.
    if at == text.len() { Ok(aligned) } else { Err(changed()) }
}

/// Splits a text at the first mark: text before the mark, mark number, and text after the mark.
fn split_mark(text: &str, marks: usize) -> Option<(&str, usize, &str)> {
    let mut from = 0;
    while let Some(found) = text[from..].find(MARK[0]) {
        let at = from + found;
        let after = at + MARK[0].len_utf8();
        let digits = text[after..].bytes().take_while(u8::is_ascii_digit).count();
        let number = text[after..after + digits].parse().ok().filter(|&number: &usize| number < marks);
        // The characters without a number are ordinary text.
        if let (Some(number), Some(rest)) = (number, text[after + digits..].strip_prefix(MARK[1])) {
            return Some((&text[..at], number, rest));
        }
        from = after;
    }
    None
}

/// Returns the length of `words` in `text`, where the template may have trimmed `words` before `next`.
fn written_length(text: &str, words: &str, next: &str) -> Option<usize> {
    // Templates commonly trim a text; the right form is the form that the following text fits.
    let forms = [
        words,
        words.trim_end(),
        words.trim_start(),
        words.trim(),
        words.trim_end_matches('\n'),
        words.trim_start_matches('\n'),
        words.trim_matches('\n'),
    ];
    let fits = |form: &&str| text.strip_prefix(form).is_some_and(|rest| rest.starts_with(next));
    forms.into_iter().find(fits).map(str::len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialogue(turns: &[(&str, &str)]) -> Dialogue {
        let message = |(role, words): &(&str, &str)| {
            let content =
                if words.is_empty() { Vec::new() } else { vec![MessagePart::Text((*words).to_owned())] };
            Message::new(role, content)
        };
        Dialogue::new(turns.iter().map(message).collect())
    }

    /// Renders as `role:content;`, with trimmed contents.
    fn render(dialogue: &Dialogue) -> String {
        let text = |part: &MessagePart| match part {
            MessagePart::Text(text) => text.clone(),
            MessagePart::Medium(_) => String::new(),
        };
        let turn = |message: &Message| {
            let content: String = message.content.iter().map(text).collect();
            format!("{}:{};", message.role, content.trim())
        };
        dialogue.messages.iter().map(turn).collect()
    }

    #[test]
    fn texts_are_found_again_also_trimmed_and_empty() {
        let dialogue =
            dialogue(&[("user", "what"), ("assistant", " a kite\n"), ("user", "and"), ("assistant", "")]);
        let marked = Marked::new(&dialogue, Message::is_assistant);
        let text = render(&dialogue);
        let aligned = align(&text, &render(&marked.dialogue), &marked.words).unwrap();
        let found: Vec<(usize, &str)> =
            aligned.iter().map(|mark| (marked.messages[mark.number], &text[mark.range.clone()])).collect();
        assert_eq!(found, [(1, "a kite"), (3, "")]);
        assert_eq!(marked.after_last_mark(&render(&marked.dialogue)), ";");
    }

    #[test]
    fn the_characters_of_marks_in_a_text_are_text() {
        let text = format!("a {}7{} kite {}0", MARK[0], MARK[1], MARK[0]);
        let dialogue = dialogue(&[("user", text.as_str()), ("assistant", text.as_str())]);
        let marked = Marked::new(&dialogue, Message::is_assistant);
        let aligned = align(&render(&dialogue), &render(&marked.dialogue), &marked.words).unwrap();
        assert_eq!(aligned.len(), 1);
    }

    #[test]
    fn changed_and_repeated_texts_are_refused() {
        let dialogue = dialogue(&[("assistant", "a kite")]);
        let marked = Marked::new(&dialogue, Message::is_assistant);
        let rendered = render(&marked.dialogue);
        assert!(align("assistant:A KITE;", &rendered, &marked.words).unwrap_err().contains("changes"));
        let twice = format!("{rendered}{rendered}");
        let text = render(&dialogue).repeat(2);
        assert!(align(&text, &twice, &marked.words).unwrap_err().contains("repeats"));
    }
}
