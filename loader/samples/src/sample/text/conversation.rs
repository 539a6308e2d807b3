//! Measures the text inside JSON fields: conversations, question-answer pairs and captions.

use serde_json::Value;

use super::estimate::estimate_tokens;
use super::{TextLength, measure_text};

/// Role names that datasets use for the side whose text is the training target.
pub const ASSISTANT_ROLES: [&str; 4] = ["gpt", "assistant", "model", "bot"];

/// Keys of a question and its answer.
pub(crate) const QUESTION_ANSWER_KEYS: [[&str; 2]; 2] = [["instruction", "output"], ["question", "answer"]];

/// Keys of plain text.
pub(crate) const CAPTION_KEYS: [&str; 2] = ["caption", "text"];

/// Measures the text in a JSON field.
///
/// A list of turns under `conversations` (`from`, `value`) or `messages` (`role`, `content`) counts in full,
/// and its assistant turns are the target. Likewise the pairs `instruction` and `output`,
/// `question` and `answer`, where the second text is the target. Otherwise all of the following text is
/// target: the texts in a list of parts under `content`, or in `texts` next to
/// `images`, or a string under `caption` or `text`. Any other JSON is metadata and has no length.
#[must_use]
pub fn measure_json(json: &Value) -> TextLength {
    if let Some(turns) = turns(json) {
        return turns.iter().map(measure_turn).fold(TextLength::default(), |sum, turn| TextLength {
            tokens: sum.tokens.saturating_add(turn.tokens),
            target_tokens: sum.target_tokens.saturating_add(turn.target_tokens),
        });
    }
    if let Some(tokens) =
        content(json).map(content_tokens).or_else(|| interleaved(json).map(interleaved_tokens))
    {
        return TextLength { tokens, target_tokens: tokens };
    }
    if let Some(length) = QUESTION_ANSWER_KEYS.iter().find_map(|pair| measure_pair(json, *pair)) {
        return length;
    }
    let caption = CAPTION_KEYS.iter().find_map(|key| json.get(key)?.as_str());
    caption.map(measure_text).unwrap_or_default()
}

/// Returns whether the JSON is a conversation.
#[must_use]
pub fn has_turns(json: &Value) -> bool {
    turns(json).is_some()
}

/// Returns whether the JSON describes the whole sample, media included: turns, or a list of content without
/// turns.
pub(crate) fn has_content(json: &Value) -> bool {
    turns(json).is_some() || content(json).is_some() || interleaved(json).is_some()
}

/// Returns content without turns: a list of texts and parts.
pub(crate) fn content(json: &Value) -> Option<&Value> {
    let is_part = |value: &Value| value.is_string() || value.get("type").is_some_and(Value::is_string);
    let content = json.get("content")?;
    content.as_array().filter(|parts| !parts.is_empty() && parts.iter().all(is_part)).map(|_| content)
}

/// Returns the lists of texts and images if exactly one of the two is filled at each index.
pub(crate) fn interleaved(json: &Value) -> Option<(&[Value], &[Value])> {
    let [texts, images] = ["texts", "images"].map(|name| json.get(name).and_then(Value::as_array));
    let (texts, images) = (texts?, images?);
    // Other datasets use the same keys with another meaning; only complementary gaps prove interleaving.
    let is_filled = texts.len() == images.len()
        && texts.iter().zip(images).all(|(text, image)| text.is_null() != image.is_null());
    is_filled.then_some((texts, images))
}

fn interleaved_tokens((texts, _): (&[Value], &[Value])) -> u32 {
    texts.iter().filter_map(Value::as_str).map(estimate_tokens).fold(0, u32::saturating_add)
}

/// Measures a question and its answer; a lone `question` may be a file name or an id, so both are required.
fn measure_pair(json: &Value, [asked, answered]: [&str; 2]) -> Option<TextLength> {
    let [asked, answered] = [asked, answered].map(|key| json.get(key)?.as_str().map(measure_text));
    let (asked, answered) = (asked?, answered?);
    let tokens = asked.tokens.saturating_add(answered.tokens);
    Some(TextLength { tokens, target_tokens: answered.tokens })
}

/// Returns the turns of a conversation, unvalidated.
#[must_use]
pub fn turns(json: &Value) -> Option<&Vec<Value>> {
    ["conversations", "messages"].iter().find_map(|key| json.get(key)?.as_array())
}

fn measure_turn(turn: &Value) -> TextLength {
    let role = ["from", "role"].iter().find_map(|key| turn.get(key)?.as_str()).unwrap_or_default();
    let content = ["value", "content"].iter().find_map(|key| turn.get(key));
    let tokens = content.map_or(0, content_tokens);
    let is_target = ASSISTANT_ROLES.contains(&role.to_ascii_lowercase().as_str());
    TextLength { tokens, target_tokens: if is_target { tokens } else { 0 } }
}

/// Counts the tokens of content: a string with placeholders, or a list of parts whose text is taken
/// literally.
fn content_tokens(content: &Value) -> u32 {
    match content {
        Value::String(text) => measure_text(text).tokens,
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| part.as_str().or_else(|| part.get("text")?.as_str()));
            texts.fold(0, |sum, text| sum.saturating_add(estimate_tokens(text)))
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        assert_eq!(measure_text("<audio>a red kite").tokens, 3);
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
