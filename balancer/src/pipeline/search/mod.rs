//! Moves scored by the simulator: what min-max alone cannot see.
//!
//! Equal microbatches are not the best ones: small first and last ones shorten fill and drain, and what a
//! stage waits for depends on the order. So every change here, of slots ([`slots`]) or of items
//! ([`items`]), is judged by the 1F1B makespan of the ranks that it touches, worked out by
//! [`timeline`] from the few passes that can move. Half of the changes are tried at the slowest rank,
//! because no other can lower the makespan; the others prepare the ground.
//!
//! A change stays if the slowest rank that it touches ends no later than a [`threshold`] above the slowest
//! of them before. The threshold is random and shrinks to nothing, so that the search leaves plateaus
//! early and descends late (simulated annealing); the best state seen is what counts.

mod change;
mod schedule_state;
mod shared_modules;
mod threshold;

use crate::budget::Budget;
use crate::rng::SplitMix64;
use change::{Change, ChangeKind};
pub(crate) use schedule_state::ScheduleState;
use threshold::Threshold;

/// Elementary steps of the first cycle, for each item, where the budget has no end.
const FIRST_CYCLE_STEPS: u64 = 4_096;
/// A budget above this, about a quarter of an hour, is taken for endless.
const STEPS_ENDLESS: u64 = 1 << 38;
/// What drawing a change and adding up its slots counts as; the cells and passes looked at come on top.
const DRAW_STEPS: u64 = 8;
/// Within 2 to the power of minus this above the goal, 15 ns in a second, a state is as good as at it.
const NEAR_SHIFT: u32 = 26;
/// Cycles in a row that may find nothing better.
const VAIN_CYCLES_MAX: u32 = 2;

/// What may be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MoveSet {
    /// The order of microbatches, and the rank of each.
    Order,
    /// Also what is in them.
    Contents,
}

/// Lowers the slowest rank's makespan until it meets `goal_ns`, the budget is spent or nothing helps.
/// Never makes it worse.
///
/// One cycle of shrinking thresholds takes all of the budget; where that has no end (a deadline), cycles
/// double in length.
///
/// # Source
/// Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983.
pub(crate) fn improve(state: &mut ScheduleState<'_>, moves: MoveSet, goal_ns: u64, budget: &mut Budget) {
    if state.problem().groups == 1 {
        return;
    }
    let goal_ns = goal_ns + (goal_ns >> NEAR_SHIFT);
    let mut rng = SplitMix64::new(state.problem().seed);
    let left = budget.steps_left();
    let is_endless = left > STEPS_ENDLESS;
    let mut cycle = if is_endless { FIRST_CYCLE_STEPS * state.problem().items as u64 } else { left };
    let mut vain = 0;
    while vain < VAIN_CYCLES_MAX && state.makespan_ns() > goal_ns && !budget.is_spent() {
        let before_ns = state.makespan_ns();
        anneal(state, moves, goal_ns, cycle, &mut rng, budget);
        vain = if state.makespan_ns() < before_ns { 0 } else { vain + 1 };
        cycle = cycle.saturating_mul(2);
    }
}

/// One cycle of about so many elementary steps; the state ends as the best seen.
fn anneal(
    state: &mut ScheduleState<'_>,
    moves: MoveSet,
    goal_ns: u64,
    steps: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) {
    let start = budget.steps_left();
    let mut threshold = Threshold::new(start_threshold(state, goal_ns), steps);
    loop {
        let done = start - budget.steps_left();
        if done >= steps || budget.is_spent() || state.makespan_ns() <= goal_ns {
            break;
        }
        budget.spend(DRAW_STEPS);
        threshold.shrink(done);
        if let Some(change) = draw(state, moves, rng) {
            state.try_change(change, threshold.draw(rng), budget);
        }
    }
    state.return_to_best();
}

/// The mean threshold that a cycle begins with: a 256th of what is left to the goal, a 64th of a microbatch
/// at most; but more if microbatches hold few items, as changes are coarse then.
fn start_threshold(state: &ScheduleState<'_>, goal_ns: u64) -> u64 {
    let microbatch_ns = state.makespan_ns() / state.microbatches() as u64;
    let (items, groups) = (state.problem().items.max(1) as u128, state.problem().groups as u128);
    let per_item = |time_ns: u128, _| (time_ns * groups / items).min(u128::from(microbatch_ns));
    let coarse_ns = (0..3).fold(u128::from(microbatch_ns), per_item);
    let fine_ns = state.makespan_ns().saturating_sub(goal_ns) / 256;
    fine_ns.min(microbatch_ns / 64).max(coarse_ns as u64)
}

/// Draws a change of two different slots; nothing if a slot would be empty.
fn draw(state: &ScheduleState<'_>, moves: MoveSet, rng: &mut SplitMix64) -> Option<Change> {
    let (ranks, microbatches) = (state.ranks(), state.microbatches());
    // The bits of one number: at the slowest rank 1 in 2, inside one rank 3 in 8, whole slots 1 in 4.
    let bits = rng.next_u64() as usize;
    let rank = if bits & 1 == 0 { state.slowest() } else { rng.below(ranks) };
    let is_inside = ranks == 1 || (bits >> 1) & 7 < 3;
    let other = if is_inside { rank } else { (rank + 1 + rng.below(ranks - 1)) % ranks };
    let first = rank * microbatches + rng.below(microbatches);
    let second = other * microbatches + rng.below(microbatches);
    if first == second {
        return None;
    }
    match moves {
        MoveSet::Order => Some(Change::swap_slots(first, second)),
        MoveSet::Contents if (bits >> 4) & 7 < 2 => Some(Change::swap_slots(first, second)),
        MoveSet::Contents => draw_items(state, first, second, rng),
    }
}

/// Draws items of two different slots: a swap in 2 of 3, always if the first slot would be empty.
/// Nothing if there is no such item.
fn draw_items(
    state: &ScheduleState<'_>,
    first: usize,
    second: usize,
    rng: &mut SplitMix64,
) -> Option<Change> {
    let (givers, takers) = (state.items(first), state.items(second));
    let is_swap = rng.below(3) > 0 || givers == 1;
    if givers == 0 || (is_swap && takers == 0) {
        return None;
    }
    let gives = rng.below(givers);
    let takes = is_swap.then(|| rng.below(takers));
    Some(Change { first, second, kind: ChangeKind::Items { gives, takes } })
}
