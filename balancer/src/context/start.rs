//! Starts for the search: items split until no slice is longer than a limit, widest first onto the groups
//! with least work.

use super::problem::ContextProblem;
use super::state::{Spot, State};
use crate::budget::Budget;
use std::cmp::Reverse;

/// Limits to the length of a slice, in hundredths of the mean work of a rank and slot.
const LIMITS_PERCENT: [u64; 10] = [100, 60, 40, 140, 25, 80, 15, 200, 8, 4];
/// Placed loads that are read in an elementary step.
const LOADS_PER_STEP: u64 = 4;

/// Returns the whole items as placed before, `[ranks][slots]`; `None` if the problem has no groups of one
/// rank, or they break a cap.
pub(super) fn whole<'a>(problem: &'a ContextProblem, ranks: &[Vec<Vec<u32>>]) -> Option<State<'a>> {
    let mut state = State::empty(problem);
    for (rank, slots) in ranks.iter().enumerate() {
        for (slot, items) in slots.iter().enumerate() {
            let spot = Spot { slot: slot as u32, first: rank as u32, log: 0 };
            for &item in items {
                if problem.logs[0] > 0 || !state.fits(item as usize, spot) {
                    return None;
                }
                state.insert(item as usize, spot);
            }
        }
    }
    state.recount();
    Some(state)
}

/// Returns the best start within the budget, and `None` if no start is within the caps.
pub(super) fn best<'a>(problem: &'a ContextProblem, mean_ns: u64, budget: &mut Budget) -> Option<State<'a>> {
    let mut best: Option<State<'a>> = None;
    let share = budget.steps_left() / 2;
    budget.within(share, |budget| {
        for percent in LIMITS_PERCENT {
            if best.is_some() && budget.is_spent() {
                break;
            }
            let limit_ns = (u128::from(mean_ns) * u128::from(percent) / 100) as u64;
            let Some(found) = split(problem, limit_ns, budget) else { continue };
            if best.as_ref().is_none_or(|best| found.total_ns() < best.total_ns()) {
                best = Some(found);
            }
        }
    });
    best
}

/// Splits items until their time on a rank is within a limit, as far as they can be split.
fn split<'a>(problem: &'a ContextProblem, limit_ns: u64, budget: &mut Budget) -> Option<State<'a>> {
    let time_ns = |item: usize, log: u8| -> u64 {
        let encoder_ns: u64 = problem.encoder_ns(item).iter().sum();
        problem.slice(item, log).ns + (encoder_ns >> log)
    };
    let choose = |item: usize| {
        let mut logs = problem.item_logs(item).peekable();
        // The shortest slice, if all are over the limit: splitting further may lengthen it.
        let shortest = problem.item_logs(item).min_by_key(|log| time_ns(item, *log))?;
        let within = logs.find(|log| time_ns(item, *log) <= limit_ns);
        Some(within.unwrap_or(shortest).min(shortest))
    };
    let mut items = Vec::with_capacity(problem.items.len());
    for item in 0..problem.items.len() {
        let log = choose(item)?;
        items.push((item, log, time_ns(item, log)));
    }
    items.sort_by_key(|&(item, log, ns)| (Reverse((log, ns)), item));
    let mut state = State::empty(problem);
    for (item, log, _) in items {
        let spot = lightest(&state, item, log)?;
        state.insert(item, spot);
        budget.spend((problem.slots * problem.ranks * problem.modules) as u64 / LOADS_PER_STEP);
    }
    if problem.fills() && !fill(&mut state) {
        return None;
    }
    state.recount();
    Some(state)
}

/// Finds the group and slot that have the least work with an item; of equal ones, the first.
fn lightest(state: &State<'_>, item: usize, log: u8) -> Option<Spot> {
    let problem = state.problem;
    let spots = (0..problem.slots).flat_map(|slot| {
        let groups = 0..problem.ranks >> log;
        groups.map(move |group| Spot { slot: slot as u32, first: (group << log) as u32, log })
    });
    let is_apart = problem.shard_ranks == 1;
    let rank_ns =
        |rank: usize| -> u64 { (0..problem.slots).map(|slot| load_ns(state, state.bin(slot, rank))).sum() };
    // Without lockstep, work counts over all slots; groups meet in the first slots, before ranks drift apart.
    let rank_loads: Vec<u64> = if is_apart { (0..problem.ranks).map(rank_ns).collect() } else { Vec::new() };
    let key = |spot: &Spot| -> (u64, u64) {
        let bins = || spot.ranks().map(|rank| state.bin(spot.slot as usize, rank));
        if is_apart {
            let slowest = spot.ranks().map(|rank| rank_loads[rank]).max().unwrap_or(0);
            let members = bins().map(|bin| state.members[bin].len() as u64).max().unwrap_or(0);
            return (slowest, if log > 0 { spot.slot.into() } else { members });
        }
        let slowest = bins().map(|bin| load_ns(state, bin)).max().unwrap_or(0);
        (slowest, bins().map(|bin| load_ns(state, bin)).sum())
    };
    spots.filter(|spot| state.fits(item, *spot)).min_by_key(key)
}

fn load_ns(state: &State<'_>, bin: usize) -> u64 {
    let modules = state.problem.modules;
    state.loads[bin * modules..(bin + 1) * modules].iter().sum()
}

/// Gives every rank an item in every slot, from ranks with several; returns whether each has one.
fn fill(state: &mut State<'_>) -> bool {
    for bin in 0..state.members.len() {
        if !state.members[bin].is_empty() {
            continue;
        }
        let spot = Spot {
            slot: (bin / state.problem.ranks) as u32,
            first: (bin % state.problem.ranks) as u32,
            log: 0,
        };
        let moved =
            state.members.iter().filter(|own| own.len() > 1).flatten().copied().find(|&item| {
                state.placement.spots[item as usize].log == 0 && state.fits(item as usize, spot)
            });
        let Some(item) = moved else { return false };
        state.remove(item as usize);
        state.insert(item as usize, spot);
    }
    true
}
