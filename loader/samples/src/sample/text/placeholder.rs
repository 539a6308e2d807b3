//! Splits a text at the media placeholders that datasets write.

use crate::media::Modality;

/// Placeholders and the modality that each represents.
const PLACEHOLDERS: [(&str, Modality); 3] =
    [("<image>", Modality::Image), ("<audio>", Modality::Audio), ("<video>", Modality::Video)];

/// Piece of a text with placeholders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Text between placeholders, never empty.
    Text(&'a str),
    /// Position of a medium.
    Media(Modality),
}

/// Splits a text at `<image>`, `<audio>` and `<video>`, the placeholders of LLaVA.
///
/// A line break on either side of a placeholder belongs to the placeholder, because the chat template
/// separates media itself.
///
/// # Examples
/// ```
/// use dflop_samples::media::Modality;
/// use dflop_samples::sample::text::{Piece, split_placeholders};
/// let pieces = split_placeholders("<image>\nWhat is it?");
/// assert_eq!(pieces, [Piece::Media(Modality::Image), Piece::Text("What is it?")]);
/// ```
#[must_use]
pub fn split_placeholders(text: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some((at, token, modality)) = next_placeholder(rest) {
        let before = &rest[..at];
        push_text(&mut pieces, before.strip_suffix('\n').unwrap_or(before));
        pieces.push(Piece::Media(modality));
        let after = &rest[at + token.len()..];
        rest = after.strip_prefix('\n').unwrap_or(after);
    }
    push_text(&mut pieces, rest);
    pieces
}

fn push_text<'a>(pieces: &mut Vec<Piece<'a>>, text: &'a str) {
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
}

fn next_placeholder(text: &str) -> Option<(usize, &'static str, Modality)> {
    let found =
        PLACEHOLDERS.iter().filter_map(|(token, modality)| Some((text.find(token)?, *token, *modality)));
    found.min_by_key(|(at, _, _)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Modality::{Audio, Image, Video};

    #[test]
    fn a_line_break_on_either_side_belongs_to_the_placeholder() {
        let table: [(&str, &[Piece<'_>]); 7] = [
            ("", &[]),
            ("plain", &[Piece::Text("plain")]),
            ("<image>\nwhat", &[Piece::Media(Image), Piece::Text("what")]),
            ("what\n<image>", &[Piece::Text("what"), Piece::Media(Image)]),
            ("<image>\n<image>\n\nx", &[Piece::Media(Image), Piece::Media(Image), Piece::Text("\nx")]),
            ("a <audio> b", &[Piece::Text("a "), Piece::Media(Audio), Piece::Text(" b")]),
            ("<video>\na", &[Piece::Media(Video), Piece::Text("a")]),
        ];
        for (text, pieces) in table {
            assert_eq!(split_placeholders(text), pieces, "{text:?}");
        }
    }
}
