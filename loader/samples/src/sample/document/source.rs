//! Selects the sample text: a document, or the text fields.

use serde_json::Value;

use super::layout::{Layout, Text, Unread};
use super::parts::UnplacedPart;
use crate::media::TextLength;
use crate::sample::document::layout::Dialogue;
use crate::sample::estimate_tokens;

/// Source of the sample text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::sample) enum TextSource<'a> {
    /// A document, by number, with the layout.
    Document(usize, Layout<'a>),
    /// All text fields.
    Fields,
    /// Nothing: the sample has no known text.
    Nothing,
}

/// Fault in a sample with two documents that describe it: the document numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sample) struct TwoDocuments(pub(in crate::sample) usize, pub(in crate::sample) usize);

/// Selects the sample text.
///
/// A conversation, or a document that lists content in order, takes precedence; then text fields; then the
/// first document with a question and an answer, or a caption.
///
/// # Errors
/// [`TwoDocuments`] if two documents describe the whole sample.
pub(in crate::sample) fn select_text<'a>(
    documents: impl Iterator<Item = &'a Value>,
    has_text_fields: bool,
) -> Result<TextSource<'a>, TwoDocuments> {
    let mut whole = None;
    let mut partial = None;
    for (number, document) in documents.enumerate() {
        match (Layout::of(document), whole) {
            (Some(layout), None) if layout.is_whole() => whole = Some((number, layout)),
            (Some(layout), Some((first, _))) if layout.is_whole() => return Err(TwoDocuments(first, number)),
            (Some(layout), _) if partial.is_none() => partial = Some((number, layout)),
            _ => {}
        }
    }
    Ok(match (whole, has_text_fields, partial) {
        (Some((number, layout)), ..) | (None, false, Some((number, layout))) => {
            TextSource::Document(number, layout)
        }
        (None, true, _) => TextSource::Fields,
        (None, false, None) => TextSource::Nothing,
    })
}

/// Returns the fault for a second document that describes a sample.
pub(in crate::sample) fn second_document(first: &str) -> String {
    format!("only one document may describe a sample, and `{first}` already does")
}

/// Returns whether a document is a conversation, or a question and an answer.
///
/// # Examples
/// ```
/// use serde_json::json;
/// use dflop_samples::sample::document::has_turns;
/// assert!(has_turns(&json!({"messages": [{"role": "user", "content": "what is it"}]})));
/// assert!(!has_turns(&json!({"caption": "a red kite"})));
/// ```
#[must_use]
pub fn has_turns(document: &Value) -> bool {
    matches!(Layout::of(document), Some(Layout::Turns(_) | Layout::Continued(_) | Layout::Pair(_)))
}

/// Returns whether a document has text in a known layout.
#[must_use]
pub fn has_text(document: &Value) -> bool {
    Layout::of(document).is_some()
}

/// Measures the text in a document, and lists unread parts.
///
/// Assistant turns are the target, including reasoning and calls; tools count as prompt. In other layouts all
/// text is target.
///
/// # Errors
/// The reason, if the text cannot be read.
pub(in crate::sample) fn measure_document(
    document: &Value,
    layout: Layout<'_>,
    unread: &mut Unread,
) -> Result<TextLength, String> {
    Ok(match layout.read(document, unread)? {
        Text::Dialogue(dialogue) => measure_dialogue(&dialogue),
        Text::Content(parts) | Text::Caption(parts) => {
            let tokens = measure_parts(&parts);
            TextLength { tokens, target_tokens: tokens }
        }
    })
}

/// Measures the text in a single document; any other JSON is metadata and has no length.
#[must_use]
pub fn measure_json(document: &Value) -> TextLength {
    let length = |layout| measure_document(document, layout, &mut Unread::default()).ok();
    Layout::of(document).and_then(length).unwrap_or_default()
}

fn measure_parts(parts: &[UnplacedPart<'_>]) -> u32 {
    let tokens = |part: &UnplacedPart<'_>| match part {
        UnplacedPart::Text(text) => estimate_tokens(text),
        UnplacedPart::Media(..) => 0,
    };
    parts.iter().map(tokens).fold(0, u32::saturating_add)
}

fn measure_dialogue(dialogue: &Dialogue<'_>) -> TextLength {
    let written = |value: &Value| match value {
        Value::String(text) => estimate_tokens(text),
        Value::Array(_) | Value::Object(_) => estimate_tokens(&value.to_string()),
        _ => 0,
    };
    let mut length = TextLength::default();
    for turn in &dialogue.turns {
        let keys = turn.keys().filter(|(key, _)| ["tool_calls", "reasoning_content"].contains(&key.as_str()));
        let tokens =
            keys.map(|(_, value)| written(value)).fold(measure_parts(&turn.content), u32::saturating_add);
        // An empty answer is a target, too: the end token.
        let tokens = if turn.is_target { tokens.max(1) } else { tokens };
        length.tokens = length.tokens.saturating_add(tokens);
        if turn.is_target {
            length.target_tokens = length.target_tokens.saturating_add(tokens);
        }
    }
    let variables = dialogue.variables.iter().map(|(_, value)| written(value));
    length.tokens = variables.fold(length.tokens, u32::saturating_add);
    length
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_assistant_turns_are_target() {
        let llava = json!({"conversations": [
            {"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a kite"}]});
        assert_eq!(measure_json(&llava), TextLength { tokens: 5, target_tokens: 2 });
        let chat = json!({"messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]},
            {"role": "assistant", "content": "a kite"}]});
        assert_eq!(measure_json(&chat), TextLength { tokens: 5, target_tokens: 2 });
    }

    #[test]
    fn tools_count_as_prompt_and_reasoning_as_target() {
        let messages = json!([
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "a kite", "reasoning_content": "it flies"}]);
        let plain = json!({"messages": messages.clone()});
        assert_eq!(measure_json(&plain), TextLength { tokens: 7, target_tokens: 4 });
        let tools = json!({"messages": messages, "tools": [{"name": "wind"}]});
        let length = measure_json(&tools);
        assert!(length.tokens > 10, "{length:?}");
        assert_eq!(length.target_tokens, 4);
    }

    #[test]
    fn an_empty_answer_is_a_target() {
        let pair = json!({"question": "what is it", "answer": ""});
        assert_eq!(measure_json(&pair), TextLength { tokens: 4, target_tokens: 1 });
    }

    #[test]
    fn content_without_turns_is_all_target() {
        let parts = json!({"content": ["a red kite", {"type": "image"}, {"type": "text", "text": "what"}]});
        assert_eq!(measure_json(&parts), TextLength { tokens: 4, target_tokens: 4 });
        let lists = json!({"texts": ["a red kite", null, "what"], "images": [null, "0.jpg", null]});
        assert_eq!(measure_json(&lists), TextLength { tokens: 4, target_tokens: 4 });
        assert_eq!(measure_json(&json!({"content": [1, 2], "texts": ["a"]})), TextLength::default());
    }

    #[test]
    fn placeholders_count_nothing() {
        let llava = json!({"conversations": [{"from": "human", "value": "<image>\nwhat is it\n<image>"}]});
        assert_eq!(measure_json(&llava).tokens, 3);
    }

    #[test]
    fn the_second_half_of_a_pair_is_target() {
        let pair = json!({"instruction": "what is it", "output": "a kite"});
        assert_eq!(measure_json(&pair), TextLength { tokens: 5, target_tokens: 2 });
        assert_eq!(measure_json(&json!({"question": "what is it"})), TextLength::default());
    }

    #[test]
    fn a_caption_is_all_target_and_metadata_has_no_length() {
        assert_eq!(measure_json(&json!({"caption": "a red kite"})).target_tokens, 3);
        assert_eq!(measure_json(&json!({"width": 3, "name": "x"})), TextLength::default());
        assert_eq!(measure_json(&json!([1, 2])), TextLength::default());
    }
}
