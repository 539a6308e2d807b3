//! Plans for ranks without a pipeline, whose modules run in sequence on one device.
//!
//! DDP, FSDP and HSDP run a model like this. A microbatch time is the sum over the modules, and a rank time
//! the sum over the microbatches; the step time depends on when ranks wait for each other.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use dflop_balancer::shard_groups_ns;
use dflop_costmodel::{MicrobatchConstants, RankLayout, SampleCost, Sharding};

use super::step_plan::StepPlan;

/// Point at which data-parallel ranks wait for each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Synchronization {
    /// At the end of a step, to add up gradients, as DDP does with accumulated gradients: the step time is
    /// the time of the slowest rank.
    #[default]
    PerStep,
    /// In every layer, to gather parameters, as FSDP and `ZeRO-3` do: no rank enters the LLM before all have
    /// left the encoder, so a microbatch takes the slowest rank's time in the encoder and the slowest rank's
    /// time in the LLM, and the step is the sum over microbatches. Modules are therefore balanced apart.
    PerMicrobatch,
    /// In every layer within shard groups of this many consecutive ranks, and at the end of a step across
    /// groups, as HSDP does: the step time is the slowest group's, and each group runs as under
    /// [`Self::PerMicrobatch`]. Groups of one rank are [`Self::PerStep`].
    PerShardGroup(NonZeroUsize),
}

impl Synchronization {
    /// Returns the number of consecutive ranks that meet in every layer.
    ///
    /// - `dp_size`: number of data-parallel ranks
    #[must_use]
    pub fn shard_ranks(self, dp_size: usize) -> NonZeroUsize {
        match self {
            Self::PerStep => NonZeroUsize::MIN,
            Self::PerMicrobatch => NonZeroUsize::new(dp_size).unwrap_or(NonZeroUsize::MIN),
            Self::PerShardGroup(ranks) => ranks,
        }
    }

    /// Whether ranks meet before the end of a step.
    #[must_use]
    pub fn meets_in_layers(self) -> bool {
        match self {
            Self::PerStep => false,
            Self::PerMicrobatch => true,
            Self::PerShardGroup(ranks) => ranks.get() > 1,
        }
    }
}

impl From<RankLayout> for Synchronization {
    /// Returns the point at which the plans for a layout assume that ranks wait for each other. `ZeRO-2` has
    /// the plans for FSDP: its ranks meet at the end of every microbatch, which balanced modules shorten too.
    fn from(layout: RankLayout) -> Self {
        match (layout.sharding, NonZeroUsize::new(layout.shard_ranks as usize)) {
            (Sharding::Nothing | Sharding::Optimizer, _) | (_, None) => Self::PerStep,
            (Sharding::Gradients | Sharding::Parameters, Some(ranks)) if layout.has_groups() => {
                Self::PerShardGroup(ranks)
            }
            (Sharding::Gradients | Sharding::Parameters, Some(_)) => Self::PerMicrobatch,
        }
    }
}

impl fmt::Display for Synchronization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PerStep => f.pad("step"),
            Self::PerMicrobatch => f.pad("microbatch"),
            Self::PerShardGroup(ranks) => write!(f, "microbatch:{ranks}"),
        }
    }
}

impl FromStr for Synchronization {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "step" => Ok(Self::PerStep),
            "microbatch" => Ok(Self::PerMicrobatch),
            _ => {
                let ranks = text.strip_prefix("microbatch:").and_then(|ranks| ranks.parse().ok());
                ranks
                    .map(Self::PerShardGroup)
                    .ok_or_else(|| format!("expected step, microbatch or microbatch:RANKS, found `{text}`"))
            }
        }
    }
}

/// Returns the constants that every microbatch has, over all modules: only modules in which each sample has
/// work count.
pub(super) fn common_constants(
    costs: &[SampleCost],
    constants: &[MicrobatchConstants],
) -> MicrobatchConstants {
    let is_common = |module: usize| costs.iter().all(|cost| cost.module_ns.as_slice()[module] > 0);
    let common = constants.iter().enumerate().filter(|(module, _)| is_common(*module));
    common.map(|(_, constants)| *constants).fold(MicrobatchConstants::default(), MicrobatchConstants::plus)
}

/// Returns the sample time summed over all modules, in nanoseconds; saturates.
pub(super) fn serial_ns(cost: &SampleCost) -> u64 {
    cost.module_ns.as_slice().iter().copied().fold(0, u64::saturating_add)
}

/// Orders the microbatches of every rank, longest first, so that microbatches with similar lengths run at the
/// same time.
pub(super) fn sort_by_cost(ranks: &mut [Vec<Vec<u32>>], costs: &[SampleCost]) {
    for microbatches in ranks {
        let ns = |places: &Vec<u32>| -> u64 {
            // Items after the samples are padding, which all microbatches have.
            let samples = places.iter().filter_map(|&place| costs.get(place as usize));
            samples.map(serial_ns).fold(0, u64::saturating_add)
        };
        microbatches.sort_by_key(|places| std::cmp::Reverse(ns(places)));
    }
}

/// Returns the times of a plan in nanoseconds, by rank, microbatch and module.
pub(super) fn times_ns(plan: &StepPlan) -> Vec<Vec<Vec<u64>>> {
    let rank = |(rank, microbatches): (usize, &Vec<Vec<u32>>)| {
        (0..microbatches.len()).map(|slot| plan.microbatch_ns(rank, slot)).collect()
    };
    plan.ranks.iter().enumerate().map(rank).collect()
}

/// Returns the step time in nanoseconds.
pub(super) fn step_ns(plan: &StepPlan, synchronization: Synchronization) -> u64 {
    shard_groups_ns(&times_ns(plan), synchronization.shard_ranks(plan.ranks.len()))
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};

    use super::*;

    #[test]
    fn a_synchronization_is_read_as_it_is_written() {
        for text in ["step", "microbatch", "microbatch:8"] {
            assert_eq!(text.parse::<Synchronization>().unwrap().to_string(), text);
        }
        for text in ["steps", "microbatch:", "microbatch:0", "microbatch:-1", "microbatch:8:1"] {
            let refused = text.parse::<Synchronization>().unwrap_err();
            assert!(refused.contains("microbatch:RANKS"), "{refused}");
        }
    }

    #[test]
    fn layouts_wait_where_their_shards_do() {
        let ddp = RankLayout::replicated(16, 8);
        let synchronizations = |sharding: Sharding| {
            [8, 16].map(|ranks| Synchronization::from(ddp.sharded(sharding, ranks)).to_string())
        };
        assert_eq!(Synchronization::from(ddp), Synchronization::PerStep);
        assert_eq!(synchronizations(Sharding::Optimizer), ["step", "step"]);
        assert_eq!(synchronizations(Sharding::Gradients), ["microbatch:8", "microbatch"]);
        assert_eq!(synchronizations(Sharding::Parameters), ["microbatch:8", "microbatch"]);
    }

    #[test]
    fn microbatches_run_longest_first_on_every_rank() {
        let rate = DeviceRate::preset("h100").unwrap();
        let model = CostModel::new(ModelSpec::preset("tiny").unwrap(), rate);
        let cost =
            |text_tokens| model.predict(&SampleShape { text_tokens, ..SampleShape::default() }).unwrap();
        let costs = [cost(10), cost(500), cost(300), cost(20)];
        let mut ranks = vec![vec![vec![0], vec![1]], vec![vec![3, 9], vec![2]]];
        sort_by_cost(&mut ranks, &costs);
        assert_eq!(ranks, [[vec![1], vec![0]], [vec![2], vec![3, 9]]]);
    }
}
