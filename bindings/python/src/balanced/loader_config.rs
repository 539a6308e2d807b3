//! Builds balanced loaders: at the start, from a state, and again for every iteration.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dflop_costmodel::correction::CorrectionTable;
use dflop_loader::processors::Preparer;
use dflop_loader::{
    BalancedLoader, BalancedLoaderBuilder, LoaderState, Share, StepPlan, StepPlanner, StepPlannerBuilder,
};
use pyo3::prelude::*;
use serde_json::Value;

use super::role::Role;
use crate::error::DflopError;
use crate::filter::ReadSettings;
use crate::runtime::Threaded;

/// State key for the corrections, next to the Rust loader's fields.
const CORRECTIONS: &str = "corrections";

/// Balanced loader settings, from which the loader is built again for every iteration.
pub(super) struct LoaderConfig {
    pub(super) planner: StepPlannerBuilder,
    pub(super) preparer: Option<Arc<Preparer>>,
    pub(super) read: ReadSettings,
    /// Number of steps after which the run ends, unless the epochs end before.
    pub(super) steps: Option<u64>,
    /// A `dflop.inputs.Inputs`: user code that creates model inputs.
    pub(super) inputs: Option<Py<PyAny>>,
    pub(super) dp_rank: usize,
    /// Role of the rank in a schedule.
    pub(super) role: Option<Arc<Role>>,
}

/// Some microbatches of a DP rank.
#[derive(Debug)]
struct PartOfShare {
    dp_rank: usize,
    microbatches: Range<usize>,
}

impl Share for PartOfShare {
    fn plan_indices(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>, dflop_loader::Error> {
        let plan_indices = plan.ranks[self.dp_rank].get(self.microbatches.clone());
        Ok(plan_indices.map(<[_]>::to_vec).unwrap_or_default())
    }
}

/// A loader with the planner.
pub(super) struct RunningLoader {
    pub(super) planner: StepPlanner,
    pub(super) loader: Threaded<BalancedLoader>,
    /// The planner's correction tables, in order.
    corrections: Mutex<Vec<CorrectionTable>>,
    /// Whether the loader was restored at the end of a run, and no iteration has shown that yet.
    is_restored_at_end: AtomicBool,
}

impl LoaderConfig {
    /// Builds a loader at the first step, or at the step of a state.
    pub(super) fn build(&self, state: Option<State>) -> Result<RunningLoader, DflopError> {
        let mut builder = self.planner.clone();
        let mut corrections = Vec::new();
        let is_restored = state.is_some();
        if let Some(state) = state {
            builder = builder.restore(state.loader);
            if state.accepts_changed_data {
                builder = builder.accept_changed_data();
            }
            corrections = state.corrections;
        }
        let planner = builder.build()?;
        for table in &corrections {
            planner.correct(table.clone())?;
        }
        let from_step = planner.first_step();
        let is_over = is_restored && self.is_over(&planner, from_step);
        let running = self.at(planner, from_step, corrections)?;
        running.is_restored_at_end.store(is_over, Ordering::Relaxed);
        Ok(running)
    }

    /// Builds a loader for a run that starts with an epoch.
    pub(super) fn build_at_epoch(&self, epoch: u64) -> Result<RunningLoader, DflopError> {
        self.at(self.planner.clone().first_epoch(epoch).build()?, 0, Vec::new())
    }

    /// Builds the loader for the next iteration: after the last delivered step, or at the first step if the
    /// run has ended in an earlier iteration.
    ///
    /// - `next_step`: step after the last delivered step
    pub(super) fn restart(
        &self,
        running: &RunningLoader,
        next_step: u64,
    ) -> Result<RunningLoader, DflopError> {
        let planner = running.planner.clone();
        let is_restored_at_end = running.is_restored_at_end();
        let is_started_over = !is_restored_at_end && self.is_over(&planner, next_step);
        let step = if is_started_over { planner.steps().first() } else { next_step };
        let restarted = self.at(planner, step, running.corrections().clone())?;
        restarted.is_restored_at_end.store(is_restored_at_end, Ordering::Relaxed);
        Ok(restarted)
    }

    /// Returns the number of the first step after the run; `None` if the run has no end.
    pub(super) fn end(&self, planner: &StepPlanner) -> Option<u64> {
        [planner.end_step(), self.steps].into_iter().flatten().min()
    }

    fn is_over(&self, planner: &StepPlanner, step: u64) -> bool {
        self.steps.is_some_and(|end| step >= end) || !planner.has_step(step)
    }

    /// Builds a loader for some microbatches of a step in the same run.
    pub(super) fn read_step(
        &self,
        running: &RunningLoader,
        step: u64,
        microbatches: Range<usize>,
    ) -> Result<RunningLoader, dflop_loader::Error> {
        let share = Arc::new(PartOfShare { dp_rank: self.dp_rank, microbatches });
        let loader = self.builder(running.planner.clone(), step).steps(1).share(share).build()?;
        let planner = running.planner.clone();
        Ok(RunningLoader::new(planner, loader, Vec::new()))
    }

    fn at(
        &self,
        planner: StepPlanner,
        step: u64,
        corrections: Vec<CorrectionTable>,
    ) -> Result<RunningLoader, DflopError> {
        let loader = self.builder(planner.clone(), step).build()?;
        Ok(RunningLoader::new(planner, loader, corrections))
    }

    fn builder(&self, planner: StepPlanner, step: u64) -> BalancedLoaderBuilder {
        let share = self.role.as_ref().and_then(|role| role.share(&planner));
        let mut builder = BalancedLoader::builder(planner, self.dp_rank).from_step(step);
        if self.role.is_some() {
            builder = builder.unpacked();
        }
        if let Some(share) = share {
            builder = builder.share(share);
        }
        if let Some(preparer) = &self.preparer {
            builder = builder.preparer(preparer.clone());
        }
        if let Some(steps) = self.steps {
            builder = builder.steps(steps.saturating_sub(step));
        }
        self.read.apply(builder)
    }
}

impl RunningLoader {
    fn new(planner: StepPlanner, loader: BalancedLoader, corrections: Vec<CorrectionTable>) -> Self {
        Self {
            planner,
            loader: Threaded::new(loader),
            corrections: Mutex::new(corrections),
            is_restored_at_end: AtomicBool::new(false),
        }
    }

    /// Returns whether the next iteration delivers nothing, because a state restored the end of the run.
    pub(super) fn is_restored_at_end(&self) -> bool {
        self.is_restored_at_end.load(Ordering::Relaxed)
    }

    /// Lets the next iteration start the run again: the caller has seen the end.
    pub(super) fn end_seen(&self) {
        self.is_restored_at_end.store(false, Ordering::Relaxed);
    }

    /// Applies a correction table from the table's step on.
    pub(super) fn correct(&self, table: CorrectionTable) -> Result<(), DflopError> {
        self.planner.correct(table.clone())?;
        self.corrections().push(table);
        Ok(())
    }

    /// Returns the state as JSON: the Rust loader's state and, if there are any, the corrections.
    pub(super) fn state(&self) -> PyResult<Value> {
        let state = self.loader.get()?.state().map_err(DflopError::from)?;
        let json = |error: serde_json::Error| no_state(&error);
        let mut state = serde_json::to_value(state).map_err(json)?;
        let corrections = self.corrections();
        if let (Value::Object(fields), false) = (&mut state, corrections.is_empty()) {
            fields.insert(CORRECTIONS.to_owned(), serde_json::to_value(&*corrections).map_err(json)?);
        }
        Ok(state)
    }

    fn corrections(&self) -> std::sync::MutexGuard<'_, Vec<CorrectionTable>> {
        self.corrections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of a balanced loader, read from JSON.
pub(super) struct State {
    loader: LoaderState,
    corrections: Vec<CorrectionTable>,
    /// Whether a dataset may have changed since.
    pub(super) accepts_changed_data: bool,
}

impl State {
    /// Reads a state from JSON.
    pub(super) fn parse(text: &str) -> Result<Self, DflopError> {
        let mut value: Value = serde_json::from_str(text).map_err(|error| no_state(&error))?;
        let tables = value.as_object_mut().and_then(|fields| fields.remove(CORRECTIONS));
        let corrections = tables.map(serde_json::from_value).transpose().map_err(|error| no_state(&error))?;
        let loader = LoaderState::from_json(&value.to_string())?;
        let corrections = corrections.unwrap_or_default();
        Ok(Self { loader, corrections, accepts_changed_data: false })
    }
}

fn no_state(error: &serde_json::Error) -> DflopError {
    dflop_loader::Error::State { reason: format!("expected a loader state: {error}") }.into()
}
