//! Operator: two microbatches change places, in one rank (order) or in two (rank balance).

use super::change::{Change, ChangeKind};

/// Makes the change of two different slots.
pub(super) fn swap(first: usize, second: usize) -> Change {
    Change { first, second, kind: ChangeKind::Slots }
}
