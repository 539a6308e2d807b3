//! Arranges microbatch samples in tensors: packed into a single row, or padded to a row per sample.

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
