//! Operator: an item moves to another slot, or two items change places.

use super::change::{Change, ChangeKind};
use super::plan::Plan;
use crate::rng::SplitMix64;

/// Draws items of two different slots: a swap in 2 of 3, always if the first slot would be empty.
/// Nothing if there is no such item.
pub(super) fn draw(plan: &Plan<'_>, first: usize, second: usize, rng: &mut SplitMix64) -> Option<Change> {
    let (givers, takers) = (plan.items(first), plan.items(second));
    let is_swap = rng.below(3) > 0 || givers == 1;
    if givers == 0 || (is_swap && takers == 0) {
        return None;
    }
    let gives = rng.below(givers);
    let takes = is_swap.then(|| rng.below(takers));
    Some(Change { first, second, kind: ChangeKind::Items { gives, takes } })
}
