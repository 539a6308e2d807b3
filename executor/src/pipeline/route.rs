//! Routes encoder rows to LLM microbatches, and gradients back.
//!
//! The rows for a medium are a part of the output of one encoder microbatch, the *source*, and of the media
//! rows in one LLM microbatch, the *destination*. Every rank computes the same routes, so no shape is ever
//! sent. One message goes from a source to a destination, with the rows for all media that they share; none
//! if there are no rows. Gradients go the same way back: the transposed route swaps source and destination
//! and keeps the offsets, so it is the inverse.

use std::collections::BTreeMap;

use dflop_device::ops::elementwise::CopyRange;

/// Route for a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutedMedium {
    /// Index among the media in the destination.
    pub medium: usize,
    /// Number of rows that the LLM reads.
    pub tokens: usize,
    /// Encoder microbatch that encodes the medium.
    pub source: u32,
    /// First row in the source output.
    pub source_offset: usize,
    /// LLM microbatch that reads the medium.
    pub destination: u32,
    /// First row among the media rows in the destination.
    pub destination_offset: usize,
}

/// Route ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteEnd {
    /// The encoder.
    Source,
    /// The LLM.
    Destination,
}

/// Routes for all media that an encoder encodes in a step, sorted by destination and position there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutePlan {
    rows: Vec<RoutedMedium>,
    /// Indices into `rows` by source and destination.
    pairs: BTreeMap<(u32, u32), Vec<usize>>,
    /// Number of tokens in every source that has media.
    source_tokens: BTreeMap<u32, usize>,
}

impl RoutedMedium {
    fn offset(&self, end: RouteEnd) -> usize {
        match end {
            RouteEnd::Source => self.source_offset,
            RouteEnd::Destination => self.destination_offset,
        }
    }
}

impl RoutePlan {
    /// Sorts media by destination and sets the source offsets in that order; ignores source offsets in the
    /// argument.
    #[must_use]
    pub fn new(mut rows: Vec<RoutedMedium>) -> Self {
        rows.sort_by_key(|row| (row.destination, row.medium));
        let (mut pairs, mut source_tokens) = (BTreeMap::new(), BTreeMap::new());
        for (index, row) in rows.iter_mut().enumerate() {
            let tokens: &mut usize = source_tokens.entry(row.source).or_default();
            row.source_offset = *tokens;
            *tokens += row.tokens;
            let pair: &mut Vec<usize> = pairs.entry((row.source, row.destination)).or_default();
            pair.push(index);
        }
        Self { rows, pairs, source_tokens }
    }

    /// Returns the routes for all media.
    #[must_use]
    pub fn rows(&self) -> &[RoutedMedium] {
        &self.rows
    }

    /// Returns the media in a source, in encoding order.
    pub fn source_media(&self, source: u32) -> impl Iterator<Item = &RoutedMedium> {
        let pairs = self.pairs.range((source, 0)..=(source, u32::MAX));
        pairs.flat_map(|(_, rows)| rows).map(|&row| &self.rows[row])
    }

    /// Returns the number of output rows for a source.
    #[must_use]
    pub fn source_tokens(&self, source: u32) -> usize {
        self.source_tokens.get(&source).copied().unwrap_or(0)
    }

    /// Returns the media that go from a source to a destination, in message order.
    pub fn between(&self, source: u32, destination: u32) -> impl Iterator<Item = &RoutedMedium> {
        self.pairs.get(&(source, destination)).into_iter().flatten().map(|&row| &self.rows[row])
    }

    /// Returns the number of rows in the message from a source to a destination; without rows no message is
    /// sent.
    #[must_use]
    pub fn tokens_between(&self, source: u32, destination: u32) -> usize {
        self.between(source, destination).map(|row| row.tokens).sum()
    }

    /// Returns the row elements at one end, in the order of the message from a source to a destination; `to`
    /// counts message elements.
    #[must_use]
    pub fn elements(&self, [source, destination]: [u32; 2], end: RouteEnd, width: usize) -> Vec<CopyRange> {
        let mut to = 0;
        let mut next = |row: &RoutedMedium| {
            let len = row.tokens * width;
            to += len;
            CopyRange { from: row.offset(end) * width, to: to - len, len }
        };
        self.between(source, destination).map(&mut next).collect()
    }
}
