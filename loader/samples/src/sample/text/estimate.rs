//! Estimates a text's token count without a tokenizer.

/// Number of letters covered by the first token in a word, in a byte-pair vocabulary with about 100,000
/// entries.
const LETTERS_FIRST: u32 = 7;
/// Number of letters covered by each further token in a long word.
const LETTERS_MORE: u32 = 4;
/// Number of digits per token.
const DIGITS: u32 = 3;

/// Estimates how many tokens a byte-pair tokenizer creates from `text`.
///
/// A letter run is one token up to seven letters and one more for every further four; a digit run is one
/// token per three digits; a punctuation mark, a run of line breaks and an ideograph are one token each. A
/// letter outside ASCII counts as one and a half. Spaces belong to the following word. Saturates at
/// `u32::MAX`.
#[must_use]
pub fn estimate_tokens(text: &str) -> u32 {
    let mut tokens = 0u32;
    let mut run = Run::None;
    for character in text.chars() {
        let next = Run::of(character);
        if !run.absorb(next) {
            tokens = tokens.saturating_add(run.tokens());
            run = next;
        }
    }
    tokens.saturating_add(run.tokens())
}

/// Run of characters that are tokenized together.
#[derive(Clone, Copy)]
enum Run {
    None,
    /// Letters, counted in halves: 2 for ASCII, 3 for others.
    Letters(u32),
    Digits(u32),
    LineBreaks,
    Single,
}

impl Run {
    fn of(character: char) -> Self {
        match character {
            '\n' => Self::LineBreaks,
            _ if character.is_whitespace() => Self::None,
            '0'..='9' => Self::Digits(1),
            _ if character.is_ascii_alphabetic() => Self::Letters(2),
            // CJK and later blocks: byte-pair vocabularies encode an ideograph in about one token.
            '\u{2e80}'.. => Self::Single,
            _ if character.is_alphanumeric() => Self::Letters(3),
            _ => Self::Single,
        }
    }

    /// Merges the next character into this run if it continues the run; returns whether it did.
    fn absorb(&mut self, next: Self) -> bool {
        match (self, next) {
            (Self::Letters(halves), Self::Letters(more)) => *halves = halves.saturating_add(more),
            (Self::Digits(digits), Self::Digits(more)) => *digits = digits.saturating_add(more),
            (Self::LineBreaks, Self::LineBreaks) | (Self::None, Self::None) => {}
            _ => return false,
        }
        true
    }

    fn tokens(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Letters(halves) => 1 + (halves / 2).saturating_sub(LETTERS_FIRST).div_ceil(LETTERS_MORE),
            Self::Digits(digits) => digits.div_ceil(DIGITS),
            Self::LineBreaks | Self::Single => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_follow_the_rule() {
        let table = [
            ("", 0),
            ("   ", 0),
            ("a red kite", 3),
            ("Hello, world!", 4),
            ("2024-11-21", 6),
            ("internationalization", 5),
            ("one\n\ntwo", 3),
            ("日本語", 3),
        ];
        for (text, tokens) in table {
            assert_eq!(estimate_tokens(text), tokens, "{text}");
        }
    }
}
