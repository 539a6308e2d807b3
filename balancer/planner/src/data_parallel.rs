//! Scores data-parallel layouts on the batches that plans are scored on: every GPU runs the whole model.
//!
//! A layout has as few microbatches as memory allows. More are never faster: joined microbatches compute no
//! longer, because ranks wait for each other less often, and they gather fewer times.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::rc::Rc;

use dflop_balancer::{
    Budget, Caps, Error, Instance, PipelineConfig, Result, Strategy, balance_pipeline, balance_shard_groups,
    rank_step,
};
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory, ReplicaMemory, SavedActivations};
use dflop_costmodel::{DeviceLinks, ModuleTraffic, RankLayout, percentile};

use super::costs::{ModuleCosts, unit_tokens};
use super::problem::PlanProblem;
use super::space::shape::PassShares;
use super::workload::ItemSize;

/// Work units for balancing one batch.
const SEARCH_WORK: u64 = 4_000;
/// Number of batches that tell whether a number of microbatches fits, which all batches confirm.
const FITTING_BATCHES: usize = 1;
/// Number of samples in the batches that layouts are judged on.
const JUDGED_SAMPLES: usize = 2048;

/// Maximum number of GPUs: balancing a batch takes longer than the search for more.
const GPUS_MAX: u32 = 4096;

/// Data-parallel layout with its score.
#[derive(Debug, Clone, PartialEq)]
pub struct DataParallelPlan {
    /// Layout over all GPUs in the cluster.
    pub layout: RankLayout,
    /// Number of microbatches per rank.
    pub microbatches: u32,
    /// Whether the backward pass recomputes the layers of all modules.
    pub is_recomputed: bool,
    /// Mean step over the batches with exposed communication, in seconds.
    pub step_seconds: f64,
    /// 95th percentile of the steps, in seconds.
    pub step_seconds_p95: f64,
    /// Mean part of a step in which ranks wait for parameters and gradients, in seconds.
    pub exposed_seconds: f64,
    /// Maximum number of LLM tokens in a microbatch.
    pub microbatch_tokens_max: u64,
    /// Memory on a rank with the largest microbatch.
    pub memory: RankMemory,
    /// Whether this memory, times the problem's margin, fits into a GPU.
    pub fits: bool,
}

/// Balances the workload for all data-parallel layouts: DDP, `ZeRO-1`, `ZeRO-2`, FSDP, and the latter two in
/// shard groups within nodes.
///
/// Times are those of the plans, without tensor parallelism, and batches are balanced by search; of large
/// batches fewer are scored, which tell layouts apart as well. A layout that does not fit has as many
/// microbatches as samples allow, and no time that counts.
///
/// - `memory`: memory model for the problem's model, with its frozen parts
///
/// # Errors
/// [`Error::Config`] if the problem is invalid, a batch has fewer samples than GPUs, a module has no times
/// without tensor parallelism, or the model is another than the problem's.
pub fn data_parallel(problem: &PlanProblem<'_>, memory: &ReplicaMemory<'_>) -> Result<Vec<DataParallelPlan>> {
    problem.check()?;
    problem.with_expert_parallel(1, |problem| -> Result<Vec<DataParallelPlan>> {
        let study = LayoutStudy::new(problem, memory)?;
        let gpus_per_node = problem.cluster.gpus_per_node;
        let layouts = RankLayout::all(problem.cluster.gpus, gpus_per_node, gpus_per_node);
        layouts.into_iter().map(|layout| study.best(layout)).collect()
    })?
}

/// Module that a rank runs as a whole.
struct WholeModule<'a> {
    costs: &'a dyn ModuleCosts,
    /// Encoder position; `None` for the LLM.
    encoder: Option<usize>,
    /// Tokens inside the module per unit.
    unit_tokens: u64,
}

impl WholeModule<'_> {
    fn units(&self, item: &ItemSize) -> u64 {
        u64::from(self.encoder.map_or(item.tokens, |encoder| item.media(encoder).units))
    }

    /// Returns the attention time that an item adds to one layer, in nanoseconds.
    fn attention_ns(&self, item: &ItemSize) -> f64 {
        match self.encoder {
            Some(encoder) => {
                let media = item.media(encoder);
                self.costs.media_attention_ns(1, u64::from(media.units), media.pairs)
            }
            None => self.costs.sample_ns(1, u64::from(item.tokens)),
        }
    }

    /// Returns a microbatch's time, forward and backward, in nanoseconds.
    ///
    /// - `attention_ns`: attention time in one layer
    fn microbatch_ns(&self, units: u64, attention_ns: f64, is_recomputed: bool) -> f64 {
        if units == 0 {
            return 0.0;
        }
        let [of_layers, of_outside] = self.costs.backward_ratios();
        let layers = PassShares::new(of_layers, self.costs.layers(), is_recomputed).sum();
        let outside = PassShares::new(of_outside, 1, false).sum();
        layers * (self.costs.layer_ns(1, units) + attention_ns)
            + outside * self.costs.outside_layers_ns(1, units)
    }
}

/// Units and attention times of the items in a batch, `[items, modules]`.
struct BatchLoads {
    units: Vec<Vec<u64>>,
    attention_ns: Vec<Vec<f64>>,
}

/// Settings for a score.
#[derive(Clone, Copy)]
struct Setting {
    layout: RankLayout,
    microbatches: usize,
    is_recomputed: bool,
}

/// Items by rank and microbatch.
type Ranks = Vec<Vec<Vec<u32>>>;

/// What a balanced batch depends on: batch, microbatches, recomputation, and the ranks that meet in every
/// module, if any.
type BalancedFor = (usize, usize, bool, Option<u32>);

/// Layouts on the same batches.
struct LayoutStudy<'a> {
    problem: &'a PlanProblem<'a>,
    memory: &'a ReplicaMemory<'a>,
    modules: Vec<WholeModule<'a>>,
    batches: Vec<BatchLoads>,
    /// Batches that were balanced for a layout that waits at the same points.
    balanced: RefCell<BTreeMap<BalancedFor, Rc<Ranks>>>,
    /// Tokens in a batch, mean over all batches, divided by the mean over these.
    scale: f64,
    links: Option<DeviceLinks>,
    memory_max: f64,
}

impl<'a> LayoutStudy<'a> {
    fn new(problem: &'a PlanProblem<'a>, memory: &'a ReplicaMemory<'a>) -> Result<Self> {
        let (samples, gpus) = (problem.workload.global_batch(), problem.cluster.gpus);
        if samples < gpus {
            let reason = format!("{samples} samples are fewer than the {gpus} data-parallel GPUs");
            return Err(Error::Config { setting: "global_batch_size", reason });
        }
        if gpus > GPUS_MAX {
            let reason =
                format!("data-parallel layouts are compared on at most {GPUS_MAX} GPUs, found {gpus}");
            return Err(Error::Config { setting: "gpus", reason });
        }
        let rules: Vec<u32> = memory.spec().encoders().map(|(_, _, rule)| unit_tokens(&rule)).collect();
        if rules.len() != problem.encoders.len() {
            let (found, expected) = (rules.len(), problem.encoders.len());
            let reason = format!("the memory is for {found} encoders, the problem has {expected}");
            return Err(Error::Config { setting: "model", reason });
        }
        let encoders = problem.encoders.iter().zip(rules).enumerate();
        let encoders = encoders.map(|(encoder, (costs, tokens))| WholeModule {
            costs: *costs,
            encoder: Some(encoder),
            unit_tokens: tokens.into(),
        });
        let llm = WholeModule { costs: problem.llm, encoder: None, unit_tokens: 1 };
        let modules: Vec<WholeModule<'a>> = encoders.chain([llm]).collect();
        if let Some(module) = modules.iter().find(|module| !module.costs.tp_degrees().contains(&1)) {
            let name = if module.encoder.is_some() { module.costs.name() } else { "llm" };
            let reason = format!("data-parallel layouts need times of {name} without tensor parallelism");
            return Err(Error::Config { setting: "profile", reason });
        }
        let loads = |batch: &Vec<ItemSize>| BatchLoads {
            units: batch.iter().map(|item| modules.iter().map(|own| own.units(item)).collect()).collect(),
            attention_ns: batch
                .iter()
                .map(|item| modules.iter().map(|own| own.attention_ns(item)).collect())
                .collect(),
        };
        // Large batches differ less from each other.
        let workload = problem.workload;
        let enough = (JUDGED_SAMPLES / samples as usize).max(1);
        let batches = &workload.batches()[..enough.min(workload.batches().len())];
        let tokens = |batch: &Vec<ItemSize>| batch.iter().map(|item| f64::from(item.tokens)).sum::<f64>();
        let batch_tokens = batches.iter().map(tokens).sum::<f64>() / batches.len() as f64;
        Ok(Self {
            batches: batches.iter().map(loads).collect(),
            scale: workload.batch_tokens / batch_tokens,
            links: problem.cluster.links.map(DeviceLinks::from),
            memory_max: problem.cluster.memory_bytes as f64 / problem.memory_margin,
            problem,
            memory,
            modules,
            balanced: RefCell::default(),
        })
    }

    /// Scores a layout with and without recomputation, where the search may recompute.
    fn best(&self, layout: RankLayout) -> Result<DataParallelPlan> {
        let plain = self.fewest_microbatches(layout, false)?;
        // Without recomputation a single microbatch is the fastest.
        if !self.problem.options.has_recomputation || (plain.fits && plain.microbatches == 1) {
            return Ok(plain);
        }
        let recomputed = self.fewest_microbatches(layout, true)?;
        let is_better = match (recomputed.fits, plain.fits) {
            (true, true) => recomputed.step_seconds < plain.step_seconds,
            (false, false) => recomputed.memory.total() < plain.memory.total(),
            (fits, _) => fits,
        };
        Ok(if is_better { recomputed } else { plain })
    }

    /// Scores a layout with the fewest microbatches that fit, tried in steps of at most an eighth; with the
    /// most if none fit.
    fn fewest_microbatches(&self, layout: RankLayout, is_recomputed: bool) -> Result<DataParallelPlan> {
        let most = (self.problem.workload.global_batch() / layout.ranks.max(1)).max(1) as usize;
        let mut microbatches = 1;
        loop {
            let setting = Setting { layout, microbatches, is_recomputed };
            let is_last = microbatches == most;
            if is_last || self.may_fit(setting)? {
                let few = self.batches.len().min(FITTING_BATCHES);
                let mut found = self.score(setting, few)?;
                if found.fits && few < self.batches.len() {
                    found = self.score(setting, self.batches.len())?;
                }
                if found.fits || is_last {
                    return Ok(found);
                }
            }
            microbatches = (microbatches + 1 + microbatches / 8).min(most);
        }
    }

    /// Returns whether the mean microbatch fits, and the longest samples alone: the largest microbatch has at
    /// least their memory.
    fn may_fit(&self, setting: Setting) -> Result<bool> {
        let groups = (setting.layout.ranks as usize * setting.microbatches * self.batches.len()) as u64;
        let samples = || self.batches.iter().flat_map(|batch| &batch.units);
        let mean = |module: usize| samples().map(|units| units[module]).sum::<u64>() / groups;
        let mean: Vec<u64> = (0..self.modules.len()).map(mean).collect();
        let longest =
            (0..self.modules.len()).filter_map(|module| samples().max_by_key(|units| units[module]));
        let memory = self.memory_model(setting.is_recomputed);
        for units in longest.chain([&mean]) {
            let tokens = self.modules.iter().zip(units).map(|(module, units)| units * module.unit_tokens);
            let memory = memory.rank(setting.layout, &tokens.collect::<Vec<u64>>()).map_err(in_model)?;
            if memory.total() as f64 > self.memory_max {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn memory_model(&self, is_recomputed: bool) -> ReplicaMemory<'a> {
        let saved = if is_recomputed { SavedActivations::LayerInputs } else { SavedActivations::All };
        self.memory.clone().saved_activations(saved)
    }

    /// Balances and simulates the first batches.
    fn score(&self, setting: Setting, batches: usize) -> Result<DataParallelPlan> {
        let Setting { layout, microbatches, is_recomputed } = setting;
        let memory = self.memory_model(is_recomputed);
        let traffic = |links: &DeviceLinks| -> Vec<ModuleTraffic> {
            memory.modules().iter().map(|module| ModuleTraffic::new(module, layout, links)).collect()
        };
        let traffic = self.links.as_ref().map(traffic).unwrap_or_default();
        let (mut largest, mut tokens_max) = (LargestMicrobatch::default(), 0);
        let (mut seconds, mut exposed_seconds) = (Vec::with_capacity(batches), 0.0);
        for (at, batch) in self.batches[..batches].iter().enumerate() {
            let ranks = self.balanced(setting, at)?;
            let mut ranks_ns = Vec::with_capacity(ranks.len());
            for rank in &*ranks {
                let loads = rank.iter().map(|items| self.load(batch, items));
                let (units, times): (Vec<_>, Vec<_>) =
                    loads.map(|load| self.tokens_and_times(&load, is_recomputed)).unzip();
                for tokens in units {
                    tokens_max = tokens_max.max(tokens.last().copied().unwrap_or(0));
                    largest.add(&memory, tokens).map_err(in_model)?;
                }
                ranks_ns.push(times);
            }
            let step = rank_step(&ranks_ns, layout, &traffic);
            seconds.push(step.seconds() * self.scale);
            exposed_seconds += step.exposed_seconds;
        }
        let steps = seconds.len().max(1) as f64;
        let memory = memory.rank(layout, largest.tokens()).map_err(in_model)?;
        Ok(DataParallelPlan {
            layout,
            microbatches: microbatches as u32,
            is_recomputed,
            step_seconds: seconds.iter().sum::<f64>() / steps,
            step_seconds_p95: percentile(seconds, 95),
            exposed_seconds: exposed_seconds / steps,
            microbatch_tokens_max: tokens_max,
            fits: memory.total() as f64 <= self.memory_max,
            memory,
        })
    }

    /// Returns the units and the attention time per layer of a microbatch, by module.
    fn load(&self, batch: &BatchLoads, items: &[u32]) -> Vec<(u64, f64)> {
        let load = |module: usize| {
            let units = items.iter().map(|item| batch.units[*item as usize][module]).sum::<u64>();
            let attention_ns =
                items.iter().map(|item| batch.attention_ns[*item as usize][module]).sum::<f64>();
            (units, attention_ns)
        };
        (0..self.modules.len()).map(load).collect()
    }

    /// Returns a microbatch's tokens and nanoseconds, by module.
    fn tokens_and_times(&self, load: &[(u64, f64)], is_recomputed: bool) -> (Vec<u64>, Vec<u64>) {
        let modules = self.modules.iter().zip(load);
        let values = modules.map(|(module, (units, attention_ns))| {
            let ns = module.microbatch_ns(*units, *attention_ns, is_recomputed);
            (units.saturating_mul(module.unit_tokens), ns as u64)
        });
        values.unzip()
    }

    /// Balances a batch, unless another layout has.
    fn balanced(&self, setting: Setting, batch: usize) -> Result<Rc<Ranks>> {
        let Setting { layout, microbatches, is_recomputed } = setting;
        let meeting = layout.sharding.meets_in_microbatches().then_some(layout.shard_ranks);
        let key = (batch, microbatches, is_recomputed, meeting);
        if let Some(known) = self.balanced.borrow().get(&key) {
            return Ok(Rc::clone(known));
        }
        let found = Rc::new(self.balance(setting, &self.batches[batch])?);
        self.balanced.borrow_mut().insert(key, Rc::clone(&found));
        Ok(found)
    }

    /// Balances a batch for the points at which the ranks wait; returns items by rank and microbatch.
    ///
    /// Items add time in proportion to units, as in a mean microbatch; microbatches stay near each other in
    /// tokens, as in step plans.
    fn balance(&self, setting: Setting, batch: &BatchLoads) -> Result<Ranks> {
        let Setting { layout, microbatches, is_recomputed } = setting;
        let (ranks, modules) = (layout.ranks as usize, self.modules.len());
        let groups = ranks * microbatches;
        let unit_ns = |(at, module): (usize, &WholeModule<'_>)| {
            let mean = (batch.units.iter().map(|units| units[at]).sum::<u64>() / groups as u64).max(1);
            module.microbatch_ns(mean, 0.0, is_recomputed) / mean as f64
        };
        let unit_ns: Vec<f64> = self.modules.iter().enumerate().map(unit_ns).collect();
        let mut times_ns = Vec::with_capacity(batch.units.len() * modules);
        for (units, attention_ns) in batch.units.iter().zip(&batch.attention_ns) {
            for (at, module) in self.modules.iter().enumerate() {
                let ratio = module.costs.backward_ratios()[0];
                let layers = PassShares::new(ratio, module.costs.layers(), is_recomputed).sum();
                times_ns.push((units[at] as f64 * unit_ns[at] + layers * attention_ns[at]) as u64);
            }
        }
        let tokens: Vec<u64> = batch.units.iter().filter_map(|units| units.last().copied()).collect();
        let meets = layout.sharding.meets_in_microbatches();
        let instance = if meets {
            Instance::new(groups, modules, times_ns)?
        } else {
            Instance::new(groups, 1, times_ns.chunks(modules).map(|own| own.iter().sum::<u64>()).collect())?
        };
        let instance = instance.tokens(tokens)?;
        let shard_ranks = NonZeroUsize::new(layout.shard_ranks as usize).unwrap_or(NonZeroUsize::MIN);
        let solve = |caps: &Caps| {
            let budget = &mut Budget::work(SEARCH_WORK);
            if meets {
                return balance_shard_groups(&instance, ranks, shard_ranks, caps, budget);
            }
            balance_pipeline(&instance, &PipelineConfig::new(ranks, vec![1]), Strategy::SEARCH, caps, budget)
        };
        let near = Caps { tokens_max: instance.near_mean_tokens(), ..Caps::default() };
        match solve(&near) {
            Err(Error::CapUnmet { .. }) => Ok(solve(&Caps::default())?.ranks),
            solved => Ok(solved?.ranks),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used by `map_err`")]
fn in_model(error: dflop_costmodel::Error) -> Error {
    Error::Config { setting: "model", reason: error.to_string() }
}
