//! Times for modules with a different DP size than the pipelines, whose items are shared per slot.
//!
//! The microbatches that all ranks run in the same slot form a pool of encoder work, shared evenly by the
//! encoder's DP ranks, as far as items can be shared: a stage takes the pool's mean per encoder rank, or the
//! pool's longest item if that is longer. All pipelines wait for it alike.

use super::{Change, ChangeKind};
use crate::partition::{Partition, Problem};
use crate::pipeline::config::PipelineConfig;

/// Times for all pools, updated with the slots.
pub(super) struct SharedModules {
    /// Index into `modules`, by problem module.
    index: Vec<Option<usize>>,
    modules: Vec<Pools>,
}

/// Pools for a shared module.
struct Pools {
    module: usize,
    dp_size: u64,
    microbatches: usize,
    /// Load per pool, all ranks together, `[microbatches]`.
    pool_ns: Vec<u64>,
    /// Longest item in every slot, `[groups]`.
    longest_ns: Vec<u64>,
    /// Times for a change's two pools after the change.
    after_ns: [u64; 2],
}

impl SharedModules {
    pub(super) fn new(problem: &Problem<'_>, config: &PipelineConfig) -> Self {
        let microbatches = problem.groups / config.dp_size;
        let mut shared = Self { index: vec![None; problem.modules], modules: Vec::new() };
        for module in 0..problem.modules {
            let dp_size = config.module_dp_size(module);
            if dp_size != config.dp_size {
                shared.index[module] = Some(shared.modules.len());
                shared.modules.push(Pools {
                    module,
                    dp_size: dp_size as u64,
                    microbatches,
                    pool_ns: vec![0; microbatches],
                    longest_ns: vec![0; problem.groups],
                    after_ns: [0; 2],
                });
            }
        }
        shared
    }

    /// Whether every module has the pipeline's DP size.
    pub(super) fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// Returns whether a module is shared.
    pub(super) fn is_shared(&self, module: usize) -> bool {
        self.index[module].is_some()
    }

    /// Returns a module's stage time for a pool; `None` if the module is not shared.
    pub(super) fn time_ns(&self, module: usize, place: usize) -> Option<u64> {
        let module = &self.modules[self.index[module]?];
        let longest = module.place_slots(place).map(|slot| module.longest_ns[slot]).max();
        Some(module.time_ns(module.pool_ns[place], longest.unwrap_or(0)))
    }

    /// Returns the time after the last computed change, for the first or second slot's pool.
    pub(super) fn time_after_ns(&self, module: usize, side: usize) -> Option<u64> {
        Some(self.modules[self.index[module]?].after_ns[side])
    }

    /// Sums all pools from the slots.
    pub(super) fn refresh(&mut self, problem: &Problem<'_>, slots: &Partition) {
        for module in &mut self.modules {
            for place in 0..module.microbatches {
                module.refresh_pool(problem, slots, place);
            }
            for slot in 0..problem.groups {
                module.longest_ns[slot] = module.longest_item_ns(problem, &slots.groups[slot]);
            }
        }
    }

    /// Computes a change between two pools; returns the elementary steps spent.
    pub(super) fn compute_change(
        &mut self,
        problem: &Problem<'_>,
        slots: &Partition,
        change: Change,
        after: &[Vec<u64>; 2],
    ) -> u64 {
        let mut steps = 0;
        for module in &mut self.modules {
            let longest = module.longest_after(problem, slots, change);
            for (side, slot) in [change.first, change.second].into_iter().enumerate() {
                let place = slot % module.microbatches;
                let pool_ns = module.pool_ns[place] - slots.load(problem, slot)[module.module]
                    + after[side][module.module];
                // The changed slot's own longest item comes from `longest_after`.
                let others = module.place_slots(place).filter(|other| *other != slot);
                let longest_ns = others.map(|other| module.longest_ns[other]).max();
                module.after_ns[side] = module.time_ns(pool_ns, longest_ns.unwrap_or(0).max(longest[side]));
                steps += (slots.groups[slot].len() + problem.groups / module.microbatches) as u64;
            }
        }
        steps
    }

    /// Updates the pools after a change was applied.
    pub(super) fn apply(&mut self, problem: &Problem<'_>, slots: &Partition, change: Change) {
        for module in &mut self.modules {
            for slot in [change.first, change.second] {
                module.longest_ns[slot] = module.longest_item_ns(problem, &slots.groups[slot]);
                module.refresh_pool(problem, slots, slot % module.microbatches);
            }
        }
    }
}

impl Pools {
    fn time_ns(&self, pool_ns: u64, longest_ns: u64) -> u64 {
        pool_ns.div_ceil(self.dp_size).max(longest_ns)
    }

    /// Lists the slots on all ranks at a place.
    fn place_slots(&self, place: usize) -> impl Iterator<Item = usize> + use<> {
        (place..self.longest_ns.len()).step_by(self.microbatches)
    }

    fn refresh_pool(&mut self, problem: &Problem<'_>, slots: &Partition, place: usize) {
        let loads = self.place_slots(place).map(|slot| slots.load(problem, slot)[self.module]);
        self.pool_ns[place] = loads.sum();
    }

    fn longest_item_ns(&self, problem: &Problem<'_>, items: &[u32]) -> u64 {
        items.iter().map(|&item| problem.row(item)[self.module]).max().unwrap_or(0)
    }

    /// Returns the longest items in both slots after a change.
    fn longest_after(&self, problem: &Problem<'_>, slots: &Partition, change: Change) -> [u64; 2] {
        let ChangeKind::Items { gives, takes } = change.kind else {
            // Whole slots are exchanged, and their longest items with them.
            return [self.longest_ns[change.second], self.longest_ns[change.first]];
        };
        let time_ns = |slot: usize, position: usize| problem.row(slots.groups[slot][position])[self.module];
        let without = |slot: usize, gone: Option<usize>| {
            let positions = (0..slots.groups[slot].len()).filter(|position| Some(*position) != gone);
            positions.map(|position| time_ns(slot, position)).max().unwrap_or(0)
        };
        let taken_ns = takes.map_or(0, |takes| time_ns(change.second, takes));
        [
            without(change.first, Some(gives)).max(taken_ns),
            without(change.second, takes).max(time_ns(change.first, gives)),
        ]
    }
}
