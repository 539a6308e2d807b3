//! Shortens values that error messages quote.

use std::borrow::Cow;
use std::io::Write;

use serde_json::Value;

/// Maximum number of characters in a quoted value.
pub const EXCERPT_CHARACTERS: usize = 200;

/// Returns the text, cut to at most `characters`; a cut text ends with an ellipsis.
///
/// # Examples
/// ```
/// assert_eq!(dflop_samples::excerpt("grüße", 4), "grü…");
/// ```
#[must_use]
pub fn excerpt(text: &str, characters: usize) -> Cow<'_, str> {
    if text.char_indices().nth(characters).is_none() {
        return Cow::Borrowed(text);
    }
    let end = text.char_indices().nth(characters.saturating_sub(1)).map_or(0, |(end, _)| end);
    Cow::Owned(format!("{}…", &text[..end]))
}

/// Formats a value as JSON, cut to [`EXCERPT_CHARACTERS`]; serialization stops at the limit.
#[must_use]
pub fn json_excerpt(value: &Value) -> String {
    let mut head = Head(Vec::with_capacity(64));
    // Serialization fails once the excerpt is full.
    let _ = serde_json::to_writer(&mut head, value);
    excerpt(&String::from_utf8_lossy(&head.0), EXCERPT_CHARACTERS).into_owned()
}

/// Writer that keeps only the first bytes.
struct Head(Vec<u8>);

impl Write for Head {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // Enough bytes for the maximum number of characters and the start of the next character.
        if self.0.len() > 4 * (EXCERPT_CHARACTERS + 1) {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        let taken = bytes.len().min(4 * (EXCERPT_CHARACTERS + 2));
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_cut_to_its_limit_and_no_shorter() {
        assert_eq!(excerpt("grüße", 5), "grüße");
        assert_eq!(excerpt("grüße", 4), "grü…");
        assert_eq!(excerpt("", 0), "");
    }

    #[test]
    fn a_long_value_is_cut_wherever_it_is_long() {
        assert_eq!(json_excerpt(&json!({"a": [1, "x"]})), r#"{"a":[1,"x"]}"#);
        for value in [json!("ä".repeat(100_000)), json!(vec!["word"; 10_000]), json!({"a".repeat(1000): 1})]
        {
            assert_eq!(json_excerpt(&value).chars().count(), EXCERPT_CHARACTERS);
        }
    }
}
