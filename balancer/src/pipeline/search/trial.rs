//! Change on trial: effects before acceptance or rejection.

/// Change on trial; kept to reuse its memory.
#[derive(Default)]
pub(super) struct Trial {
    /// Columns for both slots after the change.
    pub(super) after: [Vec<u64>; 2],
    /// Cell times before the change: timeline, cell, nanoseconds.
    pub(super) before: Vec<(usize, usize, u64)>,
    pub(super) touched: Vec<Touched>,
    /// Whether memory is exceeded less than before.
    pub(super) is_relief: bool,
}

/// Timeline touched by a change, from the first to the last changed microbatch.
pub(super) struct Touched {
    pub(super) timeline: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// Makespan after the change.
    pub(super) makespan_ns: u64,
}
