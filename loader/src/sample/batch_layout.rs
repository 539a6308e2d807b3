//! Lays the samples of a microbatch out in tensors: packed into one row, or padded to one row each.

/// How the samples of a microbatch share tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchLayout {
    /// One row, samples one behind the other.
    Packed,
    /// A row for each sample, filled up to the longest.
    Padded {
        /// Where the padding goes.
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

/// The end of a row that padding goes to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PaddingSide {
    /// In front of the sample.
    Left,
    /// Behind the sample, as in training.
    #[default]
    Right,
}
