//! Simulated annealing over items and microbatches, scored by the simulated makespan.
//!
//! Change in two slots: drawn by the search, tried and applied by the state.
//!
//! Equal microbatches are not optimal: small first and last microbatches shorten fill and drain, and a
//! stage's waiting time depends on the order. So every change, in slots or items ([`change`]), is judged by
//! the 1F1B makespan on the touched ranks, computed by [`super::timeline`] from the few passes that can move.
//! Half the changes are tried at the slowest rank, because no other rank can lower the makespan; the
//! remaining changes prepare later ones.
//!
//! A change is accepted if the slowest touched rank ends no later than a [threshold](Threshold) above the
//! slowest touched rank before. The threshold is random and shrinks to zero, so that the search leaves
//! plateaus early and descends late; the best visited state is the result. The threshold is computed from
//! integers only, so that every machine draws the same: the logarithm in the acceptance rule of simulated
//! annealing is the number of leading zero bits, interpolated linearly between powers of two.
//!
//! Memory limits come first: no change may raise the bytes above them, and a change that lowers these bytes
//! is accepted at any makespan ([`stage_memory`], [`memory_repair`]).

mod memory_repair;
mod schedule_state;
mod shared_modules;
mod stage_memory;

use crate::budget::Budget;
use crate::partition::{Partition, Problem};
use dflop_costmodel::random::SplitMix64;

pub(crate) use schedule_state::ScheduleState;

/// Elementary steps per item in the first cycle, if the budget is unlimited.
const FIRST_CYCLE_STEPS: u64 = 4_096;
/// Steps, about a quarter of an hour, above which a budget counts as unlimited.
const STEPS_ENDLESS: u64 = 1 << 38;
/// Elementary steps charged for drawing a change and summing the slots; cells and passes are charged in
/// addition.
const DRAW_STEPS: u64 = 8;
/// Binary order of the relative gap, 15 ns in a second, up to which a state counts as at the goal.
const NEAR_SHIFT: u32 = 26;
/// Search share for restarts, with memory limits.
const RESTARTS_SHARE: u64 = 4;
/// Number of restarts in a search with memory limits.
const RESTARTS: u64 = 16;
/// Cycles in a row without improvement before the search ends.
const VAIN_CYCLES_MAX: u32 = 2;

/// Changes that a search may apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MoveSet {
    /// Order and rank of microbatches.
    Order,
    /// Order, rank and items of microbatches.
    Contents,
}

/// Lowers the bytes above the memory limits, then the slowest rank's makespan, until it meets `goal_ns`, the
/// budget is spent or nothing helps. Never makes either worse, except the makespan for fewer bytes.
///
/// A single cycle with shrinking thresholds uses the whole budget; if that is unlimited (a deadline), cycles
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
    if !state.has_limits() {
        return run_cycles(state, moves, goal_ns, &mut rng, budget);
    }
    memory_repair::repair(state, first_cycle(state, budget) / 8 * 7, &mut rng, budget);
    let restarts_steps = first_cycle(state, budget) / RESTARTS_SHARE;
    let steps = budget.steps_left() - restarts_steps;
    budget.within(steps, |budget| run_cycles(state, moves, goal_ns, &mut rng, budget));
    for left in (1..=RESTARTS).rev() {
        let steps = budget.steps_left().min(restarts_steps) / left;
        budget.within(steps, |budget| restart(state, moves, goal_ns, &mut rng, budget));
    }
}

/// Searches from a perturbed state: memory limits may separate the states that changes can reach.
fn restart(
    state: &mut ScheduleState<'_>,
    moves: MoveSet,
    goal_ns: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) {
    if state.is_at(goal_ns) || budget.is_spent() {
        return;
    }
    let before = state.value();
    let slots = memory_repair::perturb(state, moves, rng, budget);
    let best = state.restart(slots, budget);
    memory_repair::repair(state, budget.steps_left() / 2, rng, budget);
    anneal(state, moves, goal_ns, budget.steps_left(), rng, budget);
    if state.value() > before {
        state.restart(best, budget);
    }
}

/// Anneals in cycles until the goal is met, the budget is spent or nothing helps.
fn run_cycles(
    state: &mut ScheduleState<'_>,
    moves: MoveSet,
    goal_ns: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) {
    let mut cycle = first_cycle(state, budget);
    let mut vain = 0;
    while vain < VAIN_CYCLES_MAX && !state.is_at(goal_ns) && !budget.is_spent() {
        let before = state.value();
        anneal(state, moves, goal_ns, cycle, rng, budget);
        vain = if state.value() < before { 0 } else { vain + 1 };
        cycle = cycle.saturating_mul(2);
    }
}

/// Lowers the bytes above the memory limits, within some of the remaining elementary steps.
pub(crate) fn repair_memory(state: &mut ScheduleState<'_>, steps: u64, budget: &mut Budget) {
    let steps = steps.min(first_cycle(state, budget));
    memory_repair::repair(state, steps, &mut SplitMix64::new(state.problem().seed), budget);
}

/// Returns the elementary steps in the first cycle: all remaining steps, or a few per item if these are
/// unlimited.
fn first_cycle(state: &ScheduleState<'_>, budget: &Budget) -> u64 {
    let left = budget.steps_left();
    if left > STEPS_ENDLESS { FIRST_CYCLE_STEPS * state.problem().items as u64 } else { left }
}

/// Runs a cycle with about `steps` elementary steps; the state ends as the best visited.
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
        if done >= steps || budget.is_spent() || state.is_at(goal_ns) {
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

/// Returns the mean threshold at the start of a cycle: a 256th of the gap to the goal, at most a 64th of a
/// microbatch; but more if microbatches hold few items, because changes are coarse then.
fn start_threshold(state: &ScheduleState<'_>, goal_ns: u64) -> u64 {
    let microbatch_ns = state.makespan_ns() / state.microbatches() as u64;
    let (items, groups) = (state.problem().items.max(1) as u128, state.problem().groups as u128);
    let per_item = |time_ns: u128, _| (time_ns * groups / items).min(u128::from(microbatch_ns));
    // Falls with the cube of the items per group: with many items, changes are fine.
    let coarse_ns = (0..3).fold(u128::from(microbatch_ns), per_item);
    let fine_ns = state.makespan_ns().saturating_sub(goal_ns) / 256;
    fine_ns.min(microbatch_ns / 64).max(coarse_ns as u64)
}

/// Draws a change in two different slots; `None` if a slot would be empty.
fn draw(state: &ScheduleState<'_>, moves: MoveSet, rng: &mut SplitMix64) -> Option<Change> {
    if let Some(window) = state.fullest_window() {
        return memory_repair::draw(state, &window, rng);
    }
    let (ranks, microbatches) = (state.ranks(), state.microbatches());
    // The bits of one number: at the slowest rank 1 in 2, inside one rank 3 in 8, whole slots 1 in 4.
    let bits = rng.next_u64() as usize;
    let rank = if bits & 1 == 0 { state.slowest() } else { rng.below(ranks) };
    let is_inside = ranks == 1 || (bits >> 1) & 7 < 3;
    let other = if is_inside { rank } else { (rank + 1 + rng.below(ranks - 1)) % ranks };
    let first = rank * microbatches + rng.below(microbatches);
    let second = other * microbatches + rng.below(microbatches);
    let is_whole = moves == MoveSet::Order || (bits >> 4) & 7 < 2;
    draw_at(state.slots(), first, second, is_whole, rng)
}

/// Draws a change in two slots, whole or in items; `None` if they are the same or a slot would be empty.
fn draw_at(
    slots: &Partition,
    first: usize,
    second: usize,
    is_whole: bool,
    rng: &mut SplitMix64,
) -> Option<Change> {
    if first == second {
        return None;
    }
    if is_whole { Some(Change::swap_slots(first, second)) } else { draw_items(slots, first, second, rng) }
}

/// Draws items from two different slots: a swap in 2 of 3 cases, always if the first slot would be empty;
/// `None` if there is no such item.
fn draw_items(slots: &Partition, first: usize, second: usize, rng: &mut SplitMix64) -> Option<Change> {
    let (givers, takers) = (slots.groups[first].len(), slots.groups[second].len());
    let is_swap = rng.below(3) > 0 || givers == 1;
    if givers == 0 || (is_swap && takers == 0) {
        return None;
    }
    let gives = rng.below(givers);
    let takes = is_swap.then(|| rng.below(takers));
    Some(Change { first, second, kind: ChangeKind::Items { gives, takes } })
}

/// Number of fraction bits in the logarithm and the progress.
const FRACTION_BITS: u32 = 10;

/// Random thresholds whose mean shrinks from its first value to zero.
#[derive(Debug)]
struct Threshold {
    start_ns: u64,
    steps: u64,
    mean_ns: u64,
    next_shrink: u64,
}

impl Threshold {
    /// Starts a cycle with `steps` elementary steps and a mean.
    fn new(start_ns: u64, steps: u64) -> Self {
        Self { start_ns, steps, mean_ns: start_ns, next_shrink: 0 }
    }

    /// Sets the mean for this far into the cycle: it falls with the square of the remaining part.
    fn shrink(&mut self, done: u64) {
        if done < self.next_shrink {
            return;
        }
        self.next_shrink = done + (self.steps >> FRACTION_BITS);
        let left = u128::from(self.steps.saturating_sub(done));
        let share = (left << FRACTION_BITS) / u128::from(self.steps.max(1));
        self.mean_ns = ((u128::from(self.start_ns) * share * share) >> (2 * FRACTION_BITS)) as u64;
    }

    /// Draws a threshold, nanoseconds: twice as high half as often.
    fn draw(&self, rng: &mut SplitMix64) -> u64 {
        let drawn = rng.next_u64() | 1;
        let zeros = drawn.leading_zeros();
        // The bits after the leading 1 interpolate to the next power of two.
        let fraction = (drawn << zeros << 1) >> (64 - FRACTION_BITS);
        let logarithm = (u64::from(zeros + 1) << FRACTION_BITS) - fraction;
        ((u128::from(self.mean_ns) * u128::from(logarithm)) >> FRACTION_BITS) as u64
    }
}

/// Change in two slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Change {
    first: usize,
    second: usize,
    kind: ChangeKind,
}

/// Kind of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeKind {
    /// The slots are exchanged.
    Slots,
    /// The first slot gives the item at a position, and optionally takes an item in return.
    Items { gives: usize, takes: Option<usize> },
}

impl Change {
    /// Exchanges two different slots, within a rank (order) or across two ranks (rank balance).
    fn swap_slots(first: usize, second: usize) -> Self {
        Self { first, second, kind: ChangeKind::Slots }
    }

    /// Computes the columns for both slots after the change; returns whether they stay within all limits.
    fn loads_after(self, problem: &Problem<'_>, slots: &Partition, after: &mut [Vec<u64>; 2]) -> bool {
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
    fn apply(self, problem: &Problem<'_>, slots: &mut Partition) {
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
struct Trial {
    /// Columns for both slots after the change.
    after: [Vec<u64>; 2],
    /// Cell times before the change: timeline, cell, nanoseconds.
    before: Vec<(usize, usize, u64)>,
    touched: Vec<Touched>,
    /// Whether memory is exceeded less than before.
    is_repair: bool,
}

/// Timeline touched by a change, from the first to the last changed microbatch.
struct Touched {
    timeline: usize,
    from: usize,
    to: usize,
    /// Makespan after the change.
    makespan_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_falls_to_nothing() {
        let mut threshold = Threshold::new(1 << 20, 1 << 20);
        let mut means = Vec::new();
        for done in [0, 1 << 19, 1 << 20, 1 << 21] {
            threshold.shrink(done);
            means.push(threshold.mean_ns);
        }
        assert_eq!(means, [1 << 20, 1 << 18, 0, 0]);
        assert_eq!(threshold.draw(&mut SplitMix64::new(1)), 0);
    }

    #[test]
    fn thresholds_are_twice_as_high_half_as_often() {
        let threshold = Threshold::new(1 << 20, 1);
        let mut rng = SplitMix64::new(3);
        let drawn: Vec<u64> = (0..100_000).map(|_| threshold.draw(&mut rng)).collect();
        for halvings in 1..8 {
            let above = drawn.iter().filter(|drawn| **drawn > halvings << 20).count();
            let expected = 100_000 >> halvings;
            assert!(above.abs_diff(expected) < expected / 8, "{above} above {halvings} for {expected}");
        }
    }
}
