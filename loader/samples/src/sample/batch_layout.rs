//! Lays the samples of a microbatch out in tensors: packed into one row, or padded to one row each.

/// Arrangement of the samples of a microbatch in tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchLayout {
    /// One row, samples one behind the other.
    Packed,
    /// A row for each sample, filled up to the longest.
    Padded {
        /// Side of the padding.
        side: PaddingSide,
    },
}

impl BatchLayout {
    /// Whether all samples share one row.
    #[must_use]
    pub fn is_packed(self) -> bool {
        self == Self::Packed
    }
}

/// Side of a row that is padded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PaddingSide {
    /// Before the sample.
    Left,
    /// After the sample, as is usual in training.
    #[default]
    Right,
}
