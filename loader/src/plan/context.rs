//! Plans steps in which ranks share samples: context parallelism, sample by sample.
//!
//! A sample is whole on one rank, or split over 2, 4, 8, … neighboring ranks. Each takes a zigzag slice of
//! the sequence in the LLM, and single media in the encoders. Costs decide: a slice takes its exact part of
//! the work, and the time in which its rank waits for keys and values of the others.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::{
    Budget, Caps, ContextAssignment, ContextItem, ContextPlace, ContextProblem, ContextSlice, Strategy,
    balance_context, context_step_ns, rank_step,
};
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory};
use dflop_costmodel::{CostModel, KeyExchange, Module, SampleShape, SliceCost};

use super::compare_strategies::{StepSums, StrategySummary};
use super::data_parallel::RankTraining;
use super::media_shares::single_media;
use super::planner::StepPlanner;
use super::step_plan::StepPlan;
use crate::error::{Error, PlanError, Result};
use dflop_samples::media::Modality;

/// Ranks that may share a sample, and their exchange of keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ContextGroups {
    /// Smallest and largest number of ranks for a sample, powers of two; equal for one degree for all
    /// samples.
    pub ranks: [usize; 2],
    /// Exchange of keys and values.
    pub exchange: KeyExchange,
}

/// Planned step with whole and split samples.
#[derive(Debug, Clone)]
pub struct ContextPlan {
    /// Step with whole samples; its samples and costs are those of the split step.
    pub whole: StepPlan,
    /// Place of every sample.
    pub places: Vec<ContextPlace>,
    /// Predicted times in nanoseconds by rank, microbatch and module; samples on the same ranks share
    /// messages.
    pub times_ns: Vec<Vec<Vec<u64>>>,
    /// Tokens by rank, microbatch and module.
    pub tokens: Vec<Vec<Vec<u64>>>,
    /// Predicted time of the step.
    pub makespan_ns: u64,
    /// Lower bound on the time of every placement, whole or split.
    pub bound_ns: u64,
}

/// Simulated steps with whole and split samples.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextSummary {
    /// Smallest and largest number of ranks for a sample.
    pub group_ranks: [usize; 2],
    /// Step times with exposed messages between the ranks of a sample. The bound counts splits.
    pub steps: StrategySummary,
    /// Fraction of samples that are split.
    pub split_fraction: f64,
    /// Mean seconds per step in which ranks wait for parameters and gradients; `None` without links.
    pub exposed_seconds: Option<f64>,
    /// Memory on a rank with the largest microbatch of all steps.
    pub memory: RankMemory,
}

impl ContextPlan {
    /// Returns the number of samples that several ranks share.
    #[must_use]
    pub fn split_samples(&self) -> usize {
        self.places.iter().filter(|place| place.ranks.len() > 1).count()
    }
}

/// Values by rank, microbatch and module.
type Table = Vec<Vec<Vec<u64>>>;

/// A sample as the balancer sees it, and the encoder tokens of its media.
struct Sample {
    item: ContextItem,
    /// `[encoders][media]`.
    media_tokens: Vec<Vec<u64>>,
}

impl StepPlanner {
    /// Plans a step whose samples may be split over ranks, from the plan with whole samples. The same on all
    /// ranks, without communication.
    ///
    /// Microbatches keep the planner's caps, or, without a token cap, stay near each other in tokens, as in
    /// [`Self::plan`]. If whole samples do not fit, because one is longer than the token cap, all are placed
    /// anew. The result is never slower than whole samples if these are allowed.
    ///
    /// # Errors
    /// [`Error::Config`] for pipelines, fixed lengths, cost functions, and groups that do not fit the ranks;
    /// the errors of [`Self::plan`], but for samples above the caps that fit when split.
    pub fn plan_context(&self, step: u64, groups: &ContextGroups) -> Result<ContextPlan> {
        let Some(synchronization) = self.config.synchronization else {
            return Err(refused("needs ranks that run all modules, and these have a pipeline"));
        };
        if self.config.pad_to.is_some() {
            return Err(refused("microbatches of a fixed length have no room for slices"));
        }
        if self.cost_function.is_some() {
            return Err(refused("a cost function has no costs for slices"));
        }
        let (whole, is_within) = self.whole_step(step)?;
        let model = self.step_model(step);
        let samples = self.context_samples(&whole, &model, groups)?;
        let plan_error = |source| Error::Plan(PlanError::Unsolved { step, source });
        let shard_ranks = synchronization.shard_ranks(self.config.dp_size);
        let items = samples.iter().map(|sample| sample.item.clone()).collect();
        let problem = ContextProblem::new(
            [self.config.dp_size, self.config.microbatches],
            model.modules().len() - 1,
            items,
        )
        .and_then(|problem| problem.shard_ranks(shard_ranks)?.group_ranks(groups.ranks))
        .map_err(plan_error)?
        .constants(whole.constants.clone());
        let given = (is_within && groups.ranks[0] == 1).then_some(&whole.ranks[..]);
        let place = |problem: ContextProblem, given| {
            let caps = [self.context_caps(&whole), self.config.caps];
            let budget = || Budget::work(self.config.work);
            let near = balance_context(&problem.clone().caps(caps[0]), given, &mut budget());
            match near {
                // As for whole samples, only caps that were set are kept at all costs.
                Err(dflop_balancer::Error::CapUnmet { .. }) if caps[0] != caps[1] => {
                    balance_context(&problem.caps(caps[1]), given, &mut budget())
                }
                placed => placed,
            }
        };
        let timed = |found: ContextAssignment| -> Result<(ContextAssignment, Table, Table, u64)> {
            let (times_ns, tokens) = self.context_times(&whole, &model, &samples, &found, groups)?;
            let meetings = meetings(&found.places, self.config.microbatches);
            // Samples on the same ranks share messages, so this is not longer than the balancer's time.
            let makespan_ns = context_step_ns(&times_ns, &meetings, shard_ranks);
            Ok((found, times_ns, tokens, makespan_ns))
        };
        let own = place(problem.clone(), given).map_err(plan_error)?;
        let bound_ns = own.bound.ns;
        let (mut found, mut times_ns, mut tokens, mut makespan_ns) = timed(own)?;
        // The search counts the messages of every sample; with one degree for all, most of them are shared.
        let [least, most] = groups.ranks;
        let degrees = (least.ilog2().max(1)..=most.ilog2()).map(|log| 1 << log);
        for degree in degrees.filter(|_| least < most) {
            let even = problem.clone().group_ranks([degree; 2]).and_then(|problem| place(problem, None));
            let Ok(even) = even else { continue };
            let even = timed(even)?;
            if even.3 < makespan_ns {
                (found, times_ns, tokens, makespan_ns) = even;
            }
        }
        Ok(ContextPlan { whole, places: found.places, times_ns, tokens, makespan_ns, bound_ns })
    }

    /// Plans a step with whole samples; without caps, and `false`, if whole samples do not fit.
    fn whole_step(&self, step: u64) -> Result<(StepPlan, bool)> {
        use dflop_balancer::Error::{CapItem, CapTotal, CapUnmet};
        match self.plan(step) {
            Err(Error::Plan(PlanError::Unsolved {
                source: CapItem { .. } | CapTotal { .. } | CapUnmet { .. },
                ..
            })) => {
                let mut planner = self.clone().strategy(Strategy::ROUND_ROBIN);
                planner.config.caps = Caps::default();
                Ok((planner.plan(step)?, false))
            }
            planned => Ok((planned?, true)),
        }
    }

    /// Returns the caps of a microbatch, near the mean in tokens without a token cap.
    fn context_caps(&self, whole: &StepPlan) -> Caps {
        let caps = self.config.caps;
        if caps.tokens_max.is_some() || whole.is_near_mean_cap_dropped {
            return caps;
        }
        let tokens = || whole.costs.iter().map(|cost| u64::from(cost.tokens));
        let microbatches = (self.config.dp_size * self.config.microbatches) as u64;
        let (mean, longest) = (tokens().sum::<u64>().div_ceil(microbatches), tokens().max().unwrap_or(0));
        Caps { tokens_max: Some((mean + mean / 4).max(mean + longest)), ..caps }
    }

    /// Predicts media and slices of every sample.
    fn context_samples(
        &self,
        whole: &StepPlan,
        model: &CostModel,
        groups: &ContextGroups,
    ) -> Result<Vec<Sample>> {
        let mut shape = SampleShape::default();
        let logs = groups.ranks[1].max(1).ilog2();
        let mut samples = Vec::with_capacity(whole.samples.len());
        for (place, (sample, cost)) in whole.samples.iter().zip(&whole.costs).enumerate() {
            self.row(*sample).read_shape(&mut shape);
            let bytes = self.row(*sample).bytes();
            let module_ns = cost.module_ns.as_slice();
            let encoders = module_ns.len() - 1;
            let (mut media_ns, mut media_tokens) = (vec![Vec::new(); encoders], vec![Vec::new(); encoders]);
            if !whole.is_refused(place as u32) {
                for (modality, _, alone) in single_media(&shape) {
                    let module = if modality == Modality::Audio { Module::Audio } else { Module::Vision };
                    let Some(at) = model.modules().iter().position(|own| *own == module) else { continue };
                    // The sample was predicted with all media, so each medium can be predicted.
                    let Ok(own) = model.predict(&alone) else { continue };
                    media_ns[at].push(own.module_ns.as_slice()[at]);
                    media_tokens[at].push(u64::from(own.encoder_tokens));
                }
            }
            // Media are rounded one by one, the sample once.
            media_ns.iter_mut().zip(module_ns).for_each(|(media, whole_ns)| match_sum(media, *whole_ns));
            let mut slices = Vec::with_capacity(logs as usize + 1);
            for log in 0..=logs {
                let ranks = 1 << log;
                let own = model.predict_slices(cost.tokens, cost.target_tokens, ranks, &groups.exchange);
                let own = own.map_err(Error::Model)?;
                let most = |of: &dyn Fn(&SliceCost) -> u64| own.iter().map(of).max().unwrap_or(0);
                let ns = most(&|slice| slice.total_ns());
                let shared_ns = ns - most(&|slice| slice.llm_ns);
                let tokens = most(&|slice| slice.tokens.into());
                // A rank may have all media of the sample.
                slices.push(ContextSlice { ns, shared_ns, tokens, bytes });
            }
            if whole.is_refused(place as u32) {
                slices.truncate(groups.ranks[0].max(1).ilog2() as usize + 1);
                slices.fill(ContextSlice { bytes, ..ContextSlice::default() });
            }
            samples.push(Sample { item: ContextItem { media_ns, slices }, media_tokens });
        }
        Ok(samples)
    }

    /// Predicts every rank's microbatches: media where they are encoded, and the slices of all samples on the
    /// same ranks with their messages together.
    fn context_times(
        &self,
        whole: &StepPlan,
        model: &CostModel,
        samples: &[Sample],
        found: &ContextAssignment,
        groups: &ContextGroups,
    ) -> Result<(Table, Table)> {
        let (modules, slots) = (model.modules().len(), self.config.microbatches);
        let mut times_ns = vec![vec![vec![0_u64; modules]; slots]; self.config.dp_size];
        let mut tokens = times_ns.clone();
        let mut packs: BTreeMap<(usize, usize, usize), Vec<[u32; 2]>> = BTreeMap::new();
        for (place, (own, sample)) in found.places.iter().zip(samples).enumerate() {
            for (encoder, ranks) in own.media.iter().enumerate() {
                for (medium, &rank) in ranks.iter().enumerate() {
                    times_ns[rank][own.slot][encoder] += sample.item.media_ns[encoder][medium];
                    let encoded = sample.media_tokens[encoder].get(medium).copied().unwrap_or(0);
                    tokens[rank][own.slot][encoder] += encoded;
                }
            }
            let cost = whole.costs[place];
            let key = (own.slot, own.ranks.start, own.ranks.len());
            packs.entry(key).or_default().push([cost.tokens, cost.target_tokens]);
        }
        for ((slot, first, size), pack) in packs {
            let slices = model.predict_packed_slices(&pack, size as u32, &groups.exchange);
            for (rank, slice) in (first..first + size).zip(slices.map_err(Error::Model)?) {
                let (ns, own) =
                    (&mut times_ns[rank][slot][modules - 1], &mut tokens[rank][slot][modules - 1]);
                *ns = ns.saturating_add(slice.total_ns());
                *own += u64::from(slice.tokens);
            }
        }
        for times in times_ns.iter_mut().flatten() {
            *times = whole.constants.microbatch_ns(std::mem::take(times));
        }
        Ok((times_ns, tokens))
    }
}

fn refused(reason: &str) -> Error {
    Error::Config { setting: "context", reason: reason.to_owned() }
}

/// Changes the first values so that a sum is exact.
fn match_sum(values: &mut [u64], sum: u64) {
    let own = values.iter().copied().fold(0, u64::saturating_add);
    let (mut missing, mut excess) = (sum.saturating_sub(own), own.saturating_sub(sum));
    for value in values {
        *value = value.saturating_add(std::mem::take(&mut missing));
        let taken = excess.min(*value);
        *value -= taken;
        excess -= taken;
    }
}

/// Lists the groups of ranks that share samples, by slot.
fn meetings(places: &[ContextPlace], slots: usize) -> Vec<Vec<Range<usize>>> {
    let mut meetings = vec![Vec::new(); slots];
    for place in places.iter().filter(|place| place.ranks.len() > 1) {
        meetings[place.slot].push(place.ranks.clone());
    }
    meetings
}

/// Plans the same steps with several choices of groups, and simulates them. One degree for all samples that
/// fits no microbatch is left out.
///
/// # Errors
/// As [`StepPlanner::plan_context`].
pub fn compare_context(
    planner: &StepPlanner,
    choices: &[ContextGroups],
    steps: Range<u64>,
    training: &RankTraining<'_>,
) -> Result<Vec<ContextSummary>> {
    let layout = training.layout(planner).ok_or_else(|| refused("needs ranks without a pipeline"))?;
    let traffic = training.traffic(layout);
    let summarize = |groups: &ContextGroups| {
        let (mut sums, mut largest) = (StepSums::default(), LargestMicrobatch::default());
        let (mut exposed_seconds, mut split, mut samples) = (0.0, 0, 0);
        for step in steps.clone() {
            let plan = planner.plan_context(step, groups)?;
            sums.add_shared([plan.makespan_ns, plan.bound_ns], &plan.times_ns);
            (split, samples) = (split + plan.split_samples(), samples + plan.places.len());
            for tokens in plan.tokens.iter().flatten() {
                largest.add(&training.memory, tokens.clone()).map_err(Error::Model)?;
            }
            if let Some(traffic) = &traffic {
                exposed_seconds += rank_step(&plan.times_ns, layout, traffic).exposed_seconds;
            }
        }
        let steps = sums.summary(planner.config.strategy);
        let count = steps.step_seconds.len().max(1) as f64;
        Ok(ContextSummary {
            group_ranks: groups.ranks,
            split_fraction: split as f64 / samples.max(1) as f64,
            exposed_seconds: traffic.is_some().then_some(exposed_seconds / count),
            memory: training.memory.rank(layout, largest.tokens()).map_err(Error::Model)?,
            steps,
        })
    };
    let mut summaries = Vec::with_capacity(choices.len());
    for groups in choices {
        match summarize(groups) {
            Err(Error::Plan(PlanError::Unsolved {
                source: dflop_balancer::Error::CapUnmet { .. } | dflop_balancer::Error::CapItem { .. },
                ..
            })) if groups.ranks[0] > 1 => {}
            summary => summaries.push(summary?),
        }
    }
    Ok(summaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_matched_from_the_front() {
        for (mut values, sum, expected) in [
            (vec![3, 4], 9, vec![5, 4]),
            (vec![3, 4], 7, vec![3, 4]),
            (vec![1, 4], 3, vec![0, 3]),
            (vec![], 5, vec![]),
        ] {
            match_sum(&mut values, sum);
            assert_eq!(values, expected);
        }
    }
}
