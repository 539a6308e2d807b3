//! Cuts long values in messages.

use std::borrow::Cow;

/// Returns a text of at most `characters` characters; what is cut off is replaced by an ellipsis.
#[must_use]
pub fn excerpt(text: &str, characters: usize) -> Cow<'_, str> {
    if text.char_indices().nth(characters).is_none() {
        return Cow::Borrowed(text);
    }
    let end = text.char_indices().nth(characters.saturating_sub(1)).map_or(0, |(end, _)| end);
    Cow::Owned(format!("{}…", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_to_its_limit_and_no_shorter() {
        assert_eq!(excerpt("grüße", 5), "grüße");
        assert_eq!(excerpt("grüße", 4), "grü…");
        assert_eq!(excerpt("", 0), "");
    }
}
