//! Assigns items to groups of ranks that meet in every layer, as the shard groups of HSDP do.
//!
//! The ranks in a group share the model's parameters and run in lockstep. Groups hold a copy of the model
//! each and wait for each other only at the end of the step, so the step takes the slowest group's time.
//! Groups of one rank are plain data parallelism; a group of all ranks is FSDP.
//!
//! Simulates their steps with communication. Layouts differ in where ranks wait for each other: at the end of
//! the step (DDP, `ZeRO-1`), at the end of every microbatch (`ZeRO-2`), or in every module (FSDP), the latter
//! two inside shard groups.

use std::num::NonZeroUsize;

use super::balance::PipelineAssignment;
use super::lockstep::{balance_lockstep, bound_from_mean, lockstep_ns};
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::instance::{Caps, Instance};
use crate::partition::{self, LowerBound, Problem, Strategy};
use dflop_costmodel::{ModuleTraffic, RankLayout, Sharding};

/// Items by rank and microbatch.
type Ranks = Vec<Vec<Vec<u32>>>;

/// Returns the time of a step whose ranks meet in every module within groups, in nanoseconds: the slowest
/// group's [`lockstep_ns`].
///
/// - `ranks_ns`: time by rank, slot and module
/// - `shard_ranks`: number of consecutive ranks in a group; the last group may have fewer
#[must_use]
pub fn shard_groups_ns(ranks_ns: &[Vec<Vec<u64>>], shard_ranks: NonZeroUsize) -> u64 {
    ranks_ns.chunks(shard_ranks.get()).map(lockstep_ns).max().unwrap_or(0)
}

/// Partitions an instance into microbatches for groups of ranks that run in lockstep.
///
/// Items are divided among the groups by total time, longest first; then each group is balanced like
/// [`balance_lockstep`], with an equal part of the budget. If a group cannot fill its microbatches within the
/// caps, all ranks are balanced together. Pure and deterministic like [`balance`](crate::balance).
///
/// - `shard_ranks`: number of consecutive ranks in a group
///
/// # Errors
/// [`Error::Config`] if `shard_ranks` does not divide `dp_size`; the errors of [`balance_lockstep`].
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use dflop_balancer::{Budget, Caps, Instance, balance_shard_groups};
///
/// // four ranks in two groups, with two items each
/// let instance = Instance::new(4, 1, vec![1, 2, 3, 4, 5, 6, 7, 8])?;
/// let ranks = NonZeroUsize::new(2).expect("above 0");
/// let found = balance_shard_groups(&instance, 4, ranks, &Caps::default(), &mut Budget::work(1_000))?;
/// assert_eq!((found.makespan_ns, found.bound.ns), (9, 9));
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn balance_shard_groups(
    instance: &Instance,
    dp_size: usize,
    shard_ranks: NonZeroUsize,
    caps: &Caps,
    budget: &mut Budget,
) -> Result<PipelineAssignment> {
    if !dp_size.is_multiple_of(shard_ranks.get()) {
        let reason = format!("must divide the {dp_size} ranks, got {shard_ranks}");
        return Err(Error::Config { setting: "shard_ranks", reason });
    }
    if shard_ranks.get() == dp_size || dp_size == 0 || !instance.groups().is_multiple_of(dp_size) {
        return balance_lockstep(instance, dp_size, caps, budget);
    }
    let work_before = budget.work_spent();
    let ranks = match balance_apart(instance, dp_size, shard_ranks, caps, budget) {
        Err(
            Error::TooFewItems { .. }
            | Error::CapItem { .. }
            | Error::CapTotal { .. }
            | Error::CapUnmet { .. },
        ) => balance_lockstep(instance, dp_size, caps, budget)?.ranks,
        ranks => ranks?,
    };
    let times_ns = times_ns(instance, &ranks);
    let group_ns = times_ns.chunks(shard_ranks.get()).map(lockstep_ns);
    let ranks_ns: Vec<u64> = group_ns.flat_map(|ns| std::iter::repeat_n(ns, shard_ranks.get())).collect();
    Ok(PipelineAssignment {
        ranks,
        makespan_ns: ranks_ns.iter().copied().max().unwrap_or(0),
        ranks_ns,
        memory_excess: 0,
        bound: bound(instance, dp_size),
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
}

/// Divides the items among the groups and balances each group.
fn balance_apart(
    instance: &Instance,
    dp_size: usize,
    shard_ranks: NonZeroUsize,
    caps: &Caps,
    budget: &mut Budget,
) -> Result<Ranks> {
    let groups = dp_size / shard_ranks.get();
    let mut ranks = Vec::with_capacity(dp_size);
    for (group, items) in divide(instance, groups, caps)?.into_iter().enumerate() {
        let part = part(instance, &items, instance.groups() / groups)?;
        let steps = budget.steps_left() / (groups - group) as u64;
        let found =
            budget.within(steps, |budget| balance_lockstep(&part, shard_ranks.get(), caps, budget))?;
        let renamed =
            |places: &Vec<u32>| -> Vec<u32> { places.iter().map(|place| items[*place as usize]).collect() };
        let rank =
            |microbatches: &Vec<Vec<u32>>| -> Vec<Vec<u32>> { microbatches.iter().map(renamed).collect() };
        ranks.extend(found.ranks.iter().map(rank));
    }
    Ok(ranks)
}

/// Divides the items among groups by total time, longest first; returns every group's items, ascending.
fn divide(instance: &Instance, groups: usize, caps: &Caps) -> Result<Vec<Vec<u32>>> {
    let total_ns = |item: u32| instance.times_ns(item).iter().copied().fold(0, u64::saturating_add);
    let totals_ns = (0..instance.items() as u32).map(total_ns).collect();
    let [(_, tokens), (_, bytes)] = instance.capped_columns();
    let mut whole = Instance::new(groups, 1, totals_ns)?;
    if let Some(tokens) = tokens {
        whole = whole.tokens(tokens.to_vec())?;
    }
    if let Some(bytes) = bytes {
        whole = whole.bytes(bytes.to_vec())?;
    }
    let microbatches = (instance.groups() / groups) as u64;
    let group_max = |max: Option<u64>| max.map(|max| max.saturating_mul(microbatches));
    let caps = Caps { tokens_max: group_max(caps.tokens_max), bytes_max: group_max(caps.bytes_max) };
    let problem = Problem::new(&whole, &caps)?;
    let divided = partition::assign(&problem, Strategy::MULTI_LPT, &mut Budget::work(0))?;
    Ok(divided.into_groups())
}

/// Creates the partition problem for some of the items.
fn part(instance: &Instance, items: &[u32], groups: usize) -> Result<Instance> {
    let times_ns = items.iter().flat_map(|item| instance.times_ns(*item)).copied().collect();
    let mut part = Instance::new(groups, instance.modules(), times_ns)?.like(instance)?;
    let selected = |column: &[u64]| items.iter().map(|item| column[*item as usize]).collect::<Vec<u64>>();
    let [(_, tokens), (_, bytes)] = instance.capped_columns();
    if let Some(tokens) = tokens {
        part = part.tokens(selected(tokens))?;
    }
    if let Some(bytes) = bytes {
        part = part.bytes(selected(bytes))?;
    }
    Ok(part)
}

/// Returns the time by rank, slot and module, nanoseconds.
fn times_ns(instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Vec<Vec<Vec<u64>>> {
    let microbatch = |items: &Vec<u32>| {
        let load_ns = instance.load_ns(items).into_iter().enumerate();
        load_ns.map(|(module, ns)| instance.microbatch_ns(module, ns)).collect()
    };
    ranks.iter().map(|rank| rank.iter().map(microbatch).collect()).collect()
}

/// Returns the mean rank's time, or the longest item's: the slowest group takes at least the mean group's
/// time.
fn bound(instance: &Instance, dp_size: usize) -> LowerBound {
    let all_ns = instance.rows_ns().iter().copied().fold(0, u64::saturating_add);
    bound_from_mean(instance, all_ns.div_ceil(dp_size as u64))
}

/// Simulated step of data-parallel ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankStep {
    /// Nanoseconds until the slowest shard group has computed all microbatches, without communication.
    pub compute_ns: u64,
    /// Seconds by which communication lengthens the step.
    pub exposed_seconds: f64,
}

impl RankStep {
    /// Returns the step time with communication, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.compute_ns as f64 / 1e9 + self.exposed_seconds
    }
}

/// Simulates a step.
///
/// In every microbatch and module, the ranks in a shard group wait as long as communication takes longer than
/// the slowest rank computes.
///
/// - `ranks_ns`: time by rank, microbatch and module
/// - `traffic`: communication by module; empty if communication is free
///
/// # Examples
/// ```
/// use dflop_balancer::rank_step;
/// use dflop_costmodel::{RankLayout, Sharding};
///
/// // two ranks with two microbatches each; an encoder and an LLM
/// let ranks_ns = vec![vec![vec![3, 1], vec![2, 2]], vec![vec![1, 4], vec![1, 2]]];
/// let ddp = RankLayout::replicated(2, 8);
/// let step_ns = |sharding| rank_step(&ranks_ns, ddp.sharded(sharding, 2), &[]).compute_ns;
/// assert_eq!(step_ns(Sharding::Optimizer), 8);
/// assert_eq!(step_ns(Sharding::Gradients), 5 + 4);
/// assert_eq!(step_ns(Sharding::Parameters), 3 + 4 + 2 + 2);
/// ```
#[must_use]
pub fn rank_step(ranks_ns: &[Vec<Vec<u64>>], layout: RankLayout, traffic: &[ModuleTraffic]) -> RankStep {
    let group_ranks = if layout.sharding.meets_in_microbatches() { layout.shard_ranks.max(1) } else { 1 };
    let mut compute_ns = 0;
    let mut seconds = 0.0_f64;
    for group in ranks_ns.chunks(group_ranks as usize) {
        let group_ns = group_ns(group, layout.sharding);
        compute_ns = compute_ns.max(group_ns);
        seconds = seconds.max(group_ns as f64 / 1e9 + waits_seconds(group, traffic));
    }
    let after_update: f64 = traffic.iter().map(ModuleTraffic::after_update_seconds).sum();
    let exposed_seconds = (seconds - compute_ns as f64 / 1e9).max(0.0) + after_update;
    RankStep { compute_ns, exposed_seconds }
}

/// Returns the time in which ranks that wait for each other compute all microbatches.
fn group_ns(group: &[Vec<Vec<u64>>], sharding: Sharding) -> u64 {
    if sharding != Sharding::Gradients {
        // A rank that meets no other rank in layers is a group for itself.
        return lockstep_ns(group);
    }
    let serial_ns = |modules: &Vec<u64>| modules.iter().copied().fold(0, u64::saturating_add);
    let slowest_ns = |slot: usize| group.iter().filter_map(|rank| rank.get(slot)).map(serial_ns).max();
    let slots = group.iter().map(Vec::len).max().unwrap_or(0);
    (0..slots).filter_map(slowest_ns).fold(0, u64::saturating_add)
}

/// Returns the seconds in which ranks that wait for each other wait for communication in passes.
fn waits_seconds(group: &[Vec<Vec<u64>>], traffic: &[ModuleTraffic]) -> f64 {
    let slots = group.iter().map(Vec::len).max().unwrap_or(0);
    let mut seconds = 0.0;
    for slot in 0..slots {
        for (module, traffic) in traffic.iter().enumerate() {
            let ranks = group.iter().filter_map(|rank| rank.get(slot)?.get(module));
            let slowest_ns = ranks.max().copied().unwrap_or(0);
            seconds += traffic.exposed_seconds(slowest_ns as f64 / 1e9, [slot, slots]);
        }
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::Module;
    use dflop_costmodel::random::SplitMix64;

    fn instance(groups: usize, items: usize, seed: u64) -> Instance {
        let mut random = SplitMix64::new(seed);
        Instance::new(groups, 2, (0..2 * items).map(|_| random.below(100) as u64 + 1).collect()).unwrap()
    }

    fn balanced(instance: &Instance, dp_size: usize, shard_ranks: usize) -> PipelineAssignment {
        let (ranks, caps) = (NonZeroUsize::new(shard_ranks).unwrap(), Caps::default());
        balance_shard_groups(instance, dp_size, ranks, &caps, &mut Budget::work(20_000)).unwrap()
    }

    #[test]
    fn larger_groups_wait_longer_for_the_same_plan() {
        for seed in 0..20 {
            let instance = instance(16, 40, seed);
            let times_ns = times_ns(&instance, &balanced(&instance, 8, 2).ranks);
            let step_ns = |ranks| shard_groups_ns(&times_ns, NonZeroUsize::new(ranks).unwrap());
            let steps = [1, 2, 4, 8].map(step_ns);
            assert!(steps.is_sorted(), "{steps:?}");
            assert_eq!(steps[3], lockstep_ns(&times_ns));
        }
    }

    #[test]
    fn one_group_is_lockstep_and_more_groups_hold_every_item_once() {
        let instance = instance(16, 200, 3);
        let caps = Caps::default();
        let whole = balance_lockstep(&instance, 8, &caps, &mut Budget::work(20_000)).unwrap();
        assert_eq!(balanced(&instance, 8, 8), whole);
        for shard_ranks in [1, 2, 4] {
            let found = balanced(&instance, 8, shard_ranks);
            let mut items: Vec<u32> = found.ranks.iter().flatten().flatten().copied().collect();
            items.sort_unstable();
            assert_eq!(items, (0..200).collect::<Vec<u32>>());
            assert!(found.ranks.len() == 8 && found.ranks.iter().all(|rank| rank.len() == 2));
            assert!(found.ranks.iter().flatten().all(|items| items.is_sorted() && !items.is_empty()));
            let step_ns =
                shard_groups_ns(&times_ns(&instance, &found.ranks), NonZeroUsize::new(shard_ranks).unwrap());
            assert_eq!(found.makespan_ns, step_ns);
            assert!(found.bound.ns <= step_ns && found.gap() < 0.05, "{shard_ranks}: {}", found.gap());
        }
    }

    /// One long item would leave its group without an item for the second rank.
    #[test]
    fn groups_without_enough_items_are_balanced_together() {
        let instance = Instance::new(4, 1, vec![100, 1, 1, 1, 1]).unwrap();
        let found = balanced(&instance, 4, 2);
        assert!(found.ranks.iter().flatten().all(|items| !items.is_empty()), "{:?}", found.ranks);
        assert_eq!(found.makespan_ns, 100);
    }

    #[test]
    fn caps_hold_and_groups_that_do_not_divide_the_ranks_are_refused() {
        let instance = instance(8, 24, 5).tokens((1..=24).collect()).unwrap();
        let caps = Caps { tokens_max: Some(45), ..Caps::default() };
        let balance = |ranks| {
            let ranks = NonZeroUsize::new(ranks).unwrap();
            balance_shard_groups(&instance, 4, ranks, &caps, &mut Budget::work(2_000))
        };
        let tokens = |items: &Vec<u32>| items.iter().map(|item| item + 1).sum::<u32>();
        assert!(balance(2).unwrap().ranks.iter().flatten().all(|items| tokens(items) <= 45));
        assert!(matches!(balance(3), Err(Error::Config { setting: "shard_ranks", .. })));
    }

    const SECOND: u64 = 1_000_000_000;

    fn traffic(sharding: Sharding, seconds: f64) -> ModuleTraffic {
        ModuleTraffic {
            module: Module::Llm,
            sharding,
            gathered_bytes: 1,
            scattered_bytes: 1,
            gather_seconds: seconds,
            scatter_seconds: seconds,
            sum_seconds: 0.0,
        }
    }

    fn exposed(ranks_ns: &[Vec<Vec<u64>>], sharding: Sharding, seconds: [f64; 2]) -> f64 {
        let layout = RankLayout::replicated(2, 8).sharded(sharding, 2);
        rank_step(ranks_ns, layout, &seconds.map(|seconds| traffic(sharding, seconds))).exposed_seconds
    }

    #[test]
    fn ranks_wait_where_communication_takes_longer_than_the_slowest_rank() {
        // Slots of 3 s in the first module and 6 s in the second; gathers of 1 s are hidden.
        let ranks = vec![vec![vec![3 * SECOND, SECOND]; 2], vec![vec![SECOND, 6 * SECOND]; 2]];
        let fsdp = |seconds| exposed(&ranks, Sharding::Parameters, seconds);
        assert!(fsdp([1.0, 1.0]).abs() < 1e-9);
        // The first module hides 1 s of a gather and 2 s of a gather with gradients.
        let waits = fsdp([1.5, 1.0]);
        assert!((waits - 2.0 * (0.5 + 1.0)).abs() < 1e-9, "{waits}");
        // One gather in the first forward pass is too long; the gradients fit beside every backward pass.
        let waits = exposed(&ranks, Sharding::Gradients, [1.5, 1.0]);
        assert!((waits - 0.5).abs() < 1e-9, "{waits}");
        // Gathers after the update are exposed, and gradients as far as the slower rank does not hide them.
        let waits = exposed(&ranks, Sharding::Optimizer, [1.5, 1.0]);
        assert!((waits - (1.5 + 1.0 + 1.5 - 2.0 / 3.0)).abs() < 1e-9, "{waits}");
    }

    #[test]
    fn ranks_that_meet_more_often_take_longer() {
        for seed in 0..50 {
            let mut random = SplitMix64::new(seed);
            let mut microbatch = || (0..3).map(|_| random.below(1000) as u64).collect::<Vec<u64>>();
            let mut rank = || (0..4).map(|_| microbatch()).collect::<Vec<_>>();
            let ranks: Vec<Vec<Vec<u64>>> = (0..8).map(|_| rank()).collect();
            let ddp = RankLayout::replicated(8, 8);
            let step_ns = |sharding, size| rank_step(&ranks, ddp.sharded(sharding, size), &[]).compute_ns;
            let stages = [Sharding::Nothing, Sharding::Gradients, Sharding::Parameters];
            let seconds = stages.map(|sharding| step_ns(sharding, 8));
            assert!(seconds.is_sorted(), "{seconds:?}");
            assert_eq!(step_ns(Sharding::Optimizer, 8), seconds[0]);
            for size in [2_u32, 4, 8] {
                let group = NonZeroUsize::new(size as usize).unwrap();
                assert_eq!(step_ns(Sharding::Parameters, size), shard_groups_ns(&ranks, group));
                assert!(step_ns(Sharding::Gradients, size) <= step_ns(Sharding::Parameters, size));
            }
        }
    }
}
