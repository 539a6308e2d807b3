//! Describes a planned step: samples, costs, ranks and microbatches, and the digest that ranks compare.

use dflop_balancer::{LowerBound, PipelineAssignment, PlanDigest};
use dflop_costmodel::random::mix64;
use dflop_costmodel::{LaunchLimit, ModelConstants, SampleCost};
use serde::{Deserialize, Serialize};

use super::step_context::StepContext;
use crate::order::{StepSample, TokenSpan};

/// Fraction of step time from which launches limit the step.
const LAUNCH_SHARE_NOTICED: f64 = 0.5;

/// A step partitioned into ranks and microbatches.
pub(super) struct StepPartition {
    pub(super) assignment: PipelineAssignment,
    pub(super) is_near_mean_cap_dropped: bool,
}

impl From<PipelineAssignment> for StepPartition {
    fn from(assignment: PipelineAssignment) -> Self {
        Self { assignment, is_near_mean_cap_dropped: false }
    }
}

/// Planned global batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepPlan {
    /// Step number.
    pub step: u64,
    /// The samples, in global order; where microbatches are rows, row by row, and once for each piece.
    pub samples: Vec<StepSample>,
    /// Tokens of each entry of `samples` that a row holds; empty where samples are whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<TokenSpan>,
    /// Cost of each sample, row padding to a fixed length included; zero for a rejected sample.
    pub costs: Vec<SampleCost>,
    /// Microbatch costs in addition to the samples; empty where costs come from a cost function.
    pub constants: ModelConstants,
    /// Rejected samples by index in `samples`, with the reason. Planned at no cost; the rank that owns them
    /// skips them.
    pub refused: Vec<(usize, String)>,
    /// Indices in `samples`, by rank and microbatch, in execution order.
    pub ranks: Vec<Vec<Vec<u32>>>,
    /// LLM time per microbatch in addition to the sample costs, by rank, in nanoseconds: the time for padding
    /// to a fixed length. Empty without a fixed length.
    pub padding_ns: Vec<Vec<u64>>,
    /// Whether microbatches may be farther from each other in tokens than usual. Without a token cap a plan
    /// keeps them within a quarter, or the longest sample, of the mean; this is dropped where the byte cap
    /// leaves no such partition.
    pub is_near_mean_cap_dropped: bool,
    /// Predicted 1F1B makespan of the slowest rank, with microbatch padding and constants.
    pub makespan_ns: u64,
    /// Lower bound of the makespan.
    pub bound: LowerBound,
    /// Groups of ranks that share samples; `None` if every sample is whole on one rank. A split sample is in
    /// the microbatch of every rank in its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<StepContext>,
    /// Number of target tokens in the step.
    pub target_tokens: u64,
    /// Digest over step, ranks, microbatches, datasets and sample numbers.
    pub digest: PlanDigest,
}

impl StepPlan {
    /// Returns the predicted microbatch time in each module, forward and backward, in nanoseconds.
    ///
    /// # Panics
    /// If the plan has no such rank or microbatch.
    #[must_use]
    pub fn microbatch_ns(&self, rank: usize, microbatch: usize) -> Vec<u64> {
        if let Some(context) = &self.context {
            return context.times_ns[rank][microbatch].clone();
        }
        let modules = self.costs.first().map_or(0, |cost| cost.module_ns.as_slice().len());
        let mut added_ns = vec![0_u64; modules];
        for &place in &self.ranks[rank][microbatch] {
            for (sum, ns) in added_ns.iter_mut().zip(self.costs[place as usize].module_ns.as_slice()) {
                *sum = sum.saturating_add(*ns);
            }
        }
        if let (Some(llm), Some(padding)) = (added_ns.last_mut(), self.padding_ns.get(rank)) {
            *llm = llm.saturating_add(padding[microbatch]);
        }
        self.constants.microbatch_ns(added_ns)
    }

    /// Returns the fraction of the predicted microbatch time in which launches limit a module.
    #[must_use]
    pub fn launch_limited_share(&self) -> f64 {
        let (mut limited_ns, mut all_ns) = (0.0, 0.0);
        for (rank, microbatches) in self.ranks.iter().enumerate() {
            for slot in 0..microbatches.len() {
                let [limited, all] = self.constants.launch_limited_ns(&self.microbatch_ns(rank, slot));
                limited_ns += limited as f64;
                all_ns += all as f64;
            }
        }
        if all_ns > 0.0 { limited_ns / all_ns } else { 0.0 }
    }

    /// Returns the launch limit with the longest floor, if launches limit the step's microbatches for most of
    /// the predicted time.
    ///
    /// - `limits`: from the cost model that planned the step
    #[must_use]
    pub fn launch_limit(&self, limits: &[LaunchLimit]) -> Option<LaunchLimit> {
        let longest = limits.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        longest.copied().filter(|_| self.launch_limited_share() >= LAUNCH_SHARE_NOTICED)
    }

    /// Returns the tokens of the sample at a place that a row holds; `None` where samples are whole.
    #[must_use]
    pub fn span(&self, place: u32) -> Option<TokenSpan> {
        self.spans.get(place as usize).copied()
    }

    /// Whether the model refuses the sample at a place.
    pub(crate) fn is_refused(&self, place: u32) -> bool {
        // `refused` is sorted by index.
        self.refused.binary_search_by_key(&(place as usize), |(at, _)| *at).is_ok()
    }

    /// Returns the planned LLM padding time in a rank's microbatch, if `places` are all of its samples that
    /// the model accepts; `None` for any other set of samples.
    pub(crate) fn planned_padding_ns(&self, rank: usize, microbatch: usize, places: &[u32]) -> Option<u64> {
        let planned = self.ranks.get(rank)?.get(microbatch)?;
        let taken = planned.iter().copied().filter(|&place| !self.is_refused(place));
        taken.eq(places.iter().copied()).then(|| self.padding_ns[rank][microbatch])
    }
}

/// Bits in a digested number that hold the sample; the bits above hold the dataset.
const SAMPLE_BITS: u32 = 48;

/// Samples of a step, with the spans of tokens where they are pieces of documents.
#[derive(Debug)]
pub(super) struct StepSamples {
    pub(super) samples: Vec<StepSample>,
    /// Empty where samples are whole.
    pub(super) spans: Vec<TokenSpan>,
}

/// Digests a step over ranks, microbatches, datasets, sample numbers and first tokens.
///
/// - `spans`: empty where samples are whole
pub(super) fn digest(
    step: u64,
    ranks: &[Vec<Vec<u32>>],
    samples: &[StepSample],
    spans: &[TokenSpan],
) -> PlanDigest {
    let mut digest = PlanDigest::new();
    let number = |&place: &u32| {
        let StepSample { dataset, sample, .. } = samples[place as usize];
        let number = (dataset as u64) << SAMPLE_BITS | sample;
        match spans.get(place as usize) {
            Some(span) if span.start > 0 => mix64(number ^ mix64(span.start.into())),
            _ => number,
        }
    };
    for (rank, microbatches) in ranks.iter().enumerate() {
        for (microbatch, places) in microbatches.iter().enumerate() {
            digest.add(step, rank, microbatch, places.iter().map(number));
        }
    }
    digest
}
