//! A change on trial: its effects before it is accepted or rejected.

/// A change on trial; kept to reuse its memory.
#[derive(Default)]
pub(super) struct Trial {
    /// Columns of the two slots after the change.
    pub(super) after: [Vec<u64>; 2],
    /// Cells of the times before the change: timeline, cell, nanoseconds.
    pub(super) before: Vec<(usize, usize, u64)>,
    pub(super) touched: Vec<Touched>,
    /// Whether memory is exceeded less than before.
    pub(super) is_relief: bool,
}

/// A timeline that a change touches, from one of its microbatches to another.
pub(super) struct Touched {
    pub(super) timeline: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Makespan after the change.
    pub(super) makespan_ns: u64,
}
