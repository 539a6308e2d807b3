//! Improves a placement: items change group, slot or number of ranks, or exchange places.

use super::problem::ContextProblem;
use super::state::{Placement, Spot, State};
use crate::budget::Budget;
use dflop_costmodel::random::SplitMix64;
use std::ops::Range;

/// Elementary steps per tried change, in addition to the loads that it reads.
const STEPS_PER_CHANGE: u64 = 8;
/// Loads that are read in an elementary step.
const LOADS_PER_STEP: u64 = 16;
/// The same for pipelines, whose passes are computed on the changed ranks.
const PIPELINE_STEPS_PER_CHANGE: u64 = 24;
const PASSES_PER_STEP: u64 = 4;
/// Divisor of the bound for what a placement may be above it to end the search.
const GOAL_DIVISOR: u64 = 1024;
/// Divisor of the gap to the bound for the first threshold below which a change for the worse is accepted.
const GAP_DIVISOR: u64 = 32;
/// The same of the mean item, where there are so many changes for each item that a start need not be kept.
const MEAN_DIVISOR: u64 = 2;
const CHANGES_PER_ITEM: u64 = 256;
/// One change in this many moves a single medium, if there is one in a group.
const MEDIUM_CHANCE: usize = 8;

/// How often the search starts.
const CYCLES: usize = 4;

/// A change: an item goes to a group, and an item from there takes its place, if there is one.
#[derive(Debug, Clone, Copy)]
struct Change {
    item: usize,
    to: Spot,
    other: Option<usize>,
    /// Number of a medium of the item that goes to a place in the group; other media find their own.
    medium: Option<(usize, u8)>,
}

/// Changes places until the budget is spent or the bound is met; returns the best placement. The first cycles
/// start from the given placements and change no sizes; then the best placement changes in every way.
///
/// - `state`: the shortest start
/// - `others`: longer starts
pub(super) fn search<'a>(
    mut state: State<'a>,
    others: &[Placement],
    bound_ns: u64,
    budget: &mut Budget,
) -> State<'a> {
    let problem = state.problem;
    let bins = problem.slots * problem.ranks;
    let goal_ns = bound_ns + bound_ns / GOAL_DIVISOR;
    if problem.items.is_empty() || bins < 2 || state.total_ns() <= goal_ns || budget.is_spent() {
        return state;
    }
    let mut best = (state.total_ns(), state.placement.clone());
    let mut random = SplitMix64::new(problem.seed());
    let changes = budget.steps_left() / CYCLES as u64 / steps_most(problem);
    let is_long = changes >= CHANGES_PER_ITEM * problem.items.len() as u64;
    for cycle in 0..CYCLES {
        if cycle > 0 {
            let start = others.get(cycle - 1).unwrap_or(&best.1);
            state = State::restore(problem, start);
        }
        let kinds = if cycle <= others.len() && !is_long { 1..4 } else { 0..4 };
        let steps = budget.steps_left() / (CYCLES - cycle) as u64;
        let now_ns = state.total_ns();
        let threshold_ns = if is_long {
            now_ns / problem.items.len().div_ceil(problem.ranks) as u64 / MEAN_DIVISOR
        } else {
            now_ns.saturating_sub(bound_ns) / GAP_DIVISOR
        };
        let media_before = [const { Vec::new() }; 2];
        let mut cycle = Cycle { goal_ns, kinds, threshold_ns, random: &mut random, media_before };
        budget.within(steps, |budget| cycle.run(&mut state, &mut best, budget));
    }
    let found = State::restore(problem, &best.1);
    debug_assert_eq!(found.total_ns(), best.0, "times that changed with each change");
    found
}

/// Returns the steps of a change on all ranks, which is the most.
fn steps_most(problem: &ContextProblem) -> u64 {
    let read = match &problem.pipeline {
        Some(passes) => passes.passes() * problem.ranks,
        None if problem.shard_ranks == 1 => problem.slots * problem.ranks * problem.modules,
        None => 2 * problem.shard_ranks * problem.modules,
    };
    steps(problem, read)
}

/// Returns the steps of a change that reads some loads, or computes some ends of passes.
fn steps(problem: &ContextProblem, read: usize) -> u64 {
    if problem.pipeline.is_some() {
        return PIPELINE_STEPS_PER_CHANGE + read as u64 / PASSES_PER_STEP;
    }
    STEPS_PER_CHANGE + read as u64 / LOADS_PER_STEP
}

/// A search from a placement.
struct Cycle<'a> {
    /// Step time that ends the search.
    goal_ns: u64,
    /// Kinds to draw changes from.
    kinds: Range<usize>,
    /// First threshold below which a change for the worse is accepted.
    threshold_ns: u64,
    random: &'a mut SplitMix64,
    /// Places of the changed items' media before a change.
    media_before: [Vec<u8>; 2],
}

impl Cycle<'_> {
    /// Accepts ever smaller changes for the worse, and none in the last third.
    fn run(&mut self, state: &mut State<'_>, best: &mut (u64, Placement), budget: &mut Budget) {
        let mut now_ns = state.total_ns();
        let budget_steps = budget.steps_left();
        while best.0 > self.goal_ns && !budget.is_spent() {
            budget.spend(steps(state.problem, 0));
            let Some(change) = draw(state, self.kinds.clone(), self.random) else { continue };
            let from = state.placement.spots[change.item];
            self.save_media(state, change);
            let Some(read) = apply(state, change, from) else {
                self.undo(state, change, from);
                continue;
            };
            budget.spend(steps(state.problem, read) - steps(state.problem, 0));
            let after_ns = state.total_ns();
            // The threshold falls to zero over two thirds of the search, alike on every machine.
            let left = u128::from(budget.steps_left()) * 3 / 2;
            let share = left.saturating_sub(u128::from(budget_steps) / 2);
            let threshold = (u128::from(self.threshold_ns) * share / u128::from(budget_steps.max(1))) as u64;
            if after_ns > now_ns.saturating_add(threshold) {
                self.undo(state, change, from);
                state.uncount();
                continue;
            }
            now_ns = after_ns;
            if now_ns < best.0 {
                best.0 = now_ns;
                best.1.copy_from(&state.placement);
            }
        }
    }

    /// Copies the media places of the changed items.
    fn save_media(&mut self, state: &State<'_>, change: Change) {
        for (before, item) in self.media_before.iter_mut().zip([Some(change.item), change.other]) {
            before.clear();
            if let Some(item) = item {
                before.extend_from_slice(&state.placement.media[item_media(state, item)]);
            }
        }
    }

    /// Takes a change of loads back, with the media where they were.
    fn undo(&self, state: &mut State<'_>, change: Change, from: Spot) {
        let items = [(Some(change.item), from), (change.other, change.to)];
        for item in items.into_iter().filter_map(|(item, _)| item) {
            state.remove(item);
        }
        for (before, (item, spot)) in self.media_before.iter().zip(items) {
            if let Some(item) = item {
                let media = item_media(state, item);
                state.placement.media[media].copy_from_slice(before);
                state.insert_placed(item, spot);
            }
        }
    }
}

/// Draws a change for an item on a slowest rank, or any; `None` if it would change nothing.
fn draw(state: &State<'_>, kinds: Range<usize>, random: &mut SplitMix64) -> Option<Change> {
    let problem = state.problem;
    let item = draw_item(state, random)?;
    let from = state.placement.spots[item];
    let media = item_media(state, item).len();
    if from.log > 0 && media > 0 && random.below(MEDIUM_CHANCE) == 0 {
        let medium = (random.below(media), random.below(1 << from.log) as u8);
        return Some(Change { item, to: from, other: None, medium: Some(medium) });
    }
    let kind = kinds.start + random.below(kinds.len());
    let log = if kind == 0 {
        let logs = || problem.item_logs(item).filter(|log| *log != from.log);
        let count = logs().count();
        if count == 0 { from.log } else { logs().nth(random.below(count)).unwrap_or(from.log) }
    } else {
        from.log
    };
    let slot = if problem.slots == 1 || random.below(2) == 0 {
        from.slot
    } else {
        random.below(problem.slots) as u32
    };
    let groups = problem.ranks >> log;
    let group = match random.below(3) {
        0 => random.below(groups),
        1 if log != from.log => (from.first as usize >> log).min(groups - 1),
        _ => lightest_group(state, slot as usize, log),
    };
    let to = Spot { slot, first: (group << log) as u32, log };
    if to == from {
        // Media may find better ranks.
        return (from.log > 0 && media > 0).then_some(Change { item, to, other: None, medium: None });
    }
    let mut other = None;
    if kind >= 2 && log == from.log {
        let members = &state.members[state.bin(slot as usize, to.first as usize)];
        if !members.is_empty() {
            let candidate = members[random.below(members.len())] as usize;
            other = Some(candidate).filter(|other| state.placement.spots[*other] == to);
        }
    }
    Some(Change { item, to, other, medium: None })
}

fn draw_item(state: &State<'_>, random: &mut SplitMix64) -> Option<usize> {
    let problem = state.problem;
    if random.below(2) == 0 {
        return Some(random.below(problem.items.len()));
    }
    let slot = random.below(problem.slots);
    let rank = if problem.shard_ranks > 1 {
        let module = random.below(problem.modules);
        let first = state.slowest_shard() * problem.shard_ranks;
        let ns = |rank: &usize| state.module_ns(state.bin(slot, *rank), module);
        (first..first + problem.shard_ranks).rev().max_by_key(ns)?
    } else {
        (0..problem.ranks).rev().max_by_key(|rank| state.done_ns[*rank])?
    };
    let members = &state.members[state.bin(slot, rank)];
    (!members.is_empty()).then(|| members[random.below(members.len())] as usize)
}

/// Returns the group with the least work in a slot, or in all slots if these need not be even.
fn lightest_group(state: &State<'_>, slot: usize, log: u8) -> usize {
    let problem = state.problem;
    let load = |rank: usize| -> u64 {
        if problem.balances_slots() {
            return state.load_ns(state.bin(slot, rank));
        }
        state.done_ns[rank]
    };
    let slowest = |group: &usize| (group << log..(group + 1) << log).map(load).max();
    (0..problem.ranks >> log).min_by_key(slowest).unwrap_or(0)
}

/// Applies a change, and computes the times if it is within the caps and leaves no rank empty. Returns the
/// number of loads that this read.
fn apply(state: &mut State<'_>, change: Change, from: Spot) -> Option<usize> {
    if let Some((medium, offset)) = change.medium {
        state.remove(change.item);
        let media = item_media(state, change.item);
        state.placement.media[media][medium] = offset;
        state.insert_placed(change.item, from);
        return Some(state.count_spots(&[from]));
    }
    state.remove(change.item);
    if let Some(other) = change.other {
        state.remove(other);
    }
    let mut fits = state.fits(change.item, change.to);
    state.insert(change.item, change.to);
    if let Some(other) = change.other {
        fits &= state.fits(other, from);
        state.insert(other, from);
    }
    if fits && state.problem.fills() {
        fits = from.ranks().all(|rank| !state.members[state.bin(from.slot as usize, rank)].is_empty());
    }
    fits.then(|| state.count_spots(&[from, change.to]))
}

fn item_media(state: &State<'_>, item: usize) -> std::ops::Range<usize> {
    state.problem.media_starts[item]..state.problem.media_starts[item + 1]
}
