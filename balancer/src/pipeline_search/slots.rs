//! Operator: two microbatches change places, in one rank (order) or in two (rank balance).

use super::change::{Change, ChangeKind};

/// Makes the change of two different slots.
pub(super) fn draw(first: usize, second: usize) -> Option<Change> {
    Some(Change { first, second, kind: ChangeKind::Slots })
}
