//! Plans for ranks without a pipeline: all modules run one after the other on a rank's device.
//!
//! That is how DDP and FSDP run a model. A microbatch takes the sum of its modules, and a rank the sum of its microbatches;
//! what the step takes depends on when ranks wait for one another.

use dflop_costmodel::SampleCost;

use super::{StepPlan, StepPlanner};

/// When data-parallel ranks wait for one another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Meet {
    /// At the end of a step, to add up gradients, as DDP does with accumulated gradients: the step takes as long as the
    /// slowest rank.
    #[default]
    Step,
    /// In every microbatch, to gather parameters, as FSDP and `ZeRO-3` do: the step takes the sum, over microbatches, of
    /// the slowest rank's. So all microbatches are made alike, and those that run at the same time more so.
    Microbatch,
}

/// Time of all modules of a sample, in nanoseconds; saturates.
pub(super) fn one_after_the_other(cost: &SampleCost) -> u64 {
    cost.module_ns.as_slice().iter().copied().fold(0, u64::saturating_add)
}

/// Orders the microbatches of every rank, longest first, so that those of about a length run at the same time.
pub(super) fn alike_together(ranks: &mut [Vec<Vec<u32>>], costs: &[SampleCost]) {
    for microbatches in ranks {
        let ns = |places: &Vec<u32>| -> u64 {
            // Items behind the samples stand for padding, which all microbatches have.
            let samples = places.iter().filter_map(|&place| costs.get(place as usize));
            samples.map(one_after_the_other).fold(0, u64::saturating_add)
        };
        microbatches.sort_by_key(|places| std::cmp::Reverse(ns(places)));
    }
}

impl StepPlanner {
    /// Returns whether all modules of a rank share its device and run one after the other, without a pipeline.
    #[must_use]
    pub fn is_lockstep(&self) -> bool {
        self.config.meet.is_some()
    }

    /// Time of a step whose ranks wait for one another in every microbatch, in nanoseconds.
    pub(super) fn in_lockstep_ns(&self, plan: &StepPlan) -> u64 {
        let ns = |places: &Vec<u32>| {
            let costs = || places.iter().map(|&place| &plan.costs[place as usize]);
            let tokens = costs().map(|cost| u64::from(cost.tokens)).sum();
            costs()
                .map(one_after_the_other)
                .fold(self.padding_ns(plan.step, places.len(), tokens), u64::saturating_add)
        };
        let slots = plan.ranks.iter().map(Vec::len).max().unwrap_or(0);
        let slowest =
            |slot: usize| plan.ranks.iter().filter_map(|rank| rank.get(slot)).map(ns).max().unwrap_or(0);
        (0..slots).map(slowest).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};

    use super::*;

    #[test]
    fn microbatches_run_longest_first_on_every_rank() {
        let rate = DeviceRate::preset("h100").unwrap();
        let model = CostModel::new(ModelSpec::preset("tiny").unwrap(), rate);
        let cost =
            |text_tokens| model.predict(&SampleShape { text_tokens, ..SampleShape::default() }).unwrap();
        let costs = [cost(10), cost(500), cost(300), cost(20)];
        let mut ranks = vec![vec![vec![0], vec![1]], vec![vec![3, 9], vec![2]]];
        alike_together(&mut ranks, &costs);
        assert_eq!(ranks, [[vec![1], vec![0]], [vec![2], vec![3, 9]]]);
    }
}
