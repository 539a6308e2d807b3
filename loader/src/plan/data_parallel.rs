//! Compares layouts of ranks that each run a whole model, and ways to balance them.
//!
//! Layouts are DDP, `ZeRO` stages, FSDP and HSDP. Every way is judged by the same predicted times, and by
//! what ranks do besides: they wait for parameters and gradients of other ranks, as far as computing does not
//! hide that, and hold the activations of their largest microbatch. Random batches show how unevenly a
//! trainer without regard to cost loads its ranks.

use dflop_balancer::{Strategy, lockstep_ns, rank_step, shard_groups_ns};
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory, ReplicaMemory};
use dflop_costmodel::random::{SplitMix64, seed_from};
use dflop_costmodel::{
    DeviceLinks, ModelConstants, ModuleTraffic, RankLayout, SampleCost, SampleShape, Sharding,
};

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
    /// Mean seconds per step if ranks that meet in every layer also exchange media
    /// ([`StepPlanner::media_exchange`]), without the time for messages; `None` if ranks meet at the end of a
    /// step only, or there is no encoder.
    pub exchanged_seconds: Option<f64>,
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
    let synchronization = planner.synchronization().unwrap_or_default();
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
            if synchronization.meets_in_layers() {
                sums.exchanged_ns += u128::from(exchanged_ns(&planner, &plan, synchronization));
            }
            if let Some(traffic) = &traffic {
                sums.exposed_seconds += rank_step(&times_ns(&plan), layout, traffic).exposed_seconds;
            }
        }
        let strategy = match balance {
            RankBalance::Strategy(strategy) => *strategy,
            RankBalance::Tokens => Strategy::KARMARKAR_KARP,
        };
        let summary = sums.summary(strategy, layout, traffic.is_some(), training)?;
        let is_exchanged = synchronization.meets_in_layers() && planner.model().modules().len() > 1;
        Ok(RankSummary { exchanged_seconds: summary.exchanged_seconds.filter(|_| is_exchanged), ..summary })
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
    exchanged_ns: u128,
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
        let count = steps.step_seconds.len().max(1) as f64;
        let exposed_seconds = self.exposed_seconds / count;
        Ok(RankSummary {
            exchanged_seconds: Some(self.exchanged_ns as f64 / 1e9 / count),
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

/// Returns the step time in nanoseconds if the ranks in a shard group encode equal shares of their media,
/// with the same microbatches.
fn exchanged_ns(planner: &StepPlanner, plan: &StepPlan, synchronization: Synchronization) -> u64 {
    let modules = planner.model().modules();
    let encoders = modules.len().saturating_sub(1);
    let mut times = times_ns(plan);
    let shard_ranks = synchronization.shard_ranks(times.len());
    for first in (0..times.len()).step_by(shard_ranks.get()) {
        let group = first..times.len().min(first + shard_ranks.get());
        for slot in 0..times[first].len() {
            let mut loads = vec![vec![0_u64; modules.len()]; group.len()];
            for (at, &module) in modules[..encoders].iter().enumerate() {
                for exchanged in planner.media_exchange(plan, slot, group.clone(), module) {
                    let load = &mut loads[exchanged.encoder_rank - first][at];
                    *load = load.saturating_add(exchanged.medium.cost_ns);
                }
            }
            for (rank, load) in group.clone().zip(loads) {
                let encoded = plan.constants.microbatch_ns(load);
                times[rank][slot][..encoders].copy_from_slice(&encoded[..encoders]);
            }
        }
    }
    shard_groups_ns(&times, shard_ranks)
}

/// Unevenness of random microbatches on ranks that meet in every module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomBatches {
    /// Slowest rank's time over the mean rank's, with all modules, at least 1.
    pub slowest_over_mean: f64,
    /// Fraction of time in which ranks wait for slower ranks.
    pub idle_fraction: f64,
}

/// Draws microbatches at random, with repetition, and compares the slowest rank with the mean rank.
///
/// Equal arguments give equal results. `None` without samples, ranks or batches, or if no sample takes time.
///
/// - `costs`: sample costs to draw from
/// - `constants`: time of a microbatch in addition to the samples
/// - `ranks`, `samples`: number of ranks, and of samples in a microbatch
/// - `batches`: number of draws
///
/// # Examples
/// ```
/// use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};
/// use dflop_loader::deal_random_batches;
///
/// let model = CostModel::new(ModelSpec::preset("tiny")?, DeviceRate::preset("h100")?);
/// let cost = |text_tokens| model.predict(&SampleShape { text_tokens, ..SampleShape::default() });
/// let costs = [cost(100)?, cost(2000)?];
/// let constants = model.microbatch_constants();
/// let found = deal_random_batches(&costs, &constants, [8, 4], 100, 0).expect("samples with costs");
/// assert!(found.slowest_over_mean > 1.3 && found.idle_fraction > 0.2);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[must_use]
pub fn deal_random_batches(
    costs: &[SampleCost],
    constants: &ModelConstants,
    [ranks, samples]: [usize; 2],
    batches: usize,
    seed: u64,
) -> Option<RandomBatches> {
    let modules = costs.first()?.module_ns.as_slice().len();
    let mut random = SplitMix64::new(seed_from([seed, ranks as u64, samples as u64]));
    let mut microbatch = || {
        let mut added_ns = vec![0_u64; modules];
        for _ in 0..samples {
            let cost = &costs[random.below(costs.len())];
            for (sum, ns) in added_ns.iter_mut().zip(cost.module_ns.as_slice()) {
                *sum = sum.saturating_add(*ns);
            }
        }
        vec![constants.microbatch_ns(added_ns)]
    };
    let (mut slowest_ns, mut mean_ns) = (0.0, 0.0);
    for _ in 0..batches {
        let ranks_ns: Vec<Vec<Vec<u64>>> = (0..ranks).map(|_| microbatch()).collect();
        slowest_ns += lockstep_ns(&ranks_ns) as f64;
        let all_ns: u128 = ranks_ns.iter().flatten().flatten().copied().map(u128::from).sum();
        mean_ns += all_ns as f64 / ranks as f64;
    }
    (mean_ns > 0.0).then(|| RandomBatches {
        slowest_over_mean: slowest_ns / mean_ns,
        idle_fraction: 1.0 - mean_ns / slowest_ns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};

    fn costs(texts: &[u32]) -> Vec<SampleCost> {
        let model = CostModel::new(ModelSpec::preset("tiny").unwrap(), DeviceRate::preset("h100").unwrap());
        let cost = |&text_tokens: &u32| {
            model.predict(&SampleShape { text_tokens, ..SampleShape::default() }).unwrap()
        };
        texts.iter().map(cost).collect()
    }

    fn deal(texts: &[u32], ranks: usize) -> Option<RandomBatches> {
        deal_random_batches(&costs(texts), &ModelConstants::default(), [ranks, 1], 20_000, 7)
    }

    /// A rank has the long sample with probability 1/2, and the step is short only if no rank has it.
    #[test]
    fn unevenness_is_the_expected_maximum_over_the_mean() {
        let texts = [100, 1000];
        let [short, long] =
            [0, 1].map(|at| costs(&texts)[at].module_ns.as_slice().iter().map(|ns| *ns as f64).sum::<f64>());
        for ranks in [1, 2, 4] {
            let all_short = 0.5_f64.powi(ranks);
            let expected = (all_short * short + (1.0 - all_short) * long) / f64::midpoint(short, long);
            let found = deal(&texts, ranks as usize).unwrap();
            assert!((found.slowest_over_mean / expected - 1.0).abs() < 0.02, "{ranks}: {found:?} {expected}");
            assert!((found.idle_fraction - (1.0 - 1.0 / found.slowest_over_mean)).abs() < 1e-12);
        }
    }

    #[test]
    fn equal_samples_are_even_and_no_samples_are_nothing() {
        let even = deal(&[500, 500], 8).unwrap();
        assert!((even.slowest_over_mean - 1.0).abs() < 1e-12 && even.idle_fraction.abs() < 1e-12);
        assert_eq!(deal(&[], 8), None);
        assert_eq!(deal(&[500], 0), None);
    }
}
