//! Measures a text's length for the model: tokens, and tokens in the loss.
//!
//! Counts are estimates from the text itself, computed once at indexing; they need no tokenizer and are the
//! same on every machine.

mod estimate;
mod placeholder;

pub use self::estimate::estimate_tokens;
pub use self::placeholder::{Piece, split_placeholders};

use crate::media::TextLength;

/// Measures plain text, which is all target; media placeholders count nothing.
#[must_use]
pub fn measure_text(text: &str) -> TextLength {
    let tokens = split_placeholders(text).into_iter().fold(0u32, |sum, piece| match piece {
        Piece::Text(words) => sum.saturating_add(estimate_tokens(words)),
        Piece::Media(_) => sum,
    });
    TextLength { tokens, target_tokens: tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_count_nothing() {
        assert_eq!(measure_text("<audio>a red kite"), TextLength { tokens: 3, target_tokens: 3 });
    }
}
