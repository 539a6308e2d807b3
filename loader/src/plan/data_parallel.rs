//! Compares ways to balance ranks that each run a whole model: DDP, FSDP and HSDP.
//!
//! Every way is judged by the same predicted times, and by what ranks do besides: they wait for parameters
//! and gradients of others, as far as computing does not hide that, and hold the activations of their largest
//! microbatch.

use std::num::NonZeroU32;

use dflop_balancer::{Strategy, lockstep_ns, shard_groups_ns};
use dflop_costmodel::memory::{RankMemory, ReplicaMemory};
use dflop_costmodel::{DeviceLinks, ModuleTraffic, RankLayout, SampleShape};

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

impl RankTraining<'_> {
    /// Returns the communication of every module, encoders first; `None` without links or a pipeline's
    /// planner.
    #[must_use]
    pub fn traffic(&self, planner: &StepPlanner) -> Option<Vec<ModuleTraffic>> {
        let (links, synchronization) = (self.links?, planner.synchronization()?);
        let shard_ranks = synchronization.shard_ranks(planner.dp_size()).get();
        let count = |ranks: usize| u32::try_from(ranks).unwrap_or(u32::MAX);
        let layout = RankLayout {
            ranks: count(planner.dp_size()),
            shard_ranks: count(shard_ranks),
            gpus_per_node: self.gpus_per_node,
        };
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
    let Some(synchronization) = planner.synchronization() else {
        let reason = "ranks without a pipeline have no stages".into();
        return Err(Error::Config { setting: "stages", reason });
    };
    let traffic = training.traffic(planner);
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
            sums.add(&planner, &plan, training)?;
            if synchronization.meets_in_layers() {
                sums.exchanged_ns += u128::from(exchanged_ns(&planner, &plan, synchronization));
            }
            if let Some(traffic) = &traffic {
                sums.exposed_seconds += exposed_seconds(&plan, traffic, synchronization);
            }
        }
        let strategy = match balance {
            RankBalance::Strategy(strategy) => *strategy,
            RankBalance::Tokens => Strategy::KARMARKAR_KARP,
        };
        sums.summary(strategy, &planner, traffic.is_some(), training)
    };
    balances.iter().map(summarize).collect()
}

/// Sums over planned steps, with the largest microbatch.
#[derive(Debug, Default)]
struct RankSums {
    steps: StepSums,
    exposed_seconds: f64,
    exchanged_ns: u128,
    largest_bytes: u64,
    largest_tokens: Vec<u64>,
}

impl RankSums {
    fn add(&mut self, planner: &StepPlanner, plan: &StepPlan, training: &RankTraining<'_>) -> Result<()> {
        self.steps.add_lockstep(plan);
        let samples = sample_tokens(planner, plan);
        for places in plan.ranks.iter().flatten() {
            let tokens = microbatch_tokens(planner, &samples, places);
            let [saved, working_set] = training.memory.activation_bytes(&tokens).map_err(Error::Model)?;
            let bytes = saved.saturating_add(working_set);
            if self.largest_tokens.is_empty() || bytes > self.largest_bytes {
                (self.largest_bytes, self.largest_tokens) = (bytes, tokens);
            }
        }
        Ok(())
    }

    fn summary(
        self,
        strategy: Strategy,
        planner: &StepPlanner,
        has_links: bool,
        training: &RankTraining<'_>,
    ) -> Result<RankSummary> {
        let synchronization = planner.synchronization().unwrap_or_default();
        let shard_ranks = u32::try_from(synchronization.shard_ranks(planner.dp_size()).get()).ok();
        let shard_ranks = shard_ranks.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MAX);
        let steps = self.steps.summary(strategy);
        let count = steps.step_seconds.len().max(1) as f64;
        let exposed_seconds = self.exposed_seconds / count;
        let is_exchanged = synchronization.meets_in_layers() && planner.model().modules().len() > 1;
        Ok(RankSummary {
            exchanged_seconds: is_exchanged.then_some(self.exchanged_ns as f64 / 1e9 / count),
            exposed_seconds: has_links.then_some(exposed_seconds),
            memory: training.memory.rank(shard_ranks, &self.largest_tokens).map_err(Error::Model)?,
            microbatch_tokens: self.largest_tokens,
            steps,
        })
    }
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

/// Returns by how many seconds communication lengthens a step: in every slot and module, the ranks that meet
/// wait as long as communication takes longer than the slowest rank computes.
fn exposed_seconds(plan: &StepPlan, traffic: &[ModuleTraffic], synchronization: Synchronization) -> f64 {
    let times = times_ns(plan);
    let shard_ranks = synchronization.shard_ranks(times.len()).get();
    let with_waits =
        |group: &[Vec<Vec<u64>>]| lockstep_ns(group) as f64 / 1e9 + waits_seconds(group, traffic);
    let step_seconds = times.chunks(shard_ranks).map(with_waits).fold(0.0, f64::max);
    (step_seconds - plan.makespan_ns as f64 / 1e9).max(0.0)
}

/// Returns the step time in nanoseconds if the ranks in a shard group encode equal shares of their media, with
/// the same microbatches.
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

/// Returns the seconds in which ranks that meet in every layer wait for communication.
///
/// - `ranks_ns`: time by rank, slot and module
fn waits_seconds(ranks_ns: &[Vec<Vec<u64>>], traffic: &[ModuleTraffic]) -> f64 {
    let slots = ranks_ns.iter().map(Vec::len).max().unwrap_or(0);
    let mut seconds = 0.0;
    for slot in 0..slots {
        for (module, traffic) in traffic.iter().enumerate() {
            let ranks = ranks_ns.iter().filter_map(|rank| rank.get(slot)?.get(module));
            let slowest_ns = ranks.max().copied().unwrap_or(0);
            seconds += traffic.exposed_seconds(slowest_ns as f64 / 1e9, slot + 1 == slots);
        }
    }
    seconds
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::Module;

    use super::*;

    #[test]
    fn ranks_wait_where_communication_takes_longer_than_the_slowest_rank() {
        let traffic = |gather_seconds| ModuleTraffic {
            module: Module::Llm,
            gathered_bytes: 1,
            scattered_bytes: 1,
            gather_seconds,
            scatter_seconds: gather_seconds,
            sum_seconds: 0.0,
        };
        let second = 1_000_000_000;
        // Slots of 3 s in the first module and 6 s in the second; gathers of 1 s are hidden.
        let ranks = vec![vec![vec![3 * second, second]; 2], vec![vec![second, 6 * second]; 2]];
        assert!(waits_seconds(&ranks, &[traffic(1.0), traffic(1.0)]).abs() < 1e-9);
        // The first module hides 1 s of a gather and 2 s of a gather with gradients.
        let waits = waits_seconds(&ranks, &[traffic(1.5), traffic(1.0)]);
        assert!((waits - 2.0 * (0.5 + 1.0)).abs() < 1e-9, "{waits}");
    }
}
