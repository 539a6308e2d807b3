//! Stage GPU memory and its limit, updated with the slots.
//!
//! A stage holds a window of consecutive microbatches. A limit is checked on each *lane*: a DP rank, or all
//! ranks together if they share the module. A change in two slots alters the windows on at most two lanes per
//! limit; only these are summed again.

use super::{Change, ChangeKind};
use crate::budget::Budget;
use crate::partition::Partition;
use crate::pipeline::config::{PipelineConfig, StageMemoryLimit};
use std::cmp::Ordering;

/// Bytes for all limits over the slots, and their sum above the limits, the *excess*.
pub(super) struct StageMemory<'a> {
    modules: usize,
    microbatches: usize,
    /// Units per item, `[items * modules]`.
    item_units: &'a [u64],
    /// DP size per module.
    dp_sizes: Vec<u64>,
    /// Units per slot, `[groups * modules]`.
    slot_units: Vec<u64>,
    /// Units over all ranks' slots at a place, `[microbatches * modules]`.
    pool_units: Vec<u64>,
    /// Units in both slots after the change on trial, `[modules]` each.
    slots_after: [Vec<u64>; 2],
    /// Units on a shared module's rank at both places after that change, `[modules]` each.
    shares_after: [Vec<u64>; 2],
    limits: Vec<Limit<'a>>,
    excess: u64,
    /// Limit and lane with the largest excess.
    fullest: (usize, usize),
}

/// Window of places that exceeds a limit most.
pub(crate) struct FullestWindow {
    pub(crate) limit: usize,
    /// DP rank; `None` if it is the same on all ranks.
    pub(crate) rank: Option<usize>,
    pub(crate) places: std::ops::Range<usize>,
}

impl<'a> StageMemory<'a> {
    /// Sums the bytes for all slots; `None` without limits. The configuration is already checked.
    pub(super) fn new(slots: &Partition, config: &'a PipelineConfig) -> Option<Self> {
        let limits = config.memory.as_ref().filter(|limits| !limits.stages.is_empty())?;
        let (groups, modules) = (slots.groups.len(), config.stages.len());
        let microbatches = groups / config.dp_size;
        let mut memory = Self {
            modules,
            microbatches,
            item_units: &limits.units,
            dp_sizes: (0..modules).map(|module| config.module_dp_size(module) as u64).collect(),
            slot_units: vec![0; groups * modules],
            pool_units: vec![0; microbatches * modules],
            slots_after: [(); 2].map(|()| vec![0; modules]),
            shares_after: [(); 2].map(|()| vec![0; modules]),
            limits: limits.stages.iter().map(|of| Limit::new(of, config, microbatches)).collect(),
            excess: 0,
            fullest: (0, 0),
        };
        memory.refresh(slots);
        Some(memory)
    }

    /// Returns the bytes above the limits, summed over limits and ranks.
    pub(super) fn excess(&self) -> u64 {
        self.excess
    }

    /// Returns the window with the largest excess.
    pub(super) fn fullest_window(&self) -> Option<FullestWindow> {
        let (index, lane) = self.fullest;
        let limit = self.limits.get(index)?;
        let start = limit.lanes[lane].window_start;
        let rank = (!limit.is_shared).then_some(lane);
        Some(FullestWindow { limit: index, rank, places: start..start + limit.window })
    }

    /// Sums all bytes from the slots.
    pub(super) fn refresh(&mut self, slots: &Partition) {
        self.slot_units.fill(0);
        self.pool_units.fill(0);
        for (slot, items) in slots.groups.iter().enumerate() {
            let place = slot % self.microbatches;
            for &item in items {
                for module in 0..self.modules {
                    let units = self.item_units[item as usize * self.modules + module];
                    self.slot_units[slot * self.modules + module] += units;
                    self.pool_units[place * self.modules + module] += units;
                }
            }
        }
        let Self { limits, slot_units, pool_units, dp_sizes, modules, .. } = self;
        for limit in limits {
            for at in 0..limit.bytes.len() {
                let cells = at * *modules..(at + 1) * *modules;
                limit.bytes[at] = if limit.is_shared {
                    let pools = pool_units[cells].iter().zip(&*dp_sizes);
                    let shares: Vec<u64> = pools.map(|(units, dp_size)| units.div_ceil(*dp_size)).collect();
                    limit.microbatch_bytes(&shares)
                } else {
                    limit.microbatch_bytes(&slot_units[cells])
                };
            }
            (0..limit.lanes.len())
                .for_each(|lane| limit.lanes[lane] = limit.measure(lane, self.microbatches));
        }
        self.sum_excess();
    }

    /// Compares the excess after a trial change with the present excess.
    pub(super) fn compare_change(
        &mut self,
        slots: &Partition,
        change: Change,
        budget: &mut Budget,
    ) -> Ordering {
        self.compute_units(slots, change);
        let microbatches = self.microbatches;
        let Self { limits, slots_after, shares_after, excess, .. } = self;
        let (mut less, mut more) = (0, 0);
        for limit in limits {
            let after = if limit.is_shared { &*shares_after } else { &*slots_after };
            let (sites, steps) = limit.compute_change(change, after, microbatches);
            budget.spend(steps);
            less += sites.iter().map(|site| site.0).sum::<u64>();
            more += sites.iter().map(|site| site.1).sum::<u64>();
            // No later limit can make up for more than all of the present excess.
            if more > *excess {
                return Ordering::Greater;
            }
        }
        more.cmp(&less)
    }

    /// Applies the last compared change.
    pub(super) fn apply(&mut self, change: Change, budget: &mut Budget) {
        let microbatches = self.microbatches;
        for (side, slot) in [change.first, change.second].into_iter().enumerate() {
            for module in 0..self.modules {
                let cell = slot * self.modules + module;
                let pool = (slot % microbatches) * self.modules + module;
                self.pool_units[pool] -= self.slot_units[cell];
                self.slot_units[cell] = self.slots_after[side][module];
                self.pool_units[pool] += self.slot_units[cell];
            }
        }
        let Self { limits, slots_after, shares_after, .. } = self;
        for limit in limits {
            let after = if limit.is_shared { &*shares_after } else { &*slots_after };
            budget.spend(limit.apply(change, after, microbatches));
        }
        self.sum_excess();
    }

    /// Computes the units in both slots, and in their pools, after a change.
    fn compute_units(&mut self, slots: &Partition, change: Change) {
        let modules = self.modules;
        let item_units = |slot: usize, position: usize, module: usize| {
            self.item_units[slots.groups[slot][position] as usize * modules + module]
        };
        let is_between_pools = change.first % self.microbatches != change.second % self.microbatches;
        for module in 0..modules {
            let before = [change.first, change.second].map(|slot| self.slot_units[slot * modules + module]);
            let after = match change.kind {
                ChangeKind::Slots => [before[1], before[0]],
                ChangeKind::Items { gives, takes } => {
                    let given = item_units(change.first, gives, module);
                    let taken = takes.map_or(0, |takes| item_units(change.second, takes, module));
                    [before[0] - given + taken, before[1] + given - taken]
                }
            };
            for (side, slot) in [change.first, change.second].into_iter().enumerate() {
                self.slots_after[side][module] = after[side];
                let pool = self.pool_units[(slot % self.microbatches) * modules + module];
                // Slots of the same pool keep its sum.
                let pool = if is_between_pools { pool - before[side] + after[side] } else { pool };
                self.shares_after[side][module] = pool.div_ceil(self.dp_sizes[module]);
            }
        }
    }

    fn sum_excess(&mut self) {
        (self.excess, self.fullest) = (0, (0, 0));
        let mut most = 0;
        for (index, limit) in self.limits.iter().enumerate() {
            for (lane, Lane { excess, .. }) in limit.lanes.iter().enumerate() {
                self.excess += excess;
                if *excess > most {
                    (most, self.fullest) = (*excess, (index, lane));
                }
            }
        }
    }
}

/// Memory limit with the bytes for all slots.
struct Limit<'a> {
    of: &'a StageMemoryLimit,
    /// Modules whose units take memory.
    modules: Vec<usize>,
    is_shared: bool,
    /// Number of microbatches in a window.
    window: usize,
    /// Kept and working bytes by lane and place.
    bytes: Vec<Bytes>,
    lanes: Vec<Lane>,
}

/// Bytes for a microbatch on a stage.
#[derive(Debug, Clone, Copy, Default)]
struct Bytes {
    kept: u64,
    working: u64,
}

/// Lane memory.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    /// Bytes kept in the largest window.
    kept_max: u64,
    /// First place of that window.
    window_start: usize,
    /// Largest working bytes.
    working_max: u64,
    /// Bytes above the limit.
    excess: u64,
}

impl<'a> Limit<'a> {
    fn new(of: &'a StageMemoryLimit, config: &PipelineConfig, microbatches: usize) -> Self {
        let is_shared = of.is_shared(|module| config.has_own_dp_size(module));
        let lanes = if is_shared { 1 } else { config.dp_size };
        Self {
            of,
            modules: of.modules().collect(),
            is_shared,
            window: of.in_flight.min(microbatches),
            bytes: vec![Bytes::default(); lanes * microbatches],
            lanes: vec![Lane::default(); lanes],
        }
    }

    /// Returns the bytes for a microbatch with these units, `[modules]`.
    fn microbatch_bytes(&self, units: &[u64]) -> Bytes {
        let mut bytes = Bytes::default();
        for &module in &self.modules {
            bytes.kept += self.of.kept[module] * units[module];
            bytes.working += self.of.working[module] * units[module];
        }
        bytes
    }

    /// Returns the index for a slot's bytes.
    fn index(&self, slot: usize, microbatches: usize) -> usize {
        if self.is_shared { slot % microbatches } else { slot }
    }

    /// Returns the excess before and after a change on the altered lanes, and the elementary steps spent.
    fn compute_change(
        &mut self,
        change: Change,
        after: &[Vec<u64>; 2],
        microbatches: usize,
    ) -> ([(u64, u64); 2], u64) {
        let indices = [change.first, change.second].map(|slot| self.index(slot, microbatches));
        if indices[0] == indices[1] {
            return ([(0, 0); 2], 1);
        }
        let bytes = [self.microbatch_bytes(&after[0]), self.microbatch_bytes(&after[1])];
        let lanes = indices.map(|index| index / microbatches);
        let mut steps = self.modules.len() as u64;
        let mut sites = [(0, 0); 2];
        let edits = [(indices[0], bytes[0]), (indices[1], bytes[1])];
        let parts: [&[(usize, Bytes)]; 2] =
            if lanes[0] == lanes[1] { [&edits, &[]] } else { [&edits[..1], &edits[1..]] };
        for ((site, lane), edits) in sites.iter_mut().zip(lanes).zip(parts) {
            if !edits.is_empty() {
                *site = (self.lanes[lane].excess, self.excess_after(lane, edits, microbatches, &mut steps));
            }
        }
        (sites, steps)
    }

    /// Returns a lane's excess with the bytes for one or two microbatches replaced.
    fn excess_after(
        &mut self,
        lane: usize,
        edits: &[(usize, Bytes)],
        microbatches: usize,
        steps: &mut u64,
    ) -> u64 {
        let Lane { mut kept_max, mut working_max, .. } = self.lanes[lane];
        for (index, bytes) in edits {
            kept_max += bytes.kept.saturating_sub(self.bytes[*index].kept);
            working_max = working_max.max(bytes.working);
        }
        // Most changes leave room, which a bound shows without the windows.
        if kept_max + working_max <= self.of.bytes_max {
            return 0;
        }
        *steps += microbatches as u64;
        let mut before = [Bytes::default(); 2];
        for (before, (index, bytes)) in before.iter_mut().zip(edits) {
            *before = std::mem::replace(&mut self.bytes[*index], *bytes);
        }
        let excess = self.measure(lane, microbatches).excess;
        for (before, (index, _)) in before.iter().zip(edits) {
            self.bytes[*index] = *before;
        }
        excess
    }

    /// Replaces the bytes for both microbatches in a change; returns the elementary steps spent.
    fn apply(&mut self, change: Change, after: &[Vec<u64>; 2], microbatches: usize) -> u64 {
        let indices = [change.first, change.second].map(|slot| self.index(slot, microbatches));
        if indices[0] == indices[1] {
            return 1;
        }
        for (index, units) in indices.into_iter().zip(after) {
            self.bytes[index] = self.microbatch_bytes(units);
        }
        for lane in indices.map(|index| index / microbatches) {
            self.lanes[lane] = self.measure(lane, microbatches);
        }
        2 * microbatches as u64
    }

    /// Sums a lane's windows.
    fn measure(&self, lane: usize, microbatches: usize) -> Lane {
        let bytes = &self.bytes[lane * microbatches..(lane + 1) * microbatches];
        let working_max = bytes.iter().map(|bytes| bytes.working).max().unwrap_or(0);
        let mut kept: u64 = bytes[..self.window].iter().map(|bytes| bytes.kept).sum();
        let (mut kept_max, mut window_start) = (kept, 0);
        for (start, (leaves, enters)) in bytes.iter().zip(&bytes[self.window..]).enumerate() {
            kept = kept - leaves.kept + enters.kept;
            if kept > kept_max {
                (kept_max, window_start) = (kept, start + 1);
            }
        }
        let excess = (kept_max + working_max).saturating_sub(self.of.bytes_max);
        Lane { kept_max, window_start, working_max, excess }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Problem;
    use crate::pipeline::config::{PipelineMemoryLimits, StageMemoryLimit};
    use crate::{Caps, Instance};
    use dflop_costmodel::random::SplitMix64;
    use proptest::prelude::*;

    /// Sums the excess from the items, without a state.
    fn summed(config: &PipelineConfig, groups: &[Vec<u32>]) -> u64 {
        let limits = config.memory.as_ref().unwrap();
        let (modules, microbatches) = (config.stages.len(), groups.len() / config.dp_size);
        let units = |slot: usize, module: usize| -> u64 {
            groups[slot].iter().map(|item| limits.units[*item as usize * modules + module]).sum()
        };
        let mut excess = 0;
        for limit in &limits.stages {
            for rank in
                0..if limit.is_shared(|module| config.has_own_dp_size(module)) { 1 } else { config.dp_size }
            {
                let bytes = |factors: &[u64], place: usize| -> u64 {
                    let of_module = |module: usize| {
                        let pool = (place..groups.len()).step_by(microbatches);
                        let units = if limit.is_shared(|module| config.has_own_dp_size(module)) {
                            let pool: u64 = pool.map(|slot| units(slot, module)).sum();
                            pool.div_ceil(config.module_dp_size(module) as u64)
                        } else {
                            units(rank * microbatches + place, module)
                        };
                        factors[module] * units
                    };
                    (0..modules).map(of_module).sum()
                };
                let kept: Vec<u64> = (0..microbatches).map(|place| bytes(&limit.kept, place)).collect();
                let windows = kept.windows(limit.in_flight.min(microbatches));
                let held = windows.map(|window| window.iter().sum::<u64>()).max().unwrap();
                let working = (0..microbatches).map(|place| bytes(&limit.working, place)).max().unwrap();
                excess += (held + working).saturating_sub(limit.bytes_max);
            }
        }
        excess
    }

    fn limit(kept: [u64; 2], working: [u64; 2], in_flight: usize, bytes_max: u64) -> StageMemoryLimit {
        StageMemoryLimit { in_flight, kept: kept.to_vec(), working: working.to_vec(), bytes_max }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn the_excess_follows_every_change_accepted_or_not(
            units in prop::collection::vec(0..100_u64, 40),
            shape in prop::sample::select(vec![(1, 6), (2, 3), (3, 4), (4, 1)]),
            encoder_dp in 1..5_usize,
            factors in prop::collection::vec(0..4_u64, 6),
            in_flight in 1..6_usize,
            bytes_max in 0..2_000_u64,
            seed in any::<u64>(),
        ) {
            let (dp_size, microbatches) = shape;
            let instance = Instance::with_empty_groups(dp_size * microbatches, 2, units.clone()).unwrap();
            let stages = vec![
                limit([factors[0], 0], [factors[1], 0], in_flight + 1, bytes_max),
                limit([0, factors[2]], [0, factors[3]], in_flight, bytes_max),
                limit([0, factors[4]], [0, factors[5]], 1, bytes_max / 2),
            ];
            let limits = PipelineMemoryLimits { units, stages };
            let config = PipelineConfig::new(dp_size, vec![1, 2]).memory(limits);
            let config = config.module_dp_sizes(vec![encoder_dp, dp_size]);
            config.check(&instance).unwrap();
            let problem = Problem::new(&instance, &Caps::default()).unwrap();
            let mut rng = SplitMix64::new(seed);
            let mut groups = vec![Vec::new(); instance.groups()];
            (0..20).for_each(|item| groups[rng.below(instance.groups())].push(item));
            let mut slots = Partition::from_groups(&problem, groups);
            let mut memory = StageMemory::new(&slots, &config).unwrap();
            for _ in 0..60 {
                let [first, second] = [(); 2].map(|()| rng.below(problem.groups));
                let is_whole = rng.below(2) == 0;
                let change = crate::pipeline::search::draw_at(&slots, first, second, is_whole, &mut rng);
                let Some(change) = change else { continue };
                let (before, mut after) = (memory.excess(), slots.clone());
                let order = memory.compare_change(&slots, change, &mut Budget::work(1));
                change.apply(&problem, &mut after);
                let expected = summed(&config, &after.groups);
                prop_assert_eq!(order, expected.cmp(&before));
                if rng.below(3) > 0 {
                    memory.apply(change, &mut Budget::work(1));
                    slots = after;
                }
                prop_assert_eq!(memory.excess(), summed(&config, &slots.groups));
            }
        }
    }
}
