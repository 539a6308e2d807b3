//! Settings of a [`StepPlanner`].

use std::num::NonZeroU64;
use std::sync::Arc;

use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{CostModel, SampleShape};

use super::{PlanConfig, StepPlanner};
use crate::error::{Error, Result, check_at_most};
use crate::index::Index;
use crate::order::Order;
use crate::skip::reason_of;
use crate::steps::{Steps, Tail};

/// Largest global batch, in samples.
const GLOBAL_BATCH_MAX: u64 = 1 << 24;
/// Largest step or epoch; far from where their arithmetic would overflow.
pub(super) const COUNT_MAX: u64 = 1 << 40;
/// Most pipeline stages of one module.
const STAGES_MAX: usize = 1_024;

/// Settings of a [`StepPlanner`].
#[derive(Debug, Clone)]
pub struct StepPlannerBuilder {
    index: Arc<Index>,
    model: CostModel,
    global_batch: u64,
    seed: u64,
    first_epoch: u64,
    tail: Tail,
    stages: Option<Vec<usize>>,
    config: PlanConfig,
}

impl StepPlannerBuilder {
    pub(super) fn new(index: Arc<Index>, model: CostModel) -> Self {
        let config = PlanConfig {
            dp_size: 1,
            microbatches: 1,
            stages: Vec::new(),
            strategy: Strategy::Search,
            caps: Caps::default(),
            work: 20_000,
        };
        let (global_batch, seed, first_epoch) = (0, 0, 0);
        Self { index, model, global_batch, seed, first_epoch, tail: Tail::Carry, stages: None, config }
    }

    /// Sets how many samples a step has, over all ranks. Must be set.
    #[must_use]
    pub fn global_batch(mut self, samples: u64) -> Self {
        self.global_batch = samples;
        self
    }

    /// Sets the number of data-parallel ranks. Default: 1.
    #[must_use]
    pub fn dp_size(mut self, ranks: usize) -> Self {
        self.config.dp_size = ranks;
        self
    }

    /// Sets the number of microbatches of each rank. Default: 1.
    #[must_use]
    pub fn microbatches(mut self, microbatches: usize) -> Self {
        self.config.microbatches = microbatches;
        self
    }

    /// Sets the pipeline stages of every module, in the order of [`CostModel::modules`]. Default: one each.
    #[must_use]
    pub fn stages(mut self, stages: Vec<usize>) -> Self {
        self.stages = Some(stages);
        self
    }

    /// Sets how samples are assigned. Default: [`Strategy::Search`].
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.config.strategy = strategy;
        self
    }

    /// Sets hard limits of a microbatch, in tokens and payload bytes. Default: no limit of bytes; of tokens a
    /// quarter above the mean of the step's microbatches, or the mean and the longest sample if that is more.
    #[must_use]
    pub fn caps(mut self, caps: Caps) -> Self {
        self.config.caps = caps;
        self
    }

    /// Sets how many work units the search for one step may spend. Default: 20,000, a few milliseconds.
    #[must_use]
    pub fn work(mut self, units: u64) -> Self {
        self.config.work = units;
        self
    }

    /// Sets the seed that fixes all order. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the epoch whose first sample begins step 0. Default: 0.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// Sets what happens to samples that do not fill a global batch. Default: [`Tail::Carry`].
    #[must_use]
    pub fn tail(mut self, tail: Tail) -> Self {
        self.tail = tail;
        self
    }

    /// Checks that the settings fit each other, the model and the data set.
    ///
    /// # Errors
    /// [`Error::Config`] if a count is zero, if the stages do not name every module of the model, if the global
    /// batch has fewer samples than there are microbatches on all ranks, or if the tail drops every sample.
    pub fn build(self) -> Result<StepPlanner> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let Some(global_batch) = NonZeroU64::new(self.global_batch) else {
            return invalid("global_batch", "must be at least 1".into());
        };
        if self.config.dp_size == 0 {
            return invalid("dp_size", "must be at least 1".into());
        }
        if self.config.microbatches == 0 {
            return invalid("microbatches", "must be at least 1".into());
        }
        check_at_most("global_batch", self.global_batch, GLOBAL_BATCH_MAX)?;
        check_at_most("first_epoch", self.first_epoch, COUNT_MAX)?;
        let groups = self.config.dp_size.saturating_mul(self.config.microbatches) as u64;
        if self.global_batch < groups {
            let reason = format!("{} samples cannot fill {groups} microbatches", self.global_batch);
            return invalid("global_batch", reason);
        }
        let stages = self.checked_stages()?;
        let free = self.model.annotate(&SampleShape::default());
        let free = free.map_err(|error| Error::Config { setting: "model", reason: reason_of(&error) })?;
        let order = Order::new(self.index.shuffle_blocks(), self.index.fingerprint(), self.seed)?;
        let steps = Steps::new(order, global_batch, self.tail, self.first_epoch)?;
        let config = PlanConfig { stages, ..self.config };
        Ok(StepPlanner { index: self.index, steps, model: Arc::new(self.model), config, free })
    }

    fn checked_stages(&self) -> Result<Vec<usize>> {
        let modules = self.model.modules();
        let stages = self.stages.clone().unwrap_or_else(|| vec![1; modules.len()]);
        if stages.len() == modules.len() && stages.iter().all(|count| (1..=STAGES_MAX).contains(count)) {
            return Ok(stages);
        }
        let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
        let reason =
            format!("give one number of stages, 1 to {STAGES_MAX}, for each of {}", names.join(", "));
        Err(Error::Config { setting: "stages", reason })
    }
}
