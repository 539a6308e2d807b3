//! Describes a planned step: samples, costs, ranks and microbatches, and the digest that ranks compare.

use dflop_balancer::{LowerBound, PlanDigest};
use dflop_costmodel::SampleCost;
use serde::{Deserialize, Serialize};

use crate::order::StepSample;

/// Planned global batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepPlan {
    /// Number of the step.
    pub step: u64,
    /// The samples, in global order.
    pub samples: Vec<StepSample>,
    /// Cost of each sample, padding of its row to a fixed length included; zero for a refused one.
    pub costs: Vec<SampleCost>,
    /// Samples that the model cannot take, by their place in `samples`, and why. Planned at no cost; the rank
    /// that owns them skips them.
    pub refused: Vec<(usize, String)>,
    /// Places in `samples`, by rank and microbatch, in the order of execution.
    pub ranks: Vec<Vec<Vec<u32>>>,
    /// LLM time of each microbatch besides the costs of its samples, by rank, in nanoseconds: that of its
    /// padding to a fixed length. Empty without one.
    pub padding_ns: Vec<Vec<u64>>,
    /// Whether microbatches may be farther from each other in tokens than usual. Without a token cap of its
    /// own a plan keeps them within a quarter, or the longest sample, of their mean; it gives that up where
    /// the byte cap leaves no such partition.
    pub is_near_mean_cap_dropped: bool,
    /// Predicted 1F1B makespan of the slowest rank, padding to a fixed length included.
    pub makespan_ns: u64,
    /// Lower bound of the makespan.
    pub bound: LowerBound,
    /// Tokens that the loss of the step is computed on.
    pub target_tokens: u64,
    /// Digest over step, ranks, microbatches, datasets and sample numbers.
    pub digest: PlanDigest,
}

impl StepPlan {
    /// Whether the model refuses the sample at a place.
    pub(crate) fn is_refused(&self, place: u32) -> bool {
        // `refused` is in the order of places.
        self.refused.binary_search_by_key(&(place as usize), |(at, _)| *at).is_ok()
    }

    /// Returns the planned LLM time of padding of a rank's microbatch, where `places` are all of its samples
    /// that the model takes; `None` for any other set of samples.
    pub(crate) fn planned_padding_ns(&self, rank: usize, microbatch: usize, places: &[u32]) -> Option<u64> {
        let planned = self.ranks.get(rank)?.get(microbatch)?;
        let taken = planned.iter().copied().filter(|&place| !self.is_refused(place));
        taken.eq(places.iter().copied()).then(|| self.padding_ns[rank][microbatch])
    }
}

/// Bits of a digested number that hold the sample; those above hold its dataset.
const SAMPLE_BITS: u32 = 48;

/// Digests a step over ranks, microbatches, datasets and sample numbers.
pub(super) fn digest(step: u64, ranks: &[Vec<Vec<u32>>], samples: &[StepSample]) -> PlanDigest {
    let mut digest = PlanDigest::new();
    let number = |&place: &u32| {
        let StepSample { dataset, sample, .. } = samples[place as usize];
        (dataset as u64) << SAMPLE_BITS | sample
    };
    for (rank, microbatches) in ranks.iter().enumerate() {
        for (microbatch, places) in microbatches.iter().enumerate() {
            digest.add(step, rank, microbatch, places.iter().map(number));
        }
    }
    digest
}
