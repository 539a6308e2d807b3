//! Assigns items to ranks that meet in every layer of every module, as the ranks of FSDP and `ZeRO-3` do.
//!
//! No rank enters a module before all ranks have left the module before it, so a microbatch takes, module by
//! module, the slowest rank's time: an item with a long encoder time is no better on a rank with little LLM
//! work. The step is the sum over the microbatches in turn (*slots*).

use super::balance::PipelineAssignment;
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::instance::{Caps, Instance};
use crate::partition::{self, BoundKind, LowerBound, Partition, Problem, Strategy};
use dflop_costmodel::random::SplitMix64;
use std::cmp::Reverse;

/// Number of slowest ranks kept per slot and module: a change of two ranks leaves at least one known.
const KEPT: usize = 3;
/// Divisor of the mean item for the first threshold below which a change for the worse is accepted.
const THRESHOLD_DIVISOR: u64 = 4;
/// Elementary steps per tried change.
const STEPS_PER_CHANGE: u64 = 4;

/// Returns the time of a step whose ranks meet in every module, in nanoseconds.
///
/// - `ranks_ns`: time by rank, slot and module
#[must_use]
pub fn lockstep_ns(ranks_ns: &[Vec<Vec<u64>>]) -> u64 {
    let slots = ranks_ns.iter().map(Vec::len).max().unwrap_or(0);
    let of_slot = |slot: usize| {
        let ranks = || ranks_ns.iter().filter_map(move |rank| rank.get(slot));
        let modules = ranks().map(Vec::len).max().unwrap_or(0);
        let slowest = |module: usize| ranks().filter_map(|rank| rank.get(module)).max().copied().unwrap_or(0);
        (0..modules).map(slowest).fold(0, u64::saturating_add)
    };
    (0..slots).map(of_slot).fold(0, u64::saturating_add)
}

/// Partitions an instance into microbatches whose modules are balanced each for itself, slot by slot.
///
/// Items move and change places between all microbatches, as long as [`lockstep_ns`] falls; early in the
/// search small rises are accepted. Pure and deterministic like [`balance`](crate::balance), and caps hold
/// for every microbatch.
///
/// # Errors
/// [`Error::Config`] if `dp_size` does not divide the number of groups; the errors of
/// [`balance`](crate::balance).
///
/// # Examples
/// ```
/// use dflop_balancer::{Budget, Caps, Instance, balance_lockstep};
///
/// // equal sums on both ranks are not enough: 9 + 9 of the slowest against 5 + 5
/// let instance = Instance::new(2, 2, vec![9, 1, 1, 9, 4, 4, 4, 4])?;
/// let found = balance_lockstep(&instance, 2, &Caps::default(), &mut Budget::work(1_000))?;
/// assert_eq!(found.makespan_ns, 20);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn balance_lockstep(
    instance: &Instance,
    dp_size: usize,
    caps: &Caps,
    budget: &mut Budget,
) -> Result<PipelineAssignment> {
    if dp_size == 0 || !instance.groups().is_multiple_of(dp_size) {
        let reason = format!("must divide the number of groups, {}, got {dp_size}", instance.groups());
        return Err(Error::Config { setting: "dp_size", reason });
    }
    let problem = Problem::new(instance, caps)?;
    let work_before = budget.work_spent();
    let mut start = partition::assign(&problem, Strategy::MULTI_LPT, budget)?.into_groups();
    let length = |group: &Vec<u32>| instance.load_ns(group).into_iter().fold(0, u64::saturating_add);
    // Microbatches of like length run at the same time.
    start.sort_by_cached_key(|group| Reverse(length(group)));
    let mut state = Lockstep::new(&problem, start, dp_size);
    let bound = bound(instance, dp_size);
    state.search(bound.ns, budget);
    let makespan_ns = state.total_ns();
    let groups = state.partition.into_groups();
    let rank = |rank: usize| groups.iter().skip(rank).step_by(dp_size).cloned().collect();
    Ok(PipelineAssignment {
        ranks: (0..dp_size).map(rank).collect(),
        // Ranks meet all the time, so all take as long.
        ranks_ns: vec![makespan_ns; dp_size],
        makespan_ns,
        memory_excess: 0,
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
}

/// Returns the mean rank's time in all modules, or the longest item's: no slot is shorter than either.
fn bound(instance: &Instance, dp_size: usize) -> LowerBound {
    let mean =
        |module: usize| instance.module_ns(module).fold(0, u64::saturating_add).div_ceil(dp_size as u64);
    bound_from_mean(instance, (0..instance.modules()).map(mean).fold(0, u64::saturating_add))
}

/// Returns a bound on the mean rank's time, or the longest item's time if that is longer.
pub(super) fn bound_from_mean(instance: &Instance, mean_ns: u64) -> LowerBound {
    let items = 0..instance.items() as u32;
    let longest_ns = items.map(|item| instance.times_ns(item).iter().sum::<u64>()).max().unwrap_or(0);
    if longest_ns > mean_ns {
        LowerBound { ns: longest_ns, kind: BoundKind::LargestItem }
    } else {
        LowerBound { ns: mean_ns, kind: BoundKind::MeanLoad }
    }
}

/// Microbatches of all ranks, `[slots * dp_size]`, with the slowest ranks of every slot and module.
struct Lockstep<'a> {
    problem: &'a Problem<'a>,
    partition: Partition,
    dp_size: usize,
    /// Slowest ranks with their times, `[slots * modules]`, the slowest first.
    slowest: Vec<[(u64, usize); KEPT]>,
}

/// A change: an item goes to another group, in exchange for an item or for none.
#[derive(Clone, Copy)]
struct Change {
    groups: [usize; 2],
    /// Position of the item in its group.
    places: [Option<usize>; 2],
}

impl<'a> Lockstep<'a> {
    fn new(problem: &'a Problem<'a>, groups: Vec<Vec<u32>>, dp_size: usize) -> Self {
        let slots = groups.len() / dp_size;
        let partition = Partition::from_groups(problem, groups);
        let slowest = vec![[(0, usize::MAX); KEPT]; slots * problem.modules];
        let mut state = Self { problem, partition, dp_size, slowest };
        (0..slots).for_each(|slot| state.rank_slot(slot));
        state
    }

    /// Finds the slowest ranks in a slot; of equally slow ones, the first.
    fn rank_slot(&mut self, slot: usize) {
        for module in 0..self.problem.modules {
            self.slowest[slot * self.problem.modules + module] = self.slowest_ranks(slot, module);
        }
    }

    fn slowest_ranks(&self, slot: usize, module: usize) -> [(u64, usize); KEPT] {
        let mut kept = [(0, usize::MAX); KEPT];
        for rank in 0..self.dp_size {
            let ns = self.time_ns(slot * self.dp_size + rank, module, 0);
            if let Some(at) = kept.iter().position(|(known, of)| *of == usize::MAX || ns > *known) {
                kept[at..].rotate_right(1);
                kept[at] = (ns, rank);
            }
        }
        kept
    }

    /// Updates the slowest ranks in a slot after a change of one group.
    fn rank_group(&mut self, group: usize) {
        let (slot, rank) = (group / self.dp_size, group % self.dp_size);
        for module in 0..self.problem.modules {
            let ns = self.time_ns(group, module, 0);
            let kept = &mut self.slowest[slot * self.problem.modules + module];
            let key = |(ns, rank): (u64, usize)| (Reverse(ns), rank);
            let (known, last) = (kept.iter().position(|(_, of)| *of == rank), kept[KEPT - 1]);
            match known {
                // Ranks that are not kept may be slower now.
                Some(_) if key((ns, rank)) > key(last) => {
                    self.slowest[slot * self.problem.modules + module] = self.slowest_ranks(slot, module);
                }
                Some(at) => {
                    kept[at].0 = ns;
                    kept.sort_unstable_by_key(|entry| key(*entry));
                }
                None if key((ns, rank)) < key(last) => {
                    kept[KEPT - 1] = (ns, rank);
                    kept.sort_unstable_by_key(|entry| key(*entry));
                }
                None => {}
            }
        }
    }

    /// Returns a group's time in a module after a change of its load.
    fn time_ns(&self, group: usize, module: usize, change: i64) -> u64 {
        let load = self.partition.load(self.problem, group)[module];
        self.problem.microbatch_ns(module, load.saturating_add_signed(change))
    }

    /// Returns the step time.
    fn total_ns(&self) -> u64 {
        self.slowest.iter().map(|kept| kept[0].0).fold(0, u64::saturating_add)
    }

    fn item(&self, change: Change, side: usize) -> Option<u32> {
        change.places[side].map(|place| self.partition.groups[change.groups[side]][place])
    }

    /// Returns by how much a change lengthens the step; `None` if it breaks a cap.
    fn difference(&self, change: Change) -> Option<i64> {
        let empty = &[0; 0][..];
        let rows = [0, 1].map(|side| self.item(change, side).map_or(empty, |item| self.problem.row(item)));
        let column = |side: usize, at: usize| rows[side].get(at).copied().unwrap_or(0);
        if self.problem.has_caps() {
            for side in [0, 1] {
                let load = self.partition.load(self.problem, change.groups[side]);
                let columns = self.problem.modules..self.problem.width();
                let after = |at: usize| load[at] - column(side, at) + column(1 - side, at);
                if columns.clone().any(|at| after(at) > self.problem.limits[at]) {
                    return None;
                }
            }
        }
        let slots = change.groups.map(|group| group / self.dp_size);
        let mut difference = 0_i64;
        for module in 0..self.problem.modules {
            let gained = column(1, module) as i64 - column(0, module) as i64;
            if gained == 0 {
                continue;
            }
            let ns = [
                self.time_ns(change.groups[0], module, gained),
                self.time_ns(change.groups[1], module, -gained),
            ];
            if slots[0] == slots[1] {
                let ranks = change.groups.map(|group| group % self.dp_size);
                difference += self.rise(slots[0], module, &ranks, ns[0].max(ns[1]));
            } else {
                for side in [0, 1] {
                    let rank = change.groups[side] % self.dp_size;
                    difference += self.rise(slots[side], module, &[rank], ns[side]);
                }
            }
        }
        Some(difference)
    }

    /// Returns by how much a slot's time in a module rises if the longest of some ranks takes `ns`.
    fn rise(&self, slot: usize, module: usize, ranks: &[usize], ns: u64) -> i64 {
        let kept = &self.slowest[slot * self.problem.modules + module];
        let other = kept.iter().find(|(_, rank)| !ranks.contains(rank)).map_or(0, |(ns, _)| *ns);
        other.max(ns) as i64 - kept[0].0 as i64
    }

    fn apply(&mut self, change: Change) {
        let taken = [0, 1].map(|side| {
            let place = change.places[side]?;
            Some(self.partition.take(self.problem, change.groups[side], place))
        });
        for side in [0, 1] {
            if let Some(item) = taken[side] {
                self.partition.add(self.problem, change.groups[1 - side], item);
            }
        }
        change.groups.into_iter().for_each(|group| self.rank_group(group));
    }

    /// Changes places of items until the budget is spent or the bound is met; keeps the best.
    fn search(&mut self, bound_ns: u64, budget: &mut Budget) {
        let groups = self.partition.groups.len();
        if groups < 2 || self.problem.items == 0 {
            return;
        }
        let mut random = SplitMix64::new(self.problem.seed);
        let mean_ns = self.total_ns() / self.problem.items.div_ceil(self.dp_size) as u64;
        let (budget_steps, first) = (budget.steps_left(), mean_ns / THRESHOLD_DIVISOR);
        let mut now_ns = self.total_ns();
        let mut best = (now_ns, self.partition.clone());
        while now_ns > bound_ns && !budget.is_spent() {
            budget.spend(STEPS_PER_CHANGE);
            let change = self.draw(&mut random, groups);
            let Some(difference) = change.and_then(|change| self.difference(change)) else { continue };
            // The threshold falls to zero over two thirds of the search, exactly and alike on every machine.
            let left = u128::from(budget.steps_left()) * 3 / 2;
            let share = left.saturating_sub(u128::from(budget_steps) / 2);
            let threshold = u128::from(first) * share / u128::from(budget_steps.max(1));
            if i128::from(difference) > threshold as i128 {
                continue;
            }
            if let Some(change) = change {
                self.apply(change);
            }
            now_ns = now_ns.saturating_add_signed(difference);
            if now_ns < best.0 {
                best = (now_ns, self.partition.clone());
            }
        }
        if best.0 < now_ns {
            self.partition = best.1;
            (0..groups / self.dp_size).for_each(|slot| self.rank_slot(slot));
        }
    }

    /// Draws a change of a slot's slowest rank, or of any; `None` if it would change nothing.
    fn draw(&self, random: &mut SplitMix64, groups: usize) -> Option<Change> {
        let first = if random.below(2) == 0 {
            let kept = random.below(self.slowest.len());
            kept / self.problem.modules * self.dp_size + self.slowest[kept][0].1
        } else {
            random.below(groups)
        };
        let second = if random.below(2) == 0 {
            first / self.dp_size * self.dp_size + random.below(self.dp_size)
        } else {
            random.below(groups)
        };
        let sizes = [first, second].map(|group| self.partition.groups[group].len());
        if first == second || sizes[0] == 0 {
            return None;
        }
        let place = random.below(sizes[0]);
        let is_exchange = sizes[0] == 1 || random.below(2) == 0;
        let other = (is_exchange && sizes[1] > 0).then(|| random.below(sizes[1].max(1)));
        // No group loses its last item.
        (other.is_some() || sizes[0] > 1)
            .then_some(Change { groups: [first, second], places: [Some(place), other] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> u64 {
        let load = |group: &Vec<u32>| {
            let load = instance.load_ns(group);
            load.into_iter().enumerate().map(|(module, ns)| instance.microbatch_ns(module, ns)).collect()
        };
        let rank = |rank: &Vec<Vec<u32>>| rank.iter().map(load).collect::<Vec<Vec<u64>>>();
        lockstep_ns(&ranks.iter().map(rank).collect::<Vec<_>>())
    }

    /// Every assignment of seven items to two ranks of two microbatches.
    #[test]
    fn small_problems_are_solved() {
        for seed in 0..20 {
            let mut random = SplitMix64::new(seed);
            let times = (0..14).map(|_| random.below(100) as u64 + 1).collect();
            let instance = Instance::new(4, 2, times).unwrap();
            let found = balance_lockstep(&instance, 2, &Caps::default(), &mut Budget::work(20_000)).unwrap();
            let mut best = u64::MAX;
            for code in 0..4_usize.pow(7) {
                let mut ranks = vec![vec![Vec::new(); 2]; 2];
                for item in 0..7 {
                    let group = code / 4_usize.pow(item) % 4;
                    ranks[group % 2][group / 2].push(item);
                }
                if ranks.iter().flatten().all(|group| !group.is_empty()) {
                    best = best.min(total(&instance, &ranks));
                }
            }
            assert_eq!(found.makespan_ns, best, "seed {seed}");
            assert_eq!(total(&instance, &found.ranks), best);
            assert!(found.bound.ns <= best);
        }
    }

    #[test]
    fn the_slowest_ranks_are_known_after_every_change() {
        for (seed, dp_size) in (0..24).zip([1, 2, 3, 4, 7, 12].into_iter().cycle()) {
            let mut random = SplitMix64::new(seed);
            let (slots, items) = (3, 60);
            // Few different times, so that many ranks are equally slow.
            let times = (0..2 * items).map(|_| random.below(6) as u64).collect();
            let instance = Instance::new(slots * dp_size, 2, times).unwrap();
            let caps = Caps::default();
            let problem = Problem::new(&instance, &caps).unwrap();
            let start = partition::assign(&problem, Strategy::MULTI_LPT, &mut Budget::work(0)).unwrap();
            let mut state = Lockstep::new(&problem, start.into_groups(), dp_size);
            for _ in 0..300 {
                if let Some(change) = state.draw(&mut random, slots * dp_size) {
                    state.apply(change);
                }
                for slot in 0..slots {
                    let known = &state.slowest[2 * slot..][..2];
                    assert_eq!(known, [0, 1].map(|module| state.slowest_ranks(slot, module)), "{seed}");
                }
            }
        }
    }

    #[test]
    fn every_item_is_once_in_the_result_and_caps_hold() {
        let mut random = SplitMix64::new(7);
        let times = (0..600).map(|_| random.below(1000) as u64).collect();
        let tokens: Vec<u64> = (0..200).map(|_| random.below(50) as u64 + 1).collect();
        let instance = Instance::new(24, 3, times).unwrap().tokens(tokens.clone()).unwrap();
        let caps = Caps { tokens_max: Some(280), ..Caps::default() };
        let run = || balance_lockstep(&instance, 8, &caps, &mut Budget::work(20_000)).unwrap();
        let found = run();
        assert_eq!(found, run());
        let mut items: Vec<u32> = found.ranks.iter().flatten().flatten().copied().collect();
        items.sort_unstable();
        assert_eq!(items, (0..200).collect::<Vec<u32>>());
        let sum = |group: &Vec<u32>| group.iter().map(|item| tokens[*item as usize]).sum::<u64>();
        assert!(found.ranks.iter().flatten().all(|group| sum(group) <= 280));
        assert_eq!(total(&instance, &found.ranks), found.makespan_ns);
        assert!(found.gap() < 0.03, "{}", found.gap());
    }

    #[test]
    fn ranks_that_do_not_divide_the_groups_are_refused() {
        let instance = Instance::new(4, 1, vec![1; 8]).unwrap();
        for dp_size in [0, 3] {
            let found = balance_lockstep(&instance, dp_size, &Caps::default(), &mut Budget::work(0));
            assert!(matches!(found, Err(Error::Config { setting: "dp_size", .. })));
        }
    }
}
