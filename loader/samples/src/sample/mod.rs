//! Describes samples: decoded fields, shapes from headers, texts, and documents that order media and texts.
//!
//! Measures a text's length for the model: tokens, and tokens in the loss.
//!
//! Counts are estimates from the text itself, computed once at indexing; they need no tokenizer and are the
//! same on every machine.

pub mod document;
mod measure;

use super::media::{Media, Modality, TextLength};
use crate::{RawSample, SampleId};
use std::sync::Arc;

pub use measure::{FieldFault, MeasuredSample, Unused, decoded_bytes, measure_sample, measure_within};

/// A field of a delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Field {
    /// Part of the entry name after the key's dot, lower-cased.
    pub extension: Arc<str>,
    /// Field content; [`Media::Opaque`] if the field was not decoded.
    pub media: Media,
}

/// A delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Entry path up to the first dot in the file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample epoch, from 0.
    pub epoch: u64,
    /// Number of encoded payload bytes read for the sample.
    pub bytes: u64,
    /// The fields, in shard order; without images that went into a tensor, and without images and clips if
    /// the sample was prepared for a model.
    pub fields: Vec<Field>,
}

impl Sample {
    /// Creates a sample from a raw sample and decoded fields; `bytes` payload bytes were read.
    #[must_use]
    pub fn from_raw(raw: RawSample, bytes: u64, fields: Vec<Field>) -> Self {
        Self { key: raw.key, shard: raw.shard, offset: raw.offset, epoch: raw.epoch, bytes, fields }
    }

    /// Returns the sample identity within the dataset.
    #[must_use]
    pub fn id(&self) -> SampleId<'_> {
        SampleId { shard: &self.shard, offset: self.offset, key: &self.key }
    }

    /// Creates a sample from decoded fields, as a loader delivers it.
    #[must_use]
    pub fn new(key: impl Into<String>, fields: Vec<Field>) -> Self {
        Self { key: key.into(), shard: "".into(), offset: 0, epoch: 0, bytes: 0, fields }
    }

    /// Returns the content of the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&Media> {
        self.fields.iter().find(|field| &*field.extension == extension).map(|field| &field.media)
    }
}

/// Arrangement of microbatch samples in tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchLayout {
    /// A single row with all samples in sequence.
    Packed,
    /// A row for each sample, padded to the longest sample.
    Padded {
        /// Padding side.
        side: PaddingSide,
    },
}

impl BatchLayout {
    /// Returns whether all samples share a single row.
    #[must_use]
    pub fn is_packed(self) -> bool {
        self == Self::Packed
    }
}

/// Side on which a row is padded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PaddingSide {
    /// Before the sample.
    Left,
    /// After the sample, as is usual in training.
    #[default]
    Right,
}

/// Measures plain text, which is all target; media placeholders count nothing.
#[must_use]
pub fn measure_text(text: &str) -> TextLength {
    let tokens = split_placeholders(text).into_iter().fold(0u32, |sum, piece| match piece {
        Piece::Text(words) => sum.saturating_add(estimate_tokens(words)),
        Piece::Media(_) => sum,
    });
    TextLength { tokens, target_tokens: tokens }
}

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
/// use dflop_samples::sample::{Piece, split_placeholders};
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
    fn placeholders_count_nothing() {
        assert_eq!(measure_text("<audio>a red kite"), TextLength { tokens: 3, target_tokens: 3 });
    }

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
