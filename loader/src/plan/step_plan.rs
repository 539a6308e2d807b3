//! Planned step: samples per microbatch and rank, and stages that hold layers of several modules.

use crate::error::{Error, Result};
use crate::order::StepSample;
use dflop_balancer::{LowerBound, PipelineAssignment, PlanDigest};
use dflop_costmodel::{LaunchLimit, MicrobatchConstants, ModelConstants, Module, SampleCost};
use serde::{Deserialize, Serialize};

/// Fraction of step time from which launches limit the step.
const LAUNCH_SHARE_NOTICED: f64 = 0.5;

/// A step cut into ranks and microbatches.
pub(super) struct StepCut {
    pub(super) assignment: PipelineAssignment,
    pub(super) is_near_mean_cap_dropped: bool,
}

impl From<PipelineAssignment> for StepCut {
    fn from(assignment: PipelineAssignment) -> Self {
        Self { assignment, is_near_mean_cap_dropped: false }
    }
}

/// Planned global batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepPlan {
    /// Step number.
    pub step: u64,
    /// The samples, in global order.
    pub samples: Vec<StepSample>,
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

/// Layers per module in the stages of a chain.
///
/// Neighbors with the same layers per module are a stage kind, which replaces a module in the partition
/// problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StageLayers {
    /// Layers per module in each stage kind, and the number of such stages.
    kinds: Vec<(Vec<usize>, usize)>,
    /// Total layers per module.
    totals: Vec<usize>,
}

impl StageLayers {
    /// - `layers`: `[modules, stages]`; a module without any layer takes no time
    pub(super) fn new(layers: &[Vec<usize>], modules: &[Module], stages_max: usize) -> Result<Self> {
        let invalid = |reason: String| Err(Error::Config { setting: "stage_layers", reason });
        let stages = layers.first().map_or(0, Vec::len);
        let is_even = layers.iter().all(|layers| layers.len() == stages);
        if layers.len() != modules.len() || !is_even || !(1..=stages_max).contains(&stages) {
            let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
            return invalid(format!(
                "give the layers in each of 1 to {stages_max} stages, for each of {}",
                names.join(", ")
            ));
        }
        let columns = (0..stages).map(|stage| layers.iter().map(|layers| layers[stage]).collect::<Vec<_>>());
        let columns: Vec<Vec<usize>> = columns.collect();
        if let Some(stage) = columns.iter().position(|column| column.iter().all(|layers| *layers == 0)) {
            return invalid(format!("stage {stage} has no layer"));
        }
        let totals: Vec<usize> = layers.iter().map(|layers| layers.iter().sum()).collect();
        if totals.last() == Some(&0) {
            return invalid("the LLM has no layer".to_owned());
        }
        let kinds = columns.chunk_by(|one, other| one == other).map(|run| (run[0].clone(), run.len()));
        Ok(Self { kinds: kinds.collect(), totals })
    }

    /// Returns the number of stages per kind.
    pub(super) fn stages(&self) -> Vec<usize> {
        self.kinds.iter().map(|(_, stages)| *stages).collect()
    }

    /// Returns the microbatch constants in one stage per kind.
    pub(super) fn constants(&self, of_modules: &[MicrobatchConstants]) -> Vec<MicrobatchConstants> {
        let of_kind = |(layers, _): &(Vec<usize>, usize)| {
            let layers = layers.iter().zip(&self.totals).map(|(part, all)| [*part as u64, *all as u64]);
            let shares = of_modules.iter().zip(layers).map(|(constants, share)| constants.share(share));
            shares.fold(MicrobatchConstants::default(), MicrobatchConstants::plus)
        };
        self.kinds.iter().map(of_kind).collect()
    }

    /// Returns the sample time in one stage per kind, in nanoseconds, rounded up.
    pub(super) fn stage_ns(&self, cost: &SampleCost) -> impl Iterator<Item = u64> {
        let module_ns = cost.module_ns;
        self.kinds.iter().map(move |(layers, _)| {
            let of_module = |(ns, (layers, total)): (&u64, (&usize, &usize))| {
                // Nanoseconds times layers may exceed 64 bits.
                (u128::from(*ns) * *layers as u128).div_ceil((*total).max(1) as u128) as u64
            };
            module_ns.as_slice().iter().zip(layers.iter().zip(&self.totals)).map(of_module).sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULES: [Module; 2] = [Module::Vision, Module::Llm];

    #[test]
    fn neighbors_with_the_same_layers_are_one_kind() {
        let layers = StageLayers::new(&[vec![4, 2, 0, 0], vec![0, 1, 3, 3]], &MODULES, 8).unwrap();
        assert_eq!(layers.stages(), [1, 1, 2]);
        let colocated = StageLayers::new(&[vec![0, 0], vec![5, 5]], &MODULES, 8).unwrap();
        assert_eq!(colocated.stages(), [2]);
    }

    #[test]
    fn wrong_layers_are_refused_by_name() {
        for (layers, reason) in [
            (vec![vec![1, 0]], "give the layers in each of 1 to 8 stages, for each of vision, llm"),
            (vec![vec![1], vec![1, 1]], "give the layers"),
            (vec![vec![], vec![]], "give the layers"),
            (vec![vec![1, 0, 0], vec![0, 0, 1]], "stage 1 has no layer"),
            (vec![vec![1], vec![0]], "the LLM has no layer"),
        ] {
            let error = StageLayers::new(&layers, &MODULES, 8).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
