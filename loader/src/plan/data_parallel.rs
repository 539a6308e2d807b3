//! Compares layouts of ranks that each run a whole model, and ways to balance them.
//!
//! Layouts are DDP, `ZeRO` stages, FSDP and HSDP. Every way is judged by the same predicted times, and by
//! what ranks do besides: they wait for parameters and gradients of other ranks, as far as computing does not
//! hide that, and hold the activations of their largest microbatch.

use dflop_balancer::{Strategy, rank_step};
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory, ReplicaMemory};
use dflop_costmodel::{DeviceLinks, ModuleTraffic, RankLayout, SampleShape, Sharding};

use super::compare_strategies::{StepSums, StrategySummary};
use super::lockstep::{Synchronization, times_ns};
use super::planner::StepPlanner;
use super::step_plan::StepPlan;
use crate::error::{Error, Result};

/// Assignment of samples to ranks and microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankBalance {
    /// By a strategy.
    Strategy(Strategy),
    /// By LLM tokens, see [`StepPlanner::plan_by_tokens`].
    Tokens,
}

/// Training of a whole model on every rank, with a GPU each.
#[derive(Debug, Clone)]
pub struct RankTraining<'a> {
    /// Memory of a rank.
    pub memory: ReplicaMemory<'a>,
    /// Links between GPUs; `None` if unknown, and communication is not counted.
    pub links: Option<DeviceLinks>,
    /// GPUs per node.
    pub gpus_per_node: u32,
}

/// Simulated steps of ranks without a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct RankSummary {
    /// Step times without communication.
    pub steps: StrategySummary,
    /// Mean seconds per step in which ranks wait for parameters and gradients; `None` without links.
    pub exposed_seconds: Option<f64>,
    /// Memory on a rank with the largest microbatch of all steps.
    pub memory: RankMemory,
    /// Tokens inside every module in that microbatch, encoders first.
    pub microbatch_tokens: Vec<u64>,
}

/// Simulated steps under a layout, data-blind and balanced by search.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutSummary {
    /// Layout.
    pub layout: RankLayout,
    /// Mean step in seconds without communication, data-blind.
    pub blind_seconds: f64,
    /// Mean step in seconds without communication, balanced.
    pub step_seconds: f64,
    /// Mean seconds per balanced step in which ranks wait for parameters and gradients; `None` without links.
    pub exposed_seconds: Option<f64>,
    /// Data-blind time over balanced time, with exposed communication in both where it is known.
    pub speedup: f64,
    /// Memory on a rank with the largest balanced microbatch of all steps.
    pub memory: RankMemory,
}

impl RankTraining<'_> {
    /// Returns the layout of a planner's ranks: FSDP, HSDP or DDP by the point at which ranks wait for each
    /// other; `None` for a pipeline.
    #[must_use]
    pub fn layout(&self, planner: &StepPlanner) -> Option<RankLayout> {
        let shard_ranks = planner.synchronization()?.shard_ranks(planner.dp_size()).get();
        let count = |ranks: usize| u32::try_from(ranks).unwrap_or(u32::MAX);
        let ddp = RankLayout::replicated(count(planner.dp_size()), self.gpus_per_node);
        Some(ddp.sharded(Sharding::Parameters, count(shard_ranks)))
    }

    /// Returns the communication of every module, encoders first; `None` without links.
    #[must_use]
    pub fn traffic(&self, layout: RankLayout) -> Option<Vec<ModuleTraffic>> {
        let links = self.links?;
        let traffic = |parameters| ModuleTraffic::new(parameters, layout, &links);
        Some(self.memory.modules().iter().map(traffic).collect())
    }
}

/// Plans the same steps in each way, and simulates ranks that run all modules.
///
/// # Errors
/// [`Error::Config`] if the planner is for a pipeline; [`Error::Plan`] if a step cannot be planned.
pub fn compare_ranks(
    planner: &StepPlanner,
    balances: &[RankBalance],
    steps: std::ops::Range<u64>,
    training: &RankTraining<'_>,
) -> Result<Vec<RankSummary>> {
    let layout = training.layout(planner).ok_or_else(no_ranks)?;
    let traffic = training.traffic(layout);
    let summarize = |balance: &RankBalance| {
        let mut sums = RankSums::default();
        let planner = match balance {
            RankBalance::Strategy(strategy) => planner.clone().strategy(*strategy),
            RankBalance::Tokens => planner.clone(),
        };
        for step in steps.clone() {
            let plan = match balance {
                RankBalance::Strategy(_) => planner.plan(step)?,
                RankBalance::Tokens => planner.plan_by_tokens(step)?,
            };
            sums.steps.add_lockstep(&plan);
            add_microbatches(&mut sums.largest, &planner, &plan, training)?;
            if let Some(traffic) = &traffic {
                sums.exposed_seconds += rank_step(&times_ns(&plan), layout, traffic).exposed_seconds;
            }
        }
        let strategy = match balance {
            RankBalance::Strategy(strategy) => *strategy,
            RankBalance::Tokens => Strategy::KARMARKAR_KARP,
        };
        sums.summary(strategy, layout, traffic.is_some(), training)
    };
    balances.iter().map(summarize).collect()
}

/// Plans the same steps for every layout, data-blind and by [`Strategy::SEARCH`], and simulates them.
///
/// `ZeRO-2` runs the plans for FSDP, whose slowest rank in every module bounds the slowest rank in a
/// microbatch, and `ZeRO-1` runs the plans for DDP.
///
/// # Errors
/// As [`compare_ranks`].
///
/// # Panics
/// If a layout has other ranks than the planner.
pub fn compare_layouts(
    planner: &StepPlanner,
    layouts: &[RankLayout],
    steps: std::ops::Range<u64>,
    training: &RankTraining<'_>,
) -> Result<Vec<LayoutSummary>> {
    if !planner.is_lockstep() {
        return Err(no_ranks());
    }
    let blind = PlannedSteps::new(&planner.clone().strategy(Strategy::ROUND_ROBIN), steps.clone(), training)?;
    let mut searched: Vec<(Synchronization, PlannedSteps)> = Vec::new();
    let mut summaries = Vec::with_capacity(layouts.len());
    for layout in layouts {
        assert_eq!(layout.ranks as usize, planner.dp_size(), "a layout of the planner's ranks");
        let synchronization = Synchronization::from(*layout);
        if searched.iter().all(|(known, _)| *known != synchronization) {
            let mut planner = planner.clone().strategy(Strategy::SEARCH);
            planner.config.synchronization = Some(synchronization);
            searched.push((synchronization, PlannedSteps::new(&planner, steps.clone(), training)?));
        }
        let Some((_, balanced)) = searched.iter().find(|(known, _)| *known == synchronization) else {
            unreachable!("the steps were planned above");
        };
        let traffic = training.traffic(*layout);
        let [blind_means, means] =
            [&blind, balanced].map(|planned| planned.means(*layout, traffic.as_deref().unwrap_or(&[])));
        let [blind_whole, whole] = [blind_means, means].map(|[computed, exposed]| computed + exposed);
        summaries.push(LayoutSummary {
            layout: *layout,
            blind_seconds: blind_means[0],
            step_seconds: means[0],
            exposed_seconds: traffic.is_some().then_some(means[1]),
            speedup: if whole > 0.0 { blind_whole / whole } else { 1.0 },
            memory: training.memory.rank(*layout, balanced.largest.tokens()).map_err(Error::Model)?,
        });
    }
    Ok(summaries)
}

fn no_ranks() -> Error {
    Error::Config { setting: "stages", reason: "ranks without a pipeline have no stages".into() }
}

/// Planned steps with the largest microbatch.
#[derive(Debug, Default)]
struct PlannedSteps {
    /// Nanoseconds by step, rank, microbatch and module.
    times_ns: Vec<Vec<Vec<Vec<u64>>>>,
    largest: LargestMicrobatch,
}

impl PlannedSteps {
    fn new(planner: &StepPlanner, steps: std::ops::Range<u64>, training: &RankTraining<'_>) -> Result<Self> {
        let mut planned = Self::default();
        for step in steps {
            let plan = planner.plan(step)?;
            add_microbatches(&mut planned.largest, planner, &plan, training)?;
            planned.times_ns.push(times_ns(&plan));
        }
        Ok(planned)
    }

    /// Returns the mean step in seconds without communication, and the mean exposed seconds.
    fn means(&self, layout: RankLayout, traffic: &[ModuleTraffic]) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for ranks_ns in &self.times_ns {
            let step = rank_step(ranks_ns, layout, traffic);
            sums[0] += step.compute_ns as f64 / 1e9;
            sums[1] += step.exposed_seconds;
        }
        sums.map(|sum| sum / self.times_ns.len().max(1) as f64)
    }
}

/// Sums over planned steps, with the largest microbatch.
#[derive(Debug, Default)]
struct RankSums {
    steps: StepSums,
    exposed_seconds: f64,
    largest: LargestMicrobatch,
}

impl RankSums {
    fn summary(
        self,
        strategy: Strategy,
        layout: RankLayout,
        has_links: bool,
        training: &RankTraining<'_>,
    ) -> Result<RankSummary> {
        let steps = self.steps.summary(strategy);
        let exposed_seconds = self.exposed_seconds / steps.step_seconds.len().max(1) as f64;
        Ok(RankSummary {
            exposed_seconds: has_links.then_some(exposed_seconds),
            memory: training.memory.rank(layout, self.largest.tokens()).map_err(Error::Model)?,
            microbatch_tokens: self.largest.tokens().to_vec(),
            steps,
        })
    }
}

/// Adds all microbatches in a plan.
fn add_microbatches(
    largest: &mut LargestMicrobatch,
    planner: &StepPlanner,
    plan: &StepPlan,
    training: &RankTraining<'_>,
) -> Result<()> {
    let samples = sample_tokens(planner, plan);
    for places in plan.ranks.iter().flatten() {
        let tokens = microbatch_tokens(planner, &samples, places);
        largest.add(&training.memory, tokens).map_err(Error::Model)?;
    }
    Ok(())
}

/// Returns the tokens of every sample inside every module, `[samples, modules]`; 0 in an encoder that rejects
/// the sample.
fn sample_tokens(planner: &StepPlanner, plan: &StepPlan) -> Vec<Vec<u64>> {
    let (spec, mut shape) = (planner.model().spec(), SampleShape::default());
    let mut rows = Vec::with_capacity(plan.samples.len());
    for (sample, cost) in plan.samples.iter().zip(&plan.costs) {
        planner.row(*sample).read_shape(&mut shape);
        let encoders = spec.encoders().map(|(_, _, rule)| rule.work(&shape));
        let encoders = encoders.map(|work| work.map_or(0, |work| work.encoder_tokens));
        rows.push(encoders.chain([u64::from(cost.tokens)]).collect());
    }
    rows
}

/// Returns the tokens of a microbatch inside every module, padding to a fixed length included.
fn microbatch_tokens(planner: &StepPlanner, samples: &[Vec<u64>], places: &[u32]) -> Vec<u64> {
    let modules = planner.model().modules().len();
    let mut tokens = vec![0_u64; modules];
    for &place in places {
        for (sum, own) in tokens.iter_mut().zip(&samples[place as usize]) {
            *sum = sum.saturating_add(*own);
        }
    }
    if let (Some(llm), Some(to)) = (tokens.last_mut(), planner.pad_to()) {
        *llm = llm.saturating_add(to.padding_tokens(places.len(), *llm));
    }
    tokens
}
