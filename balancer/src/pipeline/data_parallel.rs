//! Simulates a step of data-parallel ranks that run a whole model each, with communication.
//!
//! Layouts differ in where ranks wait for each other: at the end of the step (DDP, `ZeRO-1`), at the end of
//! every microbatch (`ZeRO-2`), or in every module (FSDP), the latter two inside shard groups.

use super::lockstep::lockstep_ns;
use dflop_costmodel::{ModuleTraffic, RankLayout, Sharding};

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
    use crate::pipeline::shard_groups::shard_groups_ns;
    use dflop_costmodel::Module;
    use dflop_costmodel::random::SplitMix64;
    use std::num::NonZeroUsize;

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
