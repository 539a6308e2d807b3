//! Relieves the memory of stages whose limits are exceeded.
//!
//! Changes are drawn at the window that exceeds a limit most, and moves of items are among them whatever the
//! objective: a state that does not fit is no answer. None is accepted that raises the excess; those that
//! keep it may make the makespan longer by up to a microbatch, to leave plateaus.

use super::change::Change;
use super::schedule_state::ScheduleState;
use super::stage_memory::FullestWindow;
use super::{DRAW_STEPS, draw_at};
use crate::budget::Budget;
use crate::rng::SplitMix64;

/// Lowers the bytes above the limits until all are kept or `steps` elementary steps are spent.
pub(super) fn relieve(state: &mut ScheduleState<'_>, steps: u64, rng: &mut SplitMix64, budget: &mut Budget) {
    let threshold_ns = state.makespan_ns() / state.microbatches() as u64;
    budget.within(steps, |budget| {
        while let Some(window) = state.fullest_window() {
            if budget.is_spent() {
                break;
            }
            budget.spend(DRAW_STEPS);
            if let Some(change) = draw(state, &window, rng) {
                state.try_change(change, threshold_ns, budget);
            }
        }
    });
    state.return_to_best();
}

/// Draws a change at a window, half of the time, or anywhere; `None` if a slot would be empty.
pub(super) fn draw(
    state: &ScheduleState<'_>,
    window: &FullestWindow,
    rng: &mut SplitMix64,
) -> Option<Change> {
    let (ranks, microbatches) = (state.ranks(), state.microbatches());
    let bits = rng.next_u64() as usize;
    let (mut rank, mut place) = (rng.below(ranks), rng.below(microbatches));
    if bits & 1 == 0 {
        rank = window.rank.unwrap_or(rank);
        place = window.places.start + rng.below(window.places.len());
    }
    let is_inside = ranks == 1 || (bits >> 1) & 7 < 3;
    let other = if is_inside { rank } else { (rank + 1 + rng.below(ranks - 1)) % ranks };
    let first = rank * microbatches + place;
    let second = other * microbatches + rng.below(microbatches);
    // Whole slots 1 in 2: an order that fits is found sooner than contents that do.
    draw_at(state, first, second, (bits >> 4) & 1 == 0, rng)
}
