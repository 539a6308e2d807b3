//! Joins documents to rows with a fixed number of tokens.
//!
//! A *document* is a sample in the order of the run, a *piece* a range of the tokens of a document. By
//! [`RowRule::Split`] documents follow each other and are cut where a row ends: every token occurs once, in
//! order. By [`RowRule::Fit`] rows are filled from windows of documents by best-fit decreasing, and only a
//! document that is longer than a row is cut. Rows depend on the token counts of the index alone, so every
//! rank computes all of them, and the [`RowCursor`] before a row is the complete state, also within a
//! document.
//!
//! # Source
//! Best fit for training rows: Ding et al., "Fewer Truncations Improve Language Modeling", 2024,
//! arXiv:2404.10830, section 3.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use dflop_costmodel::SampleShape;
use dflop_costmodel::random::{Permutation, mix64};
use serde::{Deserialize, Serialize};

use super::steps::StepSample;

/// Documents in a window of [`RowRule::Fit`], by default.
const WINDOW_DOCUMENTS: u32 = 16_384;
/// Maximum number of pieces in a row, which only documents without tokens reach.
const PIECES_MAX: usize = 1 << 20;
/// Number of documents that are drawn together.
const DRAWN_TOGETHER: u64 = 256;

/// Rule by which documents fill rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowRule {
    /// Documents follow each other in the order of the run, and are cut where a row ends.
    Split,
    /// Rows are filled by best-fit decreasing from windows of documents. A document longer than a row is cut
    /// into full rows and a rest, and no other document is cut.
    Fit {
        /// Number of documents per window, at least 1.
        window: u32,
    },
}

/// Number of tokens per row, and the rule that fills rows.
///
/// # Examples
/// ```
/// use dflop_loader::{RowLayout, RowRule};
///
/// let rows: RowLayout = "split:4096".parse()?;
/// assert_eq!(rows, RowLayout { tokens: 4096, rule: RowRule::Split });
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowLayout {
    /// Number of tokens per row.
    pub tokens: u32,
    /// Rule that fills rows.
    pub rule: RowRule,
}

impl fmt::Display for RowLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule {
            RowRule::Split => write!(f, "split:{}", self.tokens),
            RowRule::Fit { window: WINDOW_DOCUMENTS } => write!(f, "fit:{}", self.tokens),
            RowRule::Fit { window } => write!(f, "fit:{}:{window}", self.tokens),
        }
    }
}

impl FromStr for RowLayout {
    type Err = String;

    /// Reads `split:N`, `fit:N` or `fit:N:DOCUMENTS`, the number of documents per window.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number > 0);
        let tokens = parts.get(1).and_then(|tokens| number(tokens)).filter(|tokens| *tokens > 1);
        let window = match parts.get(2) {
            Some(window) => number(window),
            None => Some(WINDOW_DOCUMENTS),
        };
        match (parts[0], parts.len(), tokens, window) {
            ("split", 2, Some(tokens), _) => Ok(Self { tokens, rule: RowRule::Split }),
            ("fit", 2 | 3, Some(tokens), Some(window)) => Ok(Self { tokens, rule: RowRule::Fit { window } }),
            _ => Err(format!(
                "expected split:N, fit:N or fit:N:DOCUMENTS with N of at least 2, found `{text}`"
            )),
        }
    }
}

/// A range of the tokens of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TokenSpan {
    /// First token.
    pub start: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Number of tokens in the document.
    pub document_tokens: u32,
}

impl TokenSpan {
    /// Returns whether the span is the whole document.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.tokens == self.document_tokens
    }

    /// Returns whether the document has media and is longer than a row, which no row holds.
    pub(crate) fn is_refused(self) -> bool {
        self.tokens == 0 && self.document_tokens > 0
    }

    /// Narrows the shape of a document to the span. The first token of a span has no predecessor and is no
    /// target: exact where all other tokens of the document are targets, in proportion otherwise.
    pub(crate) fn narrow(self, shape: &mut SampleShape) {
        if self.is_whole() {
            return;
        }
        let (targets, tokens) = (u64::from(shape.target_tokens), u64::from(self.document_tokens));
        let predicted = self.tokens.saturating_sub(1);
        shape.text_tokens = self.tokens;
        shape.target_tokens = if targets + 1 >= tokens {
            predicted
        } else {
            let before = |place: u32| (targets * u64::from(place) / tokens) as u32;
            (before(self.start + self.tokens) - before(self.start)).min(predicted)
        };
    }
}

/// Piece of a document in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) sample: StepSample,
    pub(crate) span: TokenSpan,
}

/// Pieces that follow each other in a row.
pub(crate) type Row = Vec<Piece>;

/// Number of tokens in a document, and whether it may be cut: text without media.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DocumentLength {
    pub(crate) tokens: u32,
    pub(crate) may_be_cut: bool,
}

/// Documents in the order of a run, by position.
pub(crate) trait Documents {
    /// Returns the documents at positions before the end.
    fn documents(&self, positions: Range<u64>) -> Vec<StepSample>;

    /// Returns the end position; `None` if there is no end.
    fn end(&self) -> Option<u64>;

    /// Returns the length of a document.
    fn length(&self, document: StepSample) -> DocumentLength;

    /// Returns a number for a position that stays the same when a run is resumed.
    fn key(&self, position: u64) -> u64;
}

/// Position before a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowCursor {
    /// Position of the document, or of the first document in the window, that is not used up.
    pub(crate) position: u64,
    /// Number of tokens of the document that earlier rows hold; with windows, number of earlier rows.
    pub(crate) used: u64,
}

/// Documents from a position on, drawn a few at a time.
struct DocumentReader<'a, D> {
    documents: &'a D,
    position: u64,
    drawn: std::vec::IntoIter<StepSample>,
    next: Option<(StepSample, DocumentLength)>,
}

impl<'a, D: Documents> DocumentReader<'a, D> {
    fn new(documents: &'a D, position: u64) -> Self {
        Self { documents, position, drawn: Vec::new().into_iter(), next: None }
    }

    /// Returns the document at the position; `None` at the end.
    fn peek(&mut self) -> Option<(StepSample, DocumentLength)> {
        if self.next.is_none() {
            if self.drawn.len() == 0 {
                let until = self.position + DRAWN_TOGETHER;
                let until = self.documents.end().map_or(until, |end| end.min(until));
                self.drawn = self.documents.documents(self.position..until.max(self.position)).into_iter();
            }
            self.next = self.drawn.next().map(|sample| (sample, self.documents.length(sample)));
        }
        self.next
    }

    fn advance(&mut self) {
        self.position += 1;
        self.next = None;
    }
}

/// Returns at most `rows` rows of documents that are cut at row ends, and the cursor after them; fewer at the
/// end of the run.
///
/// - `room`: number of tokens per row
pub(crate) fn split_rows(
    documents: &impl Documents,
    room: u32,
    rows: usize,
    cursor: RowCursor,
) -> (Vec<Row>, RowCursor) {
    let mut reader = DocumentReader::new(documents, cursor.position);
    let (mut used, mut filled) = (u32::try_from(cursor.used).unwrap_or(u32::MAX), Vec::new());
    while filled.len() < rows {
        let (mut row, mut left) = (Row::new(), room);
        while let Some((sample, length)) = reader.peek().filter(|_| left > 0 && row.len() < PIECES_MAX) {
            let tokens = length.tokens.saturating_sub(used).min(left);
            row.push(Piece {
                sample,
                span: TokenSpan { start: used, tokens, document_tokens: length.tokens },
            });
            (used, left) = (used + tokens, left - tokens);
            if used >= length.tokens {
                reader.advance();
                used = 0;
            }
        }
        if row.is_empty() {
            break;
        }
        filled.push(row);
    }
    (filled, RowCursor { position: reader.position, used: u64::from(used) })
}

/// Returns the rows of a window of documents, in an order without regard to their lengths; the documents in a
/// row keep their order. There is at least one row.
///
/// - `room`: number of tokens per row
pub(crate) fn fit_rows(documents: &impl Documents, room: u32, window: Range<u64>) -> Vec<Row> {
    let key = documents.key(window.start);
    let (mut rows, mut rests) = (Vec::new(), Vec::new());
    for (place, sample) in documents.documents(window).into_iter().enumerate() {
        let DocumentLength { tokens, may_be_cut } = documents.length(sample);
        let span = |start, tokens_of| TokenSpan { start, tokens: tokens_of, document_tokens: tokens };
        let mut start = 0;
        if may_be_cut {
            while tokens - start > room {
                rows.push(vec![(place, Piece { sample, span: span(start, room) })]);
                start += room;
            }
        }
        let rest = if tokens - start > room { 0 } else { tokens - start };
        rests.push((place, Piece { sample, span: span(start, rest) }));
    }
    rests.sort_by_key(|(place, piece)| (std::cmp::Reverse(piece.span.tokens), *place));
    // A full row stays open for documents without tokens.
    let mut open: BTreeSet<(u32, usize)> = (0..rows.len()).map(|row| (0, row)).collect();
    for (place, piece) in rests {
        let tokens = piece.span.tokens;
        let best = open.range((tokens, 0)..).next().copied();
        let (left, row) = best.unwrap_or((room, rows.len()));
        if best.is_some() {
            open.remove(&(left, row));
        } else {
            rows.push(Vec::new());
        }
        rows[row].push((place, piece));
        open.insert((left - tokens, row));
    }
    for row in &mut rows {
        row.sort_by_key(|(place, _)| *place);
    }
    let order = Permutation::new(rows.len() as u64, mix64(key ^ mix64(0x0066_6974)));
    let row = |at: u64| rows[order.at(at) as usize].iter().map(|(_, piece)| *piece).collect();
    (0..rows.len() as u64).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Documents by length; those with an odd position and `has_media` may not be cut.
    struct Lengths {
        tokens: Vec<u32>,
        has_media: bool,
    }

    impl Documents for Lengths {
        fn documents(&self, positions: Range<u64>) -> Vec<StepSample> {
            positions.map(|sample| StepSample { dataset: 0, epoch: 0, sample }).collect()
        }

        fn end(&self) -> Option<u64> {
            Some(self.tokens.len() as u64)
        }

        fn length(&self, document: StepSample) -> DocumentLength {
            let may_be_cut = !self.has_media || document.sample.is_multiple_of(2);
            DocumentLength { tokens: self.tokens[document.sample as usize], may_be_cut }
        }

        fn key(&self, position: u64) -> u64 {
            position
        }
    }

    fn lengths() -> impl Strategy<Value = Vec<u32>> {
        prop::collection::vec(prop_oneof![4 => 0u32..40, 1 => 0u32..400], 1..60)
    }

    fn row_tokens(row: &Row) -> u32 {
        row.iter().map(|piece| piece.span.tokens).sum()
    }

    /// Checks that the pieces of every document are its tokens, each once.
    fn check_tokens(documents: &Lengths, rows: &[Row]) {
        let mut pieces: Vec<&Piece> = rows.iter().flatten().collect();
        pieces.sort_by_key(|piece| (piece.sample.sample, piece.span.start, piece.span.tokens));
        let mut at = vec![0; documents.tokens.len()];
        let mut seen = vec![false; at.len()];
        for Piece { sample, span } in pieces {
            let document = sample.sample as usize;
            assert_eq!(span.document_tokens, documents.tokens[document]);
            assert_eq!(span.start, at[document]);
            at[document] += span.tokens;
            seen[document] = true;
        }
        assert!(seen.iter().all(|seen| *seen));
        for (document, (&found, &tokens)) in at.iter().zip(&documents.tokens).enumerate() {
            let is_refused = documents.has_media && document % 2 == 1 && found == 0;
            assert!(found == tokens || is_refused, "document {document}: {found} of {tokens}");
        }
    }

    proptest! {
        #[test]
        fn split_rows_hold_every_token_once_in_order_and_resume_inside_a_document(
            tokens in lengths(), room in 2u32..60, together in 1usize..5,
        ) {
            let documents = Lengths { tokens, has_media: false };
            let (rows, end) = split_rows(&documents, room, usize::MAX, RowCursor::default());
            check_tokens(&documents, &rows);
            prop_assert_eq!(end.position, documents.tokens.len() as u64);
            let order = rows.iter().flatten().map(|piece| (piece.sample.sample, piece.span.start));
            prop_assert!(order.clone().zip(order.skip(1)).all(|(before, after)| before < after));
            let is_full = |row: &Row| row_tokens(row) == room;
            prop_assert!(rows[..rows.len() - 1].iter().all(is_full));
            // Any number of rows at a time, each from the cursor of the last, is the same stream.
            let (mut again, mut cursor) = (Vec::new(), RowCursor::default());
            loop {
                let (more, next) = split_rows(&documents, room, together, cursor);
                if more.is_empty() {
                    break;
                }
                again.extend(more);
                cursor = next;
            }
            prop_assert_eq!(again, rows);
        }

        #[test]
        fn fitted_rows_hold_every_token_once_and_cut_only_what_is_longer_than_a_row(
            tokens in lengths(), room in 2u32..60, has_media: bool,
        ) {
            let documents = Lengths { tokens, has_media };
            let rows = fit_rows(&documents, room, 0..documents.tokens.len() as u64);
            check_tokens(&documents, &rows);
            prop_assert!(rows.iter().all(|row| row_tokens(row) <= room && !row.is_empty()));
            for piece in rows.iter().flatten() {
                prop_assert!(piece.span.is_whole() || piece.span.document_tokens > room);
            }
            // No two rows fit into one, which would be a better fit.
            let mut left: Vec<u32> = rows.iter().map(|row| room - row_tokens(row)).collect();
            left.sort_unstable();
            if let [.., second, most] = left[..] {
                prop_assert!(room - most > second);
            }
        }

        #[test]
        fn targets_of_pieces_are_those_of_the_document_without_the_first_token_of_each_piece(
            document_tokens in 1u32..50, cut in 0u32..50,
        ) {
            let cut = cut % document_tokens;
            let targets = |start, tokens| {
                let mut shape = SampleShape { target_tokens: document_tokens - 1, ..SampleShape::default() };
                TokenSpan { start, tokens, document_tokens }.narrow(&mut shape);
                shape.target_tokens
            };
            let expected = document_tokens - 1 - u32::from(cut > 0);
            prop_assert_eq!(targets(0, cut) + targets(cut, document_tokens - cut), expected);
        }
    }

    #[test]
    fn a_layout_is_read_as_it_is_written() {
        for text in ["split:4096", "fit:4096", "fit:4096:512"] {
            assert_eq!(text.parse::<RowLayout>().unwrap().to_string(), text);
        }
        for text in ["split", "split:1", "split:0", "split:8:8", "fit:", "fit:8:0", "fit:8:8:8", "pack:8"] {
            let refused = text.parse::<RowLayout>().unwrap_err();
            assert!(refused.contains("split:N, fit:N or fit:N:DOCUMENTS"), "{refused}");
        }
    }

    #[test]
    fn rows_of_a_window_are_not_in_the_order_of_their_lengths() {
        let documents = Lengths { tokens: (1..=64).collect(), has_media: false };
        let rows = fit_rows(&documents, 64, 0..64);
        let pieces: Vec<usize> = rows.iter().map(Vec::len).collect();
        assert!(!pieces.is_sorted() && !pieces.iter().rev().is_sorted(), "{pieces:?}");
        assert_eq!(rows, fit_rows(&documents, 64, 0..64));
    }
}
