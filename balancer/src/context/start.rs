//! Starts for the search: every item is split over a number of ranks, and items go to the groups with the
//! least work, widest and longest first.

use super::problem::ContextProblem;
use super::state::{Placement, Spot, State};
use crate::budget::Budget;
use crate::pipeline::peak_order;
use std::cmp::Reverse;

/// Limits to the length of a slice, in hundredths of the mean work of a rank and slot.
const LIMITS_PERCENT: [u64; 5] = [100, 60, 40, 25, 15];
/// Groups that are compared in an elementary step.
const GROUPS_PER_STEP: u64 = 16;
/// Compared groups that the budget does not count: every start in a small problem.
const FREE_GROUPS: u64 = 1 << 18;
/// Starts in which media are placed.
const DRAFTS: usize = 2;
/// Shares that a medium may have if media divide nearly equally.
const LONG_SHARE: u64 = 2;
/// Starts beside the best that the search tries, and the part by which they may be longer than the best.
const OTHERS: usize = 1;
const OTHER_DIVISOR: u64 = 20;
/// Groups in a block, whose least work is known.
const BLOCK: usize = 64;

/// Returns the shortest start, and other starts; `None` if no start is within the caps. Where media divide
/// nearly equally, they are placed in the best starts only.
///
/// - `whole`: places of whole items, `[ranks][slots]`, a start of its own
pub(super) fn best<'a>(
    problem: &'a ContextProblem,
    whole: Option<&[Vec<Vec<u32>>]>,
    mean_ns: u64,
    budget: &mut Budget,
) -> Option<(State<'a>, Vec<Placement>)> {
    // One state serves all starts: its lists keep their memory.
    let mut state = State::empty(problem);
    let mut starts: Vec<(u64, Placement)> = Vec::new();
    if whole.is_some_and(|whole| place_whole(&mut state, whole)) {
        starts.push((state.total_ns(), state.placement.clone()));
    }
    for (ns, placement, is_settled) in drafts(&mut state, mean_ns, budget).into_iter().rev() {
        if is_settled {
            starts.push((ns, placement));
            continue;
        }
        state.clear();
        for (item, spot) in placement.spots.into_iter().enumerate() {
            state.insert_shares(item, spot);
        }
        state.settle_media();
        starts.push((state.total_ns(), state.placement.clone()));
    }
    // Of equal starts, the first; whole items need no messages.
    starts.sort_by_key(|(ns, _)| *ns);
    let mut starts = starts.into_iter();
    let (best_ns, placement) = starts.next()?;
    // The last start is mostly the best.
    if state.total_ns() != best_ns || state.placement != placement {
        state = State::restore(problem, &placement);
    }
    let is_near = |ns: u64| ns <= best_ns + best_ns / OTHER_DIVISOR;
    let rest: Vec<(u64, Placement)> = starts.collect();
    // Pipelines that share all items never wait for a part of their group, which small changes do not reach.
    let alike = rest.iter().position(|(_, own)| problem.pipeline.is_some() && own.is_alike());
    let others = rest.into_iter().enumerate();
    let others = others.filter(|(at, (ns, _))| (*at < OTHERS && is_near(*ns)) || Some(*at) == alike);
    Some((state, others.map(|(_, (_, placement))| placement).collect()))
}

/// Puts whole items where they were placed; returns `false` if the problem has no groups of one rank, or a
/// cap is broken.
fn place_whole(state: &mut State<'_>, ranks: &[Vec<Vec<u32>>]) -> bool {
    if state.problem.logs[0] > 0 {
        return false;
    }
    for (rank, slots) in ranks.iter().enumerate() {
        for (slot, items) in slots.iter().enumerate() {
            let spot = Spot { slot: slot as u32, first: rank as u32, log: 0 };
            for &item in items {
                if !state.fits(item as usize, spot) {
                    return false;
                }
                state.insert(item as usize, spot);
            }
        }
    }
    state.recount();
    true
}

/// Returns the best starts with the step times, shortest first; if media divide nearly equally, their places
/// are open, and the times are as if media divided at will.
fn drafts(state: &mut State<'_>, mean_ns: u64, budget: &mut Budget) -> Vec<(u64, Placement, bool)> {
    let problem = state.problem;
    let mut drafts: Vec<(u64, Placement, bool)> = Vec::new();
    let mut compared = 0_u64;
    let groups = (problem.slots * problem.ranks).div_ceil(BLOCK).max(BLOCK);
    for (least_ns, logs) in choices(problem, mean_ns) {
        let is_late = compared > FREE_GROUPS && budget.is_spent();
        if drafts.first().is_some_and(|(best_ns, ..)| least_ns >= *best_ns || is_late) {
            break;
        }
        let own = (problem.items.len() * groups) as u64;
        if compared > FREE_GROUPS {
            budget.spend(own / GROUPS_PER_STEP);
        }
        compared += own;
        state.clear();
        if place(state, &logs) {
            let is_settled = !divides(problem, &logs);
            if is_settled {
                state.settle_media();
            }
            drafts.push((state.total_ns(), state.placement.clone(), is_settled));
            drafts.sort_by_key(|(ns, ..)| *ns);
            let alike = drafts.iter().position(|(_, own, _)| problem.pipeline.is_some() && own.is_alike());
            let mut at = 0;
            drafts.retain(|_| {
                at += 1;
                at <= DRAFTS || Some(at - 1) == alike
            });
        }
    }
    drafts
}

/// Whether no medium is much longer than an equal share in its item.
fn divides(problem: &ContextProblem, logs: &[u8]) -> bool {
    let item = |(item, &log): (usize, &u8)| {
        let media = problem.items[item].media_ns.iter().zip(problem.encoder_ns(item));
        media.into_iter().all(|(media, sum)| {
            let longest = media.iter().copied().max().unwrap_or(0);
            longest <= (sum >> log).saturating_mul(LONG_SHARE)
        })
    };
    logs.iter().enumerate().filter(|(_, log)| **log > 0).all(item)
}

/// Chooses the number of ranks of every item: the least whose time is within a limit, for several limits, and
/// the same for all items. Returns each choice once with a time that no placement is below, shortest first.
fn choices(problem: &ContextProblem, mean_ns: u64) -> Vec<(u64, Vec<u8>)> {
    let times: Vec<Vec<(u8, u64)>> =
        (0..problem.items.len()).map(|item| alone_times(problem, item)).collect();
    let limits = LIMITS_PERCENT.map(|percent| (u128::from(mean_ns) * u128::from(percent) / 100) as u64);
    let within = |limit_ns: u64| -> Option<Vec<u8>> {
        let choose = |times: &Vec<(u8, u64)>| {
            // The shortest slice, if all are over the limit: splitting further may lengthen it.
            let shortest = times.iter().min_by_key(|(_, ns)| *ns)?.0;
            let within = times.iter().find(|(_, ns)| *ns <= limit_ns).map(|(log, _)| *log);
            Some(within.unwrap_or(shortest).min(shortest))
        };
        times.iter().map(choose).collect()
    };
    let alike = |degree: u8| -> Option<Vec<u8>> {
        let nearest =
            |times: &Vec<(u8, u64)>| times.iter().map(|(log, _)| *log).min_by_key(|log| log.abs_diff(degree));
        times.iter().map(nearest).collect()
    };
    let degrees = (problem.logs[0]..=problem.logs[1]).filter_map(alike);
    let mut choices: Vec<(u64, Vec<u8>)> = Vec::new();
    for logs in limits.into_iter().filter_map(within).chain(degrees) {
        if choices.iter().all(|(_, known)| *known != logs) {
            choices.push((least_ns(problem, &logs), logs));
        }
    }
    choices.sort_by_key(|(least_ns, _)| *least_ns);
    choices
}

/// Returns the group sizes that an item may have, with the time of a group that has nothing else.
fn alone_times(problem: &ContextProblem, item: usize) -> Vec<(u8, u64)> {
    let time = |log: u8| {
        let slice = problem.slice(item, log);
        let wait_ns = if log > 0 { problem.wait_ns(log, slice.message_ns) } else { 0 };
        let encoders_ns = problem.encoder_ns(item).iter().map(|ns| ns >> log);
        (log, problem.combined_ns(slice.ns + wait_ns, encoders_ns))
    };
    problem.item_logs(item).map(time).collect()
}

/// Returns the mean work of a rank without messages that may be hidden, or the longest slice.
fn least_ns(problem: &ContextProblem, logs: &[u8]) -> u64 {
    let (mut work_ns, mut longest_ns) = (0_u64, 0_u64);
    for (item, &log) in logs.iter().enumerate() {
        let ns = problem.slice(item, log).ns;
        work_ns = work_ns.saturating_add(ns << log);
        longest_ns = longest_ns.max(ns);
        // Encoders are stages of their own in a pipeline.
        if problem.pipeline.is_none() {
            work_ns = work_ns.saturating_add(problem.encoder_ns(item).iter().sum());
        }
    }
    longest_ns.max(work_ns / problem.ranks as u64)
}

/// Places items on groups of given sizes, as if media divided at will; returns `false` if an item does not
/// fit anywhere.
fn place(state: &mut State<'_>, logs: &[u8]) -> bool {
    let problem = state.problem;
    let time_ns = |item: usize| -> u64 {
        let encoder_ns: u64 = problem.encoder_ns(item).iter().sum();
        problem.slice(item, logs[item]).ns + (encoder_ns >> logs[item])
    };
    let mut items: Vec<(Reverse<u8>, Reverse<u64>, usize)> =
        (0..logs.len()).map(|item| (Reverse(logs[item]), Reverse(time_ns(item)), item)).collect();
    items.sort_unstable();
    let mut work = GroupWork::new(problem);
    for (_, _, item) in items {
        let Some(spot) = work.lightest(state, item, logs[item]) else { return false };
        state.insert_shares(item, spot);
        work.update(state, spot);
    }
    if problem.fills() && !fill(state) {
        return false;
    }
    if problem.pipeline.is_some() {
        put_small_slots_at_ends(state);
    }
    state.recount();
    true
}

/// Orders slots of pipelines so that fill and drain are short.
fn put_small_slots_at_ends(state: &mut State<'_>) {
    let problem = state.problem;
    let largest =
        |slot| (0..problem.ranks).map(|rank| state.load_ns(state.bin(slot, rank))).max().unwrap_or(0);
    let order = peak_order(&(0..problem.slots).map(largest).collect::<Vec<u64>>());
    let mut place = vec![0; problem.slots];
    order.into_iter().enumerate().for_each(|(at, slot)| place[slot as usize] = at as u32);
    let spots = state.placement.spots.clone();
    state.clear();
    for (item, spot) in spots.into_iter().enumerate() {
        state.insert_shares(item, Spot { slot: place[spot.slot as usize], ..spot });
    }
}

/// Work of the slowest rank in every possible group: in a slot if slots are to be even; otherwise in all
/// slots.
struct GroupWork {
    /// By group size, as a logarithm.
    levels: Vec<Level>,
}

struct Level {
    /// Groups in a slot.
    slot_groups: usize,
    groups_ns: Vec<u64>,
    /// Least work in every block of groups; `None` if a group has changed.
    blocks: Vec<Option<u64>>,
}

impl Level {
    fn set(&mut self, group: usize, ns: u64) {
        if self.groups_ns[group] != ns {
            self.groups_ns[group] = ns;
            self.blocks[group / BLOCK] = None;
        }
    }

    /// Returns the first group with the least work.
    fn lightest(&mut self) -> Option<usize> {
        for (block, groups) in self.blocks.iter_mut().zip(self.groups_ns.chunks(BLOCK)) {
            if block.is_none() {
                *block = groups.iter().min().copied();
            }
        }
        let (at, least) = self.blocks.iter().enumerate().min_by_key(|(_, least)| **least)?;
        let first = at * BLOCK;
        let groups = self.groups_ns[first..].iter().take(BLOCK);
        groups.clone().position(|ns| Some(*ns) == *least).map(|group| first + group)
    }
}

impl GroupWork {
    fn new(problem: &ContextProblem) -> Self {
        let slots = if problem.balances_slots() { problem.slots } else { 1 };
        let level = |log: u8| {
            let slot_groups = problem.ranks >> log;
            let groups = slots * slot_groups;
            Level { slot_groups, groups_ns: vec![0; groups], blocks: vec![Some(0); groups.div_ceil(BLOCK)] }
        };
        Self { levels: (0..=problem.logs[1]).map(level).collect() }
    }

    /// Finds the group and slot with the least work that have room for an item; of equal ones, the first.
    fn lightest(&mut self, state: &State<'_>, item: usize, log: u8) -> Option<Spot> {
        let level = &mut self.levels[usize::from(log)];
        let lightest = level.lightest()?;
        if let Some(spot) = spot(state, item, log, lightest) {
            return Some(spot);
        }
        let mut groups: Vec<usize> = (0..level.groups_ns.len()).collect();
        groups.sort_by_key(|group| level.groups_ns[*group]);
        groups.into_iter().find_map(|group| spot(state, item, log, group))
    }

    /// Counts the work on a group's ranks anew, after an item was put there.
    fn update(&mut self, state: &State<'_>, spot: Spot) {
        let problem = state.problem;
        let is_apart = !problem.balances_slots();
        let slot = if is_apart { 0 } else { spot.slot as usize };
        for rank in spot.ranks() {
            let ns = if is_apart {
                (0..problem.slots).map(|slot| state.load_ns(state.bin(slot, rank))).sum()
            } else {
                state.load_ns(state.bin(slot, rank))
            };
            self.levels[0].set(slot * problem.ranks + rank, ns);
        }
        let (mut first, mut end) = (spot.first as usize, spot.ranks().end);
        for log in 1..self.levels.len() {
            let [inner, own] = [log - 1, log].map(|log| slot * self.levels[log].slot_groups);
            (first, end) = (first / 2, end.div_ceil(2).min(self.levels[log].slot_groups));
            for group in first..end {
                let parts = &self.levels[log - 1].groups_ns[inner + 2 * group..inner + 2 * group + 2];
                let ns = parts[0].max(parts[1]);
                self.levels[log].set(own + group, ns);
            }
        }
    }
}

/// Returns the place of an item in a group, if it has room: in the first slot for groups that meet at the end
/// of the step, before ranks drift apart, and in the slot with the fewest items for single ranks.
fn spot(state: &State<'_>, item: usize, log: u8, group: usize) -> Option<Spot> {
    let problem = state.problem;
    let groups = problem.ranks >> log;
    let place = |slot: usize| Spot { slot: slot as u32, first: ((group % groups) << log) as u32, log };
    if problem.balances_slots() {
        return Some(place(group / groups)).filter(|spot| state.fits(item, *spot));
    }
    let fitting = (0..problem.slots).map(place).filter(|spot| state.fits(item, *spot));
    let members = |spot: &Spot| state.members[state.bin(spot.slot as usize, spot.first as usize)].len();
    if log > 0 { fitting.min_by_key(|spot| spot.slot) } else { fitting.min_by_key(members) }
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
