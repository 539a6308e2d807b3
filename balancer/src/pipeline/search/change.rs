//! Change in two slots: drawn by the search, tried and applied by the state.

use crate::partition::{Partition, Problem};

/// Change in two slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) first: usize,
    pub(super) second: usize,
    pub(super) kind: ChangeKind,
}

/// Kind of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChangeKind {
    /// The slots are exchanged.
    Slots,
    /// The first slot gives the item at a position, and optionally takes an item in return.
    Items { gives: usize, takes: Option<usize> },
}

impl Change {
    /// Exchanges two different slots, within a rank (order) or across two ranks (rank balance).
    pub(super) fn swap_slots(first: usize, second: usize) -> Self {
        Self { first, second, kind: ChangeKind::Slots }
    }

    /// Computes the columns for both slots after the change; returns whether they stay within all limits.
    pub(super) fn loads_after(
        self,
        problem: &Problem<'_>,
        slots: &Partition,
        after: &mut [Vec<u64>; 2],
    ) -> bool {
        let [first, second] = after;
        first.copy_from_slice(slots.load(problem, self.first));
        second.copy_from_slice(slots.load(problem, self.second));
        let ChangeKind::Items { gives, takes } = self.kind else {
            std::mem::swap(first, second);
            return true;
        };
        shift(first, second, problem.row(slots.groups[self.first][gives]));
        if let Some(takes) = takes {
            shift(second, first, problem.row(slots.groups[self.second][takes]));
        }
        !problem.has_caps() || (problem.is_within(first) && problem.is_within(second))
    }

    /// Applies the change.
    pub(super) fn apply(self, problem: &Problem<'_>, slots: &mut Partition) {
        let ChangeKind::Items { gives, takes } = self.kind else {
            return slots.swap_groups(problem, self.first, self.second);
        };
        let given = slots.take(problem, self.first, gives);
        if let Some(takes) = takes {
            // Positions are from before the change, so both items leave before either arrives.
            let taken = slots.take(problem, self.second, takes);
            slots.add(problem, self.first, taken);
        }
        slots.add(problem, self.second, given);
    }
}

/// Moves a row between two loads.
fn shift(from: &mut [u64], to: &mut [u64], row: &[u64]) {
    for ((from, to), value) in from.iter_mut().zip(to).zip(row) {
        *from -= value;
        *to += value;
    }
}

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
