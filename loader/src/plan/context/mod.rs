//! Plans steps in which ranks share samples: context parallelism, sample by sample.
//!
//! A sample is whole on one rank, or split over 2, 4, 8, … neighboring ranks. Each takes a zigzag slice of
//! the sequence in the LLM, and media, or parts of media, in the encoders. Costs decide: a slice takes its
//! exact part of the work, and the time in which its rank waits for keys and values of the others.

mod compare;
mod samples;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::{
    Budget, Caps, ContextAssignment, ContextItem, ContextPlace, ContextProblem, ContextSlice, LowerBound,
    PipelineConfig, Strategy, balance_context, context_pipeline_ns, context_step_ns,
};
use dflop_costmodel::{CostModel, MessageLatency, ModelConstants};

use super::config::ContextGroups;
use super::lockstep::Synchronization;
use super::planner::StepPlanner;
use super::step_context::{MediumPart, SamplePlace, StepContext};
use super::step_plan::{StepPlan, digest};
use crate::error::{Error, PlanError, Result};
use samples::Sample;

pub use compare::{ContextSummary, compare_context};

/// Planned step with whole and split samples.
#[derive(Debug, Clone)]
pub struct ContextPlan {
    /// Step with whole samples; its samples and costs are those of the split step.
    pub whole: StepPlan,
    /// Place of every sample.
    pub places: Vec<ContextPlace>,
    /// Parts of media by sample, with the rank that encodes each.
    pub media: Vec<Vec<MediumPart>>,
    /// Predicted times in nanoseconds by rank, microbatch and module; samples on the same ranks share
    /// messages.
    pub times_ns: Vec<Vec<Vec<u64>>>,
    /// Tokens by rank, microbatch and module.
    pub tokens: Vec<Vec<Vec<u64>>>,
    /// Predicted time of the step.
    pub makespan_ns: u64,
    /// Lower bound on the time of every placement, whole or split.
    pub bound: LowerBound,
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

/// Divisor for the planner's work in the largest search among whole and split samples.
const SEARCH_DIVISOR: u64 = 5;

impl StepPlanner {
    /// Plans a step whose samples may be split over ranks, from the plan with whole samples. The same on all
    /// ranks, without communication.
    ///
    /// Microbatches keep the planner's caps, or, without a token cap, stay near each other in tokens, as in
    /// [`Self::plan`]. If whole samples do not fit, because one is longer than the token cap, all are placed
    /// anew. The result is never slower than whole samples if these are allowed.
    ///
    /// # Errors
    /// [`Error::Config`] for pipelines whose modules have different DP sizes or share stages, fixed lengths,
    /// cost functions, and groups that do not fit the ranks; the errors of [`Self::plan`], but for samples
    /// above the caps that fit when split.
    pub fn plan_context(&self, step: u64, groups: &ContextGroups) -> Result<ContextPlan> {
        self.check_context(groups)?;
        self.split_samples(self.whole_step(step)?, groups)
    }

    /// Splits the samples of a step.
    ///
    /// - `whole`: whole samples, and the work units of their search; `None` if they do not fit
    fn split_samples(
        &self,
        (whole, work_spent): (StepPlan, Option<u64>),
        groups: &ContextGroups,
    ) -> Result<ContextPlan> {
        let meeting = self.check_context(groups)?;
        let step = whole.step;
        let model = self.step_model(step);
        let mut samples = self.context_samples(&whole, &model, groups)?;
        let plan_error = |source| Error::Plan(PlanError::Unsolved { step, source });
        let slots = self.config.microbatches;
        let latency = |log: u32| Ok(meeting.latency(model.message_latencies(1 << log, &groups.exchange)?));
        let latencies: Vec<MessageLatency> =
            (0..=groups.ranks[1].ilog2()).map(latency).collect::<Result<_, _>>().map_err(Error::Model)?;
        let items = samples.iter().map(|sample| meeting.item(&sample.item)).collect();
        let problem = ContextProblem::new([self.config.dp_size, slots], model.modules().len() - 1, items)
            .and_then(|problem| meeting.set(problem)?.group_ranks(groups.ranks)?.latencies(latencies))
            .map_err(plan_error)?
            .constants(meeting.constants(&whole.constants));
        let given = work_spent.filter(|_| groups.ranks[0] == 1).map(|_| &whole.ranks[..]);
        // Searching for splits takes no longer than the search for whole samples took.
        let work = work_spent.unwrap_or(u64::MAX).min(self.config.work / SEARCH_DIVISOR);
        // Half of the search is for the number of ranks.
        let work = if groups.ranks[0] == groups.ranks[1] { work / 2 } else { work };
        let mut found = self.place(problem, &whole, given, work).map_err(plan_error)?;
        let timed = |places: &[ContextPlace]| -> Result<(Table, Table, u64)> {
            let (mut times_ns, tokens) = self.context_times(&whole, &model, &samples, places, groups)?;
            let makespan_ns =
                meeting.step_ns(&times_ns, &meetings(places, slots), &whole.constants).map_err(plan_error)?;
            for times in times_ns.iter_mut().flatten() {
                *times = whole.constants.microbatch_ns(std::mem::take(times));
            }
            Ok((times_ns, tokens, makespan_ns))
        };
        let mut table = timed(&found.places)?;
        if given.is_some() && table.2 > whole.makespan_ns {
            // The balancer counts the mean pass over the layers, so exact messages may take longer.
            found.places = whole_places(&whole, &samples);
            table = timed(&found.places)?;
        }
        let (times_ns, tokens, makespan_ns) = table;
        let media = samples.iter_mut().zip(&found.places).map(|(sample, place)| sample.placed_parts(place));
        let media = media.collect();
        Ok(ContextPlan {
            whole,
            places: found.places,
            media,
            times_ns,
            tokens,
            makespan_ns,
            bound: found.bound,
        })
    }

    /// Checks that samples can be split over ranks.
    pub(super) fn check_context(&self, groups: &ContextGroups) -> Result<Meeting> {
        if self.config.pad_to.is_some() {
            return Err(refused("microbatches of a fixed length have no room for slices"));
        }
        if self.cost_function.is_some() {
            return Err(refused("a cost function has no costs for slices"));
        }
        if self.config.context.is_some() && self.config.strategy.is_blind() {
            return Err(refused("a data-blind strategy splits no sample"));
        }
        if self.config.stage_layers.is_some() {
            return Err(refused("stages with layers of several modules have no slices"));
        }
        let meeting = match self.config.synchronization {
            Some(synchronization) => Meeting::Ranks(synchronization),
            None => Meeting::Pipelines(self.pipeline()),
        };
        let encoders = self.model.modules().len() - 1;
        ContextProblem::new([self.config.dp_size, 1], encoders, Vec::new())
            .and_then(|problem| meeting.set(problem)?.group_ranks(groups.ranks))
            .map_err(|error| refused(&error.to_string()))?;
        Ok(meeting)
    }

    /// Places samples within the caps of microbatches.
    ///
    /// - `work`: work units
    fn place(
        &self,
        problem: ContextProblem,
        whole: &StepPlan,
        given: Option<&[Vec<Vec<u32>>]>,
        work: u64,
    ) -> dflop_balancer::Result<ContextAssignment> {
        let caps = [self.context_caps(whole), self.config.caps];
        let budget = || Budget::work(work);
        let near = balance_context(&problem.clone().caps(caps[0]), given, &mut budget());
        match near {
            // As for whole samples, only caps that were set are kept at all costs.
            Err(dflop_balancer::Error::CapUnmet { .. }) if caps[0] != caps[1] => {
                balance_context(&problem.caps(caps[1]), given, &mut budget())
            }
            placed => placed,
        }
    }

    /// Plans a step with whole samples, and returns the work units that this took; without caps, and `None`,
    /// if whole samples do not fit.
    fn whole_step(&self, step: u64) -> Result<(StepPlan, Option<u64>)> {
        use dflop_balancer::Error::{CapItem, CapTotal, CapUnmet};
        match self.plan_whole(step) {
            Err(Error::Plan(PlanError::Unsolved {
                source: CapItem { .. } | CapTotal { .. } | CapUnmet { .. },
                ..
            })) => {
                let mut planner = self.clone().strategy(Strategy::ROUND_ROBIN);
                planner.config.caps = Caps::default();
                Ok((planner.plan_whole(step)?.0, None))
            }
            planned => planned.map(|(whole, work_spent)| (whole, Some(work_spent))),
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

    /// Predicts the samples in every rank's microbatches: media where they are encoded, and the slices of all
    /// samples on the same ranks with their messages together.
    fn context_times(
        &self,
        whole: &StepPlan,
        model: &CostModel,
        samples: &[Sample],
        places: &[ContextPlace],
        groups: &ContextGroups,
    ) -> Result<(Table, Table)> {
        let (modules, slots) = (model.modules().len(), self.config.microbatches);
        let mut times_ns = vec![vec![vec![0_u64; modules]; slots]; self.config.dp_size];
        let mut tokens = times_ns.clone();
        let mut packs: BTreeMap<(usize, usize, usize), Vec<[u32; 2]>> = BTreeMap::new();
        for (place, (own, sample)) in places.iter().zip(samples).enumerate() {
            for (encoder, ranks) in own.media.iter().enumerate() {
                for (part, &rank) in ranks.iter().enumerate() {
                    times_ns[rank][own.slot][encoder] += sample.item.media_ns[encoder][part];
                    tokens[rank][own.slot][encoder] += sample.part_tokens[encoder][part];
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
        Ok((times_ns, tokens))
    }
}

/// What ranks wait for.
pub(super) enum Meeting {
    /// Each other, where they run all modules.
    Ranks(Synchronization),
    /// The stages before and after, in pipelines.
    Pipelines(PipelineConfig),
}

impl Meeting {
    /// Sets where the ranks of a problem meet.
    fn set(&self, problem: ContextProblem) -> dflop_balancer::Result<ContextProblem> {
        match self {
            Self::Ranks(synchronization) => {
                let ranks = synchronization.shard_ranks(problem.ranks());
                problem.shard_ranks(ranks)
            }
            Self::Pipelines(config) => problem.pipeline(config),
        }
    }

    /// Returns the stages of a module whose time is counted.
    fn stages(&self, module: usize) -> u64 {
        match self {
            Self::Ranks(_) => 1,
            Self::Pipelines(config) => config.stages[module] as u64,
        }
    }

    /// Returns the times of an item in a stage of every module, from those in all stages.
    fn item(&self, item: &ContextItem) -> ContextItem {
        let mut item = item.clone();
        for (encoder, media_ns) in item.media_ns.iter_mut().enumerate() {
            let stages = self.stages(encoder);
            // Media are rounded together.
            let mut before = 0;
            for ns in media_ns {
                let all = before + *ns;
                *ns = all.div_ceil(stages) - u64::div_ceil(before, stages);
                before = all;
            }
        }
        let stages = self.stages(item.media_ns.len());
        for slice in &mut item.slices {
            let message_ns = slice.message_ns.div_euclid(stages as i64);
            *slice = ContextSlice { ns: slice.ns.div_ceil(stages), message_ns, ..*slice };
        }
        item
    }

    /// Returns the latency of the messages in a stage of the LLM, from that in all stages.
    fn latency(&self, of_all: MessageLatency) -> MessageLatency {
        let stages = match self {
            Self::Ranks(_) => 1,
            Self::Pipelines(config) => config.stages.last().map_or(1, |stages| *stages as u64),
        };
        let MessageLatency { exposed_ns, hidden_ns } = of_all;
        MessageLatency { exposed_ns: exposed_ns.div_ceil(stages), hidden_ns: hidden_ns.div_ceil(stages) }
    }

    /// Returns the constants of a stage of every module.
    fn constants(&self, constants: &ModelConstants) -> ModelConstants {
        match self {
            Self::Ranks(_) => constants.clone(),
            Self::Pipelines(_) => {
                let modules = constants.modules.iter().enumerate();
                let modules = modules.map(|(module, own)| own.share([1, self.stages(module)]));
                ModelConstants { modules: modules.collect(), whole: None }
            }
        }
    }

    /// Returns the time of the step.
    ///
    /// - `ranks_ns`: time of the samples by rank, slot and module
    fn step_ns(
        &self,
        ranks_ns: &[Vec<Vec<u64>>],
        meetings: &[Vec<Range<usize>>],
        constants: &ModelConstants,
    ) -> dflop_balancer::Result<u64> {
        let constants = self.constants(constants);
        let stage = |(module, ns): (usize, &u64)| ns.div_ceil(self.stages(module));
        let slot = |ns: &Vec<u64>| constants.microbatch_ns(ns.iter().enumerate().map(stage).collect());
        let ranks_ns: Vec<Vec<Vec<u64>>> =
            ranks_ns.iter().map(|slots| slots.iter().map(slot).collect()).collect();
        match self {
            Self::Ranks(synchronization) => {
                let shard_ranks = synchronization.shard_ranks(ranks_ns.len());
                Ok(context_step_ns(&ranks_ns, meetings, shard_ranks))
            }
            Self::Pipelines(config) => context_pipeline_ns(&ranks_ns, meetings, config),
        }
    }
}

fn refused(reason: &str) -> Error {
    Error::Config { setting: "context", reason: reason.to_owned() }
}

/// Returns where a plan has whole samples.
fn whole_places(whole: &StepPlan, samples: &[Sample]) -> Vec<ContextPlace> {
    let mut places = vec![ContextPlace { slot: 0, ranks: 0..1, media: Vec::new() }; samples.len()];
    for (rank, microbatches) in whole.ranks.iter().enumerate() {
        for (slot, &at) in
            microbatches.iter().enumerate().flat_map(|(slot, own)| own.iter().map(move |at| (slot, at)))
        {
            let media = samples[at as usize].parts.iter().map(|parts| vec![rank; parts.len()]).collect();
            places[at as usize] = ContextPlace { slot, ranks: rank..rank + 1, media };
        }
    }
    places
}

/// Lists the groups of ranks that share samples, by slot.
fn meetings(places: &[ContextPlace], slots: usize) -> Vec<Vec<Range<usize>>> {
    let mut meetings = vec![Vec::new(); slots];
    for place in places.iter().filter(|place| place.ranks.len() > 1) {
        meetings[place.slot].push(place.ranks.clone());
    }
    meetings
}

impl From<ContextPlan> for StepPlan {
    /// Lists a split sample in the microbatch of every rank in its group. Split samples come first, the
    /// largest groups before smaller ones: the order in which all ranks exchange keys and values.
    fn from(plan: ContextPlan) -> Self {
        let ContextPlan { whole, places, media, times_ns, makespan_ns, bound, .. } = plan;
        let mut ranks: Vec<Vec<Vec<u32>>> =
            whole.ranks.iter().map(|microbatches| vec![Vec::new(); microbatches.len()]).collect();
        let mut order: Vec<u32> = (0..places.len() as u32).collect();
        order.sort_by_key(|&at| (Reverse(places[at as usize].ranks.len()), at));
        for at in order {
            let place = &places[at as usize];
            place.ranks.clone().for_each(|rank| ranks[rank][place.slot].push(at));
        }
        let places = places.into_iter().zip(media).map(|(place, media)| SamplePlace {
            microbatch: place.slot,
            ranks: place.ranks,
            media,
        });
        let places: Vec<SamplePlace> = places.collect();
        let mut digest = digest(whole.step, &ranks, &whole.samples, &whole.spans);
        for (at, place) in places.iter().enumerate().filter(|(_, place)| place.is_split()) {
            let encoders = place.media.iter().flat_map(|part| [part.rank as u64, part.parts.end]);
            let words: Vec<u64> =
                [place.ranks.start as u64, place.ranks.end as u64].into_iter().chain(encoders).collect();
            digest.add(whole.step, at, place.microbatch, words);
        }
        let context = Some(StepContext { places, times_ns });
        Self { ranks, makespan_ns, bound, context, digest, ..whole }
    }
}
