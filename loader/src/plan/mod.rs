//! Plans a step: assigns every sample to a rank and a microbatch.
//!
//! A pure function of the index, the cost model and a few settings; reads no payload, knows no rank of its own.
//! Every rank computes the same plan, and [`StepPlan::digest`] lets ranks check that they did.

mod builder;
mod compare_strategies;
mod correction;
mod cost_function;
mod lockstep;
mod padding;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use dflop_balancer::{
    Budget, Caps, Instance, LowerBound, PipelineAssignment, PipelineConfig, PipelineObjective, PlanDigest,
    Strategy, balance_pipeline,
};
use dflop_costmodel::correction::Corrections;
use dflop_costmodel::{CostModel, SampleCost, SampleShape};

pub use self::builder::StepPlannerBuilder;
pub use self::compare_strategies::{StrategySummary, compare_strategies, simulate_plan};
pub use self::cost_function::{CostFault, CostFunction, CostInput};
pub use self::lockstep::Synchronization;
use self::lockstep::{alike_together, in_lockstep_ns, one_after_the_other};
pub use self::padding::PadTo;
use self::padding::Padding;

use crate::dataset::Dataset;
use crate::error::{Error, Result, check_at_most, reason_of};
use crate::index::{Index, SampleRow};
use crate::order::{LoaderState, MixRules, Mixture, RunSettings, Shuffle, StepSample, Steps, Tail};

/// How global batches are cut.
#[derive(Debug, Clone, PartialEq)]
struct PlanConfig {
    dp_size: usize,
    microbatches: usize,
    /// Pipeline stages of every module of the model, in the model's order; one of all modules where they share a device.
    stages: Vec<usize>,
    /// Where the modules share a device: when its ranks wait for one another.
    synchronization: Option<Synchronization>,
    strategy: Strategy,
    caps: Caps,
    /// Fixed length of microbatches or rows.
    pad_to: Option<PadTo>,
    /// Work units that the search for one step may spend.
    work: u64,
}

/// What is drawn from, and how.
#[derive(Debug)]
struct SampleSource {
    datasets: Vec<Dataset>,
    rules: MixRules,
    seed: u64,
    shuffle: Shuffle,
    tail: Tail,
    first_epoch: u64,
    /// The step that a restored run goes on with.
    first_step: u64,
}

/// A planned global batch.
#[derive(Debug, Clone)]
pub struct StepPlan {
    /// Number of the step.
    pub step: u64,
    /// The samples, in global order.
    pub samples: Vec<StepSample>,
    /// What each sample costs, padding of its row to a fixed length included; nothing for a refused one.
    pub costs: Vec<SampleCost>,
    /// Samples that the model cannot take, by their place in `samples`, and why. Planned at no cost; their
    /// owner skips them.
    pub refused: Vec<(usize, String)>,
    /// Places in `samples`, by rank and microbatch, in the order of execution.
    pub ranks: Vec<Vec<Vec<u32>>>,
    /// LLM time of each microbatch besides the costs of its samples, by rank, in nanoseconds: that of its padding to a
    /// fixed length. Empty without one.
    pub padding_ns: Vec<Vec<u64>>,
    /// Whether microbatches may be farther from each other in tokens than usual. Without a token cap of its own a plan
    /// keeps them within a quarter, or the longest sample, of their mean; it gives that up where the byte cap leaves no
    /// such partition.
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

    /// Returns the planned LLM time of padding of a rank's microbatch, where `places` are all of its samples that the
    /// model takes; `None` for any other set of samples.
    pub(crate) fn planned_padding_ns(&self, rank: usize, microbatch: usize, places: &[u32]) -> Option<u64> {
        let planned = self.ranks.get(rank)?.get(microbatch)?;
        let taken = planned.iter().copied().filter(|&place| !self.is_refused(place));
        taken.eq(places.iter().copied()).then(|| self.padding_ns[rank][microbatch])
    }
}

/// Plans the steps of a run, any of them at any time.
#[derive(Debug, Clone)]
pub struct StepPlanner {
    source: Arc<SampleSource>,
    steps: Steps,
    model: Arc<CostModel>,
    config: PlanConfig,
    free: SampleCost,
    cost_function: Option<Arc<dyn CostFunction>>,
    /// What the run has learned, shared by all clones.
    corrections: Arc<Mutex<Corrections>>,
    /// Steps from 0 up to the last one that was planned.
    planned: Arc<AtomicU64>,
}

impl StepPlanner {
    /// Starts the settings of a planner over a dataset, a split of one or a mixture; a global batch is all that
    /// must be set.
    #[must_use]
    pub fn builder(data: impl Into<Mixture>, model: CostModel) -> StepPlannerBuilder {
        StepPlannerBuilder::new(data.into(), model)
    }

    /// Returns the datasets, in the order of their numbers.
    #[must_use]
    pub fn datasets(&self) -> &[Dataset] {
        &self.source.datasets
    }

    /// Returns the index of the first dataset, which is the only one unless there is a mixture.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        self.source.datasets[0].index()
    }

    /// Returns what the index knows of a sample.
    ///
    /// # Panics
    /// If the sample is none of this planner's.
    #[must_use]
    pub fn row(&self, sample: StepSample) -> SampleRow<'_> {
        self.source.datasets[sample.dataset].index().sample(sample.sample)
    }

    /// Returns the step to begin with: 0, or where a restored state stands.
    #[must_use]
    pub fn first_step(&self) -> u64 {
        self.source.first_step
    }

    /// Saves where the run stands before a step.
    ///
    /// # Errors
    /// [`Error::RunEnded`] if the run has ended before; [`Error::Config`] if the step lies before that where changed
    /// data or another global batch was taken up.
    pub fn state(&self, step: u64) -> Result<LoaderState> {
        check_at_most("step", step, builder::COUNT_MAX)?;
        LoaderState::save(self.run(), self.steps.pace(), self.source.first_epoch, step)
    }

    /// The step that a state of this very run stands at.
    pub(crate) fn step_of(&self, state: &LoaderState) -> Result<u64> {
        let restored = state.restore(self.run(), false)?;
        if restored.origin != self.steps.pace().origin || restored.first_epoch != self.source.first_epoch {
            let reason = "it is of another run: restore it when the planner is built".into();
            return Err(Error::State { reason });
        }
        Ok(restored.step)
    }

    fn run(&self) -> RunSettings<'_> {
        let SampleSource { datasets, rules, seed, shuffle, tail, .. } = &*self.source;
        let global_batch = self.steps.global_batch();
        RunSettings { datasets, rules, seed: *seed, global_batch, tail: *tail, shuffle: *shuffle }
    }

    /// Returns the steps of the run.
    #[must_use]
    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    /// Returns the cost model.
    #[must_use]
    pub fn model(&self) -> &CostModel {
        &self.model
    }

    /// Returns the number of data-parallel ranks.
    #[must_use]
    pub fn dp_size(&self) -> usize {
        self.config.dp_size
    }

    /// Returns the number of microbatches of each rank.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.config.microbatches
    }

    /// Returns the hard limits of a microbatch.
    #[must_use]
    pub fn caps(&self) -> Caps {
        self.config.caps
    }

    /// Plans a step.
    ///
    /// # Errors
    /// [`Error::Plan`] if the caps cannot be met; the cause names the sample or the total. [`Error::StepTooLong`] if
    /// microbatches of a fixed length have no room for the samples. [`Error::RunEnded`] if the run has no such step.
    /// [`Error::CostFunction`] if there is one and it fails.
    pub fn plan(&self, step: u64) -> Result<StepPlan> {
        check_at_most("step", step, builder::COUNT_MAX)?;
        let samples = self.steps.samples(step)?;
        let model = self.model_at(step);
        let (mut costs, refused) = self.annotate(&samples, &model);
        self.ask_costs(step, &samples, &refused, &mut costs)?;
        let padding = self.config.pad_to.map(|to| Padding { to, model: &model });
        let StepCut { assignment: mut cut, is_near_mean_cap_dropped } = if let Some(padding) = padding {
            padding.pad_rows(&mut costs, &refused);
            self.cut_padded(step, padding, &samples, &costs)?
        } else {
            let instance = self.instance(&samples, &costs);
            let cut = instance.and_then(|instance| self.cut(&instance, &costs));
            cut.map_err(|source| Error::Plan { step, source })?
        };
        let is_sorted = self.config.synchronization == Some(Synchronization::PerMicrobatch)
            && !is_blind(self.config.strategy);
        if is_sorted {
            alike_together(&mut cut.ranks, &costs);
        }
        let target_tokens = costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
        let mut plan = StepPlan {
            step,
            digest: digest(step, &cut.ranks, &samples),
            samples,
            costs,
            refused,
            ranks: cut.ranks,
            padding_ns: Vec::new(),
            is_near_mean_cap_dropped,
            makespan_ns: cut.makespan_ns,
            bound: cut.bound,
            target_tokens,
        };
        plan.padding_ns = padding.map_or_else(Vec::new, |padding| padding.of_microbatches(&plan));
        if self.config.synchronization == Some(Synchronization::PerMicrobatch) {
            plan.makespan_ns = in_lockstep_ns(&plan);
        } else if self.config.pad_to.is_some() {
            plan.makespan_ns = self.makespan_ns(&plan)?;
        }
        Ok(plan)
    }

    /// The same planner with another strategy.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.config.strategy = strategy;
        self
    }

    /// The pipeline that one DP rank runs.
    #[must_use]
    pub fn pipeline(&self) -> PipelineConfig {
        let objective = match self.config.synchronization {
            Some(Synchronization::PerMicrobatch) => PipelineObjective::MinMax,
            Some(Synchronization::PerStep) | None => PipelineObjective::Makespan,
        };
        PipelineConfig::new(self.config.dp_size, self.config.stages.clone()).objective(objective)
    }

    /// Cuts within the caps. Where no token cap is set, microbatches stay near each other in tokens, because a
    /// shorter makespan is no use if one microbatch does not fit into memory.
    fn cut(&self, instance: &Instance, costs: &[SampleCost]) -> Result<StepCut, dflop_balancer::Error> {
        let PlanConfig { strategy, caps, work, .. } = &self.config;
        let solve = |caps: &Caps| {
            balance_pipeline(instance, &self.pipeline(), *strategy, caps, &mut Budget::work(*work))
        };
        if is_blind(*strategy) || caps.tokens_max.is_some() {
            return Ok(solve(caps)?.into());
        }
        let near = Caps { tokens_max: Some(near_mean_tokens(costs, instance.groups())), ..*caps };
        match solve(&near) {
            // Tokens alone always fit the near-mean cap; together with the byte cap there may be no such partition.
            Err(dflop_balancer::Error::CapUnmet { .. }) => {
                Ok(StepCut { assignment: solve(caps)?, is_near_mean_cap_dropped: true })
            }
            cut => Ok(cut?.into()),
        }
    }

    fn annotate(&self, samples: &[StepSample], model: &CostModel) -> (Vec<SampleCost>, Vec<(usize, String)>) {
        let (mut shape, mut refused) = (SampleShape::default(), Vec::new());
        let cost = |(place, sample): (usize, &StepSample)| {
            self.row(*sample).read_shape(&mut shape);
            model.predict(&shape).unwrap_or_else(|error| {
                refused.push((place, reason_of(&error)));
                self.free
            })
        };
        (samples.iter().enumerate().map(cost).collect(), refused)
    }

    /// Puts the times of the cost function, if there is one, in place of the model's.
    fn ask_costs(
        &self,
        step: u64,
        samples: &[StepSample],
        refused: &[(usize, String)],
        costs: &mut [SampleCost],
    ) -> Result<()> {
        let Some(function) = self.cost_function.as_deref() else { return Ok(()) };
        let is_taken = |place: &usize| refused.binary_search_by_key(place, |(refused, _)| *refused).is_err();
        let places: Vec<usize> = (0..samples.len()).filter(is_taken).collect();
        let shape_of = |&place: &usize| {
            let mut shape = SampleShape::default();
            self.row(samples[place]).read_shape(&mut shape);
            shape
        };
        let shapes: Vec<SampleShape> = places.iter().map(shape_of).collect();
        let input = |(&place, shape)| {
            let StepSample { dataset, sample, .. } = samples[place];
            CostInput { key: self.row(samples[place]).key(), dataset, sample, shape, predicted: costs[place] }
        };
        let inputs: Vec<CostInput<'_>> = places.iter().zip(&shapes).map(input).collect();
        let times = cost_function::ask(function, step, self.model.modules(), &inputs)?;
        for (place, module_ns) in places.into_iter().zip(times) {
            costs[place].module_ns = module_ns;
        }
        Ok(())
    }

    /// The partition problem of a step: times are those of one stage of each module.
    ///
    /// # Errors
    /// Those of [`Instance::new`]; times that overflow.
    pub(crate) fn instance(
        &self,
        samples: &[StepSample],
        costs: &[SampleCost],
    ) -> Result<Instance, dflop_balancer::Error> {
        let stages = &self.config.stages;
        let stage_ns = |cost: &SampleCost| -> Vec<u64> {
            if self.config.synchronization.is_some() {
                return vec![one_after_the_other(cost)];
            }
            let modules = cost.module_ns.as_slice().iter().zip(stages);
            modules.map(|(ns, stages)| ns.div_ceil(*stages as u64)).collect()
        };
        let times_ns: Vec<u64> = costs.iter().flat_map(stage_ns).collect();
        let groups = self.config.dp_size * self.config.microbatches;
        // Only the short last batch of an epoch has fewer samples than groups.
        let instance = if samples.len() < groups {
            Instance::with_empty_groups(groups, stages.len(), times_ns)?
        } else {
            Instance::new(groups, stages.len(), times_ns)?
        };
        let tokens = costs.iter().map(|cost| u64::from(cost.tokens)).collect();
        let bytes = samples.iter().map(|sample| self.row(*sample).bytes()).collect();
        instance.tokens(tokens)?.bytes(bytes)
    }
}

/// A step cut into ranks and microbatches.
struct StepCut {
    assignment: PipelineAssignment,
    is_near_mean_cap_dropped: bool,
}

impl From<PipelineAssignment> for StepCut {
    fn from(assignment: PipelineAssignment) -> Self {
        Self { assignment, is_near_mean_cap_dropped: false }
    }
}

/// Whether a strategy looks at no cost.
fn is_blind(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::RoundRobin | Strategy::Random)
}

/// A quarter above the mean of the microbatches, or the mean and the longest sample: any list schedule meets that.
///
/// # Source
/// Graham, "Bounds on multiprocessing timing anomalies", 1969: no list schedule exceeds the mean by more than the
/// longest item.
fn near_mean_tokens(costs: &[SampleCost], groups: usize) -> u64 {
    let tokens = || costs.iter().map(|cost| u64::from(cost.tokens));
    let mean = tokens().sum::<u64>().div_ceil(groups as u64);
    (mean + mean / 4).max(mean + tokens().max().unwrap_or(0))
}

/// Bits of a digested number that hold the sample; those above hold its dataset.
const SAMPLE_BITS: u32 = 48;

fn digest(step: u64, ranks: &[Vec<Vec<u32>>], samples: &[StepSample]) -> PlanDigest {
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
