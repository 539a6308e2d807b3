//! Plans for ranks without a pipeline, whose modules run one after the other on one device.
//!
//! DDP and FSDP run a model like this. A microbatch takes the sum of its modules, and a rank the sum of its
//! microbatches; the time of the step depends on when ranks wait for each other.

use dflop_costmodel::SampleCost;

use super::step_plan::StepPlan;

/// Point at which data-parallel ranks wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Synchronization {
    /// At the end of a step, to add up gradients, as DDP does with accumulated gradients: the step takes as
    /// long as the slowest rank.
    #[default]
    PerStep,
    /// In every microbatch, to gather parameters, as FSDP and `ZeRO-3` do: the step takes the sum, over
    /// microbatches, of the slowest rank's. All microbatches are therefore balanced to the same length, and
    /// those that run at the same time even more so.
    PerMicrobatch,
}

/// Returns the time of all modules of a sample, in nanoseconds; saturates.
pub(super) fn one_after_the_other(cost: &SampleCost) -> u64 {
    cost.module_ns.as_slice().iter().copied().fold(0, u64::saturating_add)
}

/// Orders the microbatches of every rank, longest first, so that those of similar length run at the same
/// time.
pub(super) fn alike_together(ranks: &mut [Vec<Vec<u32>>], costs: &[SampleCost]) {
    for microbatches in ranks {
        let ns = |places: &Vec<u32>| -> u64 {
            // Items after the samples are padding, which all microbatches have.
            let samples = places.iter().filter_map(|&place| costs.get(place as usize));
            samples.map(one_after_the_other).fold(0, u64::saturating_add)
        };
        microbatches.sort_by_key(|places| std::cmp::Reverse(ns(places)));
    }
}

/// Returns the time of a step whose ranks wait for each other in every microbatch, in nanoseconds.
pub(super) fn in_lockstep_ns(plan: &StepPlan) -> u64 {
    let ns = |rank: usize, slot: usize| {
        let padding_ns = plan.padding_ns.get(rank).map_or(0, |padding| padding[slot]);
        let costs = plan.ranks[rank][slot].iter().map(|&place| &plan.costs[place as usize]);
        costs.map(one_after_the_other).fold(padding_ns, u64::saturating_add)
    };
    let slots = plan.ranks.iter().map(Vec::len).max().unwrap_or(0);
    let slowest = |slot: usize| {
        let ranks = (0..plan.ranks.len()).filter(|&rank| slot < plan.ranks[rank].len());
        ranks.map(|rank| ns(rank, slot)).max().unwrap_or(0)
    };
    (0..slots).map(slowest).fold(0, u64::saturating_add)
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
