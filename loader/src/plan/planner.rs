//! Plans steps: draws the samples, predicts costs, cuts them into ranks and microbatches.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Caps, PipelineConfig, PipelineObjective, Strategy};
use dflop_costmodel::correction::{CorrectionTable, Corrections, Observation};
use dflop_costmodel::{CostModel, ModelConstants, Module, SampleCost, SampleShape};

use super::config::{COUNT_MAX, ContextGroups, PlanConfig};
use super::cost_function::CostFunction;
use super::lockstep::{Synchronization, sort_by_cost, step_ns};
use super::padding::Padding;
use super::rows::RowSteps;
use super::step_plan::{StepPartition, StepPlan, StepSamples, digest};
use crate::dataset::Dataset;
use crate::error::{Error, PlanError, Result, check_at_most, error_reason};
use crate::index::{Index, SampleRow};
use crate::order::{LoaderState, Run, StepSample, Steps, TokenSpan};

/// Plans the steps in a run, any of them at any time.
#[derive(Debug, Clone)]
pub struct StepPlanner {
    pub(super) run: Run,
    /// Rows in place of samples; shared by all clones.
    pub(super) rows: Option<Arc<RowSteps>>,
    pub(super) model: Arc<CostModel>,
    pub(super) config: PlanConfig,
    pub(super) zero_cost: SampleCost,
    pub(super) cost_function: Option<Arc<dyn CostFunction>>,
    /// Corrections learned so far, shared by all clones.
    pub(super) corrections: Arc<Mutex<Corrections>>,
    /// Number of steps from 0 up to the last planned step.
    pub(super) planned: Arc<AtomicU64>,
}

impl StepPlanner {
    /// Returns the datasets, in the order of their numbers.
    #[must_use]
    pub fn datasets(&self) -> &[Dataset] {
        self.run.datasets()
    }

    /// Returns the index of the first dataset, which is the only dataset unless there is a mixture.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        self.run.datasets()[0].index()
    }

    /// Returns the index row for a sample.
    ///
    /// # Panics
    /// If the sample does not belong to this planner's datasets.
    #[must_use]
    pub fn row(&self, sample: StepSample) -> SampleRow<'_> {
        self.run.datasets()[sample.dataset].index().sample(sample.sample)
    }

    /// Returns the first step: 0, or the step of a restored state.
    #[must_use]
    pub fn first_step(&self) -> u64 {
        self.run.first_step()
    }

    /// Saves the position of the run before a step.
    ///
    /// # Errors
    /// [`Error::Selection`] if the run ends before the step; [`Error::Config`] if the step is before the step
    /// at which changed data or a different global batch was accepted.
    pub fn state(&self, step: u64) -> Result<LoaderState> {
        check_at_most("step", step, COUNT_MAX)?;
        match &self.rows {
            Some(rows) => self.row_state(rows, step),
            None => self.run.state(step),
        }
    }

    /// Returns the step in a state that was saved by this very run.
    pub(crate) fn saved_step(&self, state: &LoaderState) -> Result<u64> {
        self.run.saved_step(state)
    }

    /// Reads the shape of a sample, or of the tokens of it that a row holds.
    pub(super) fn read_shape(&self, sample: StepSample, span: Option<TokenSpan>, shape: &mut SampleShape) {
        self.row(sample).read_shape(shape);
        if let Some(span) = span {
            span.narrow(shape);
        }
    }

    /// Returns the steps in the run; where microbatches are rows, their samples are those of the draws, and
    /// [`Self::end_step`] and [`Self::steps_per_epoch`] count steps of rows.
    #[must_use]
    pub fn steps(&self) -> &Steps {
        &self.run.steps
    }

    /// Returns the cost model.
    #[must_use]
    pub fn model(&self) -> &CostModel {
        &self.model
    }

    /// Returns the run seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.run.source.seed
    }

    /// Returns the number of data-parallel ranks.
    #[must_use]
    pub fn dp_size(&self) -> usize {
        self.config.dp_size
    }

    /// Returns the number of microbatches per rank.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.config.microbatches
    }

    /// Returns the encoders that run in every microbatch, on a blank medium where it has none.
    #[must_use]
    pub fn required_encoders(&self) -> &[Module] {
        &self.config.required_encoders
    }

    /// Returns the hard microbatch limits.
    #[must_use]
    pub fn caps(&self) -> Caps {
        self.config.caps
    }

    /// Plans a step.
    ///
    /// # Errors
    /// [`Error::Plan`] if the caps cannot be met; the cause names the sample or the total. [`Error::Plan`] if
    /// the samples do not fit into microbatches with a fixed length. [`Error::Selection`] if the run has no
    /// such step. [`Error::UserCode`] if a cost function is set and fails.
    pub fn plan(&self, step: u64) -> Result<StepPlan> {
        if let Some(rows) = &self.rows {
            return self.plan_rows(rows, step);
        }
        match &self.config.context {
            Some(groups) if !self.config.strategy.is_blind() => Ok(self.plan_context(step, groups)?.into()),
            _ => Ok(self.plan_whole(step)?.0),
        }
    }

    /// Returns the ranks that may share samples; `None` if every sample is whole on one rank.
    #[must_use]
    pub fn context(&self) -> Option<ContextGroups> {
        self.config.context
    }

    /// Plans a step whose samples are whole; returns the work units that the search spent, too.
    pub(super) fn plan_whole(&self, step: u64) -> Result<(StepPlan, u64)> {
        check_at_most("step", step, COUNT_MAX)?;
        let drawn = StepSamples { samples: self.run.steps.samples(step)?, spans: Vec::new() };
        let model = self.model_at(step);
        let (mut costs, refused) = self.predict_costs(&drawn, &model);
        self.apply_cost_function(step, &drawn, &refused, &mut costs)?;
        let constants = self.plan_constants(&model);
        let padding = self.config.pad_to.map(|to| Padding { to, model: &model });
        let samples = &drawn.samples;
        let mut partition = if let Some(padding) = padding {
            padding.pad_rows(&mut costs, &refused);
            self.partition_padded(step, padding, samples, &costs)?
        } else {
            let instance = if self.balances_modules_apart() {
                self.module_instance(samples, &costs, &constants)
            } else {
                self.instance(samples, &costs, &constants)
            };
            let partition = instance.and_then(|instance| self.partition(&instance));
            partition.map_err(|source| Error::Plan(PlanError::Unsolved { step, source }))?
        };
        self.sort_microbatches(&mut partition, &costs);
        let work_spent = partition.assignment.work_spent;
        let plan = self.assemble((step, drawn), (costs, refused), constants, partition, padding)?;
        Ok((plan, work_spent))
    }

    /// Returns the costs of a microbatch in addition to its samples.
    pub(super) fn plan_constants(&self, model: &CostModel) -> ModelConstants {
        if self.cost_function.is_some() { ModelConstants::default() } else { model.microbatch_constants() }
    }

    /// Sorts the microbatches of every rank by the cost of their items, where ranks meet in layers and
    /// modules are not balanced apart.
    pub(super) fn sort_microbatches(&self, partition: &mut StepPartition, costs: &[SampleCost]) {
        let is_sorted = self.config.synchronization.is_some_and(Synchronization::meets_in_layers)
            && !self.config.strategy.is_blind()
            && !self.balances_modules_apart();
        if is_sorted {
            sort_by_cost(&mut partition.assignment.ranks, costs);
        }
    }

    /// Assembles the plan of a step from its partition.
    pub(super) fn assemble(
        &self,
        (step, drawn): (u64, StepSamples),
        (costs, refused): (Vec<SampleCost>, Vec<(usize, String)>),
        constants: ModelConstants,
        partition: StepPartition,
        padding: Option<Padding<'_>>,
    ) -> Result<StepPlan> {
        let StepPartition { assignment, is_near_mean_cap_dropped } = partition;
        let target_tokens = costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
        let digest = digest(step, &assignment.ranks, &drawn.samples, &drawn.spans);
        let StepSamples { samples, spans } = drawn;
        let mut plan = StepPlan {
            step,
            digest,
            samples,
            spans,
            costs,
            constants,
            refused,
            ranks: assignment.ranks,
            padding_ns: Vec::new(),
            is_near_mean_cap_dropped,
            makespan_ns: assignment.makespan_ns,
            bound: assignment.bound,
            context: None,
            target_tokens,
        };
        plan.padding_ns = padding.map_or_else(Vec::new, |padding| padding.microbatch_times(&plan));
        if let Some(synchronization) = self.config.synchronization {
            plan.makespan_ns = step_ns(&plan, synchronization);
        } else if self.config.pad_to.is_some() {
            plan.makespan_ns = self.makespan_ns(&plan)?;
        }
        Ok(plan)
    }

    /// Returns the devices of all ranks: one each, or one per stage.
    pub(super) fn devices(&self) -> usize {
        let stages: usize = self.config.stages.iter().sum();
        self.config.dp_size * stages / self.config.schedule.chunks()
    }

    /// Returns whether all modules of a rank share the device and run in sequence, without a pipeline.
    #[must_use]
    pub fn is_lockstep(&self) -> bool {
        self.config.synchronization.is_some()
    }

    /// Returns the point at which ranks wait for each other; `None` for a pipeline.
    #[must_use]
    pub fn synchronization(&self) -> Option<Synchronization> {
        self.config.synchronization
    }

    /// Applies a correction from the table's step on, in every clone of this planner, including the clone in
    /// a running loader.
    ///
    /// All ranks must apply the same table before any rank plans that step: choose a step a few steps after
    /// the last planned step, see [`Self::planned_steps`]. The samples in a step do not change, only the
    /// assignment. A restored run has to apply all tables again, in the same order.
    ///
    /// # Errors
    /// [`Error::Config`] if this planner has already planned the step, if the table does not follow the last
    /// table, or if costs come from a cost function, which model corrections do not change.
    pub fn correct(&self, table: CorrectionTable) -> Result<()> {
        if self.cost_function.is_some() {
            let reason = "a correction applies to the cost model, but costs come from a cost function; build a new \
                          planner whose cost function uses the measured times";
            return Err(Error::Config { setting: "correction", reason: reason.into() });
        }
        let mut corrections = self.corrections.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = |error: dflop_costmodel::Error| Error::Config {
            setting: "correction",
            reason: error.to_string(),
        };
        corrections.accept(table, self.planned_steps()).map_err(refused)
    }

    /// Returns the number of steps from 0 up to the last planned step.
    #[must_use]
    pub fn planned_steps(&self) -> u64 {
        self.planned.load(Ordering::Acquire)
    }

    /// Returns the observation for a measured microbatch time, for a
    /// [`CorrectionTracker`](dflop_costmodel::correction::CorrectionTracker); `None` if no sample has work
    /// for the module.
    ///
    /// - `module`: measured module; `None` for all modules together
    /// - `measured_ns`: forward and backward time of the entire module on one device, in nanoseconds;
    ///   the sum over all stages
    ///
    /// # Panics
    /// If the plan has no such rank or microbatch.
    #[must_use]
    pub fn observation(
        &self,
        plan: &StepPlan,
        [rank, microbatch]: [usize; 2],
        module: Option<Module>,
        measured_ns: u64,
    ) -> Option<Observation> {
        let (mut shape, mut samples) = (SampleShape::default(), Vec::new());
        for &place in &plan.ranks[rank][microbatch] {
            self.read_shape(plan.samples[place as usize], plan.span(place), &mut shape);
            samples.extend(self.model.sample_times(module, &shape));
        }
        let constants = self.model.sample_constants(module, &samples);
        let rank = rank as u32;
        (!samples.is_empty()).then_some(Observation { module, rank, measured_ns, constants, samples })
    }

    /// Returns the cost model for a step; corrections can no longer change it afterwards.
    pub(super) fn model_at(&self, step: u64) -> CostModel {
        let corrections = self.corrections.lock().unwrap_or_else(PoisonError::into_inner);
        self.planned.fetch_max(step.saturating_add(1), Ordering::AcqRel);
        self.corrected(&corrections, step)
    }

    /// Returns the cost model for a step; corrections can still change it.
    pub(super) fn step_model(&self, step: u64) -> CostModel {
        self.corrected(&self.corrections.lock().unwrap_or_else(PoisonError::into_inner), step)
    }

    fn corrected(&self, corrections: &Corrections, step: u64) -> CostModel {
        let model = CostModel::clone(&self.model);
        match corrections.at_step(step) {
            Some(table) => model.correction(Some(table.clone())),
            None => model,
        }
    }

    /// Returns the same planner with a different strategy.
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.config.strategy = strategy;
        self
    }

    /// Returns the same planner for a different schedule.
    ///
    /// # Errors
    /// The schedule errors of [`StepPlannerBuilder::build`](super::StepPlannerBuilder::build), see
    /// [`StepPlannerBuilder::schedule`](super::StepPlannerBuilder::schedule).
    pub fn schedule(mut self, schedule: ScheduleKind) -> Result<Self> {
        self.config.schedule = schedule;
        self.check_schedule()?;
        Ok(self)
    }

    pub(super) fn check_schedule(&self) -> Result<()> {
        let is_pipeline = self.config.synchronization.is_none();
        if !is_pipeline && self.config.schedule != ScheduleKind::OneForwardOneBackward {
            let reason = "needs `stages`: modules that share one device have no pipeline".into();
            return Err(Error::Config { setting: "schedule", reason });
        }
        let invalid = |error| Error::Config { setting: "schedule", reason: error_reason(&error) };
        self.pipeline().check_schedule().map_err(invalid)
    }

    /// Returns the pipelines that the DP ranks run: encoders in parallel, then the LLM; or one chain,
    /// where stages hold multiple modules.
    #[must_use]
    pub fn pipeline(&self) -> PipelineConfig {
        let objective = if self.config.synchronization.is_some_and(Synchronization::meets_in_layers) {
            PipelineObjective::MinMax
        } else {
            PipelineObjective::Makespan
        };
        let pipeline = PipelineConfig::new(self.config.dp_size, self.config.stages.clone())
            .module_dp_sizes(self.config.module_dp_sizes.clone())
            .objective(objective)
            .schedule(self.config.schedule);
        if self.config.stage_layers.is_some() { pipeline } else { pipeline.parallel_encoders() }
    }
}
