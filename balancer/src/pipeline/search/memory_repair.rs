//! Lowers the memory in stages whose limits are exceeded.
//!
//! Changes are drawn at the window that exceeds a limit most, and include item moves whatever the objective:
//! a state that does not fit is no solution. Changes that raise the excess are rejected; changes that keep it
//! may make the makespan longer by part of a microbatch, to leave plateaus.

use super::schedule_state::ScheduleState;
use super::stage_memory::FullestWindow;
use super::{Change, DRAW_STEPS, MoveSet, draw_at};
use crate::budget::Budget;
use crate::partition::Partition;
use dflop_costmodel::random::SplitMix64;

/// Share of a microbatch by which a change may make the makespan longer.
const THRESHOLD_SHARE: u64 = 4;
/// Failed changes, per microbatch in the step, before a perturbation.
const VAIN_TRIES_PER_GROUP: usize = 32;

/// Lowers the bytes above the limits until all are kept or `steps` elementary steps are spent.
///
/// If no change helps any more, random changes, accepted whatever they do, start another descent; the state
/// with the fewest bytes is the result.
pub(super) fn repair(state: &mut ScheduleState<'_>, steps: u64, rng: &mut SplitMix64, budget: &mut Budget) {
    budget.within(steps, |budget| {
        descend(state, rng, budget);
        while state.memory_excess() > 0 && !budget.is_spent() {
            let before = state.value();
            let slots = perturb(state, MoveSet::Contents, rng, budget);
            let best = state.restart(slots, budget);
            descend(state, rng, budget);
            if state.value() > before {
                state.restart(best, budget);
            }
        }
    });
}

/// Tries changes until all limits are kept, the budget is spent or none lowers the excess.
fn descend(state: &mut ScheduleState<'_>, rng: &mut SplitMix64, budget: &mut Budget) {
    let threshold_ns = state.makespan_ns() / state.microbatches() as u64 / THRESHOLD_SHARE;
    let vain_max = VAIN_TRIES_PER_GROUP * state.problem().groups;
    let (mut excess, mut vain) = (state.memory_excess(), 0);
    while let Some(window) = state.fullest_window() {
        if vain == vain_max || budget.is_spent() {
            break;
        }
        budget.spend(DRAW_STEPS);
        if let Some(change) = draw(state, &window, rng) {
            state.try_change(change, threshold_ns, budget);
        }
        vain = if state.memory_excess() < excess { 0 } else { vain + 1 };
        excess = state.memory_excess();
    }
    state.return_to_best();
}

/// Returns the slots after a few random changes within all caps.
pub(super) fn perturb(
    state: &ScheduleState<'_>,
    moves: MoveSet,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> Partition {
    let problem = state.problem();
    let mut slots = state.slots().clone();
    let mut after = [(); 2].map(|()| vec![0; problem.width()]);
    let changes = 2 + rng.below(problem.groups);
    budget.spend(changes as u64 * DRAW_STEPS);
    for _ in 0..changes {
        let [first, second] = [(); 2].map(|()| rng.below(problem.groups));
        let is_whole = moves == MoveSet::Order || rng.below(2) == 0;
        if let Some(change) = draw_at(&slots, first, second, is_whole, rng)
            && change.loads_after(problem, &slots, &mut after)
        {
            change.apply(problem, &mut slots);
        }
    }
    slots
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
    draw_at(state.slots(), first, second, (bits >> 4) & 1 == 0, rng)
}
