//! Learns corrections for later plans from all ranks' measured stage times.

use std::collections::HashMap;
use std::sync::Arc;

use dflop_costmodel::Module;
use dflop_costmodel::correction::{CorrectionOptions, CorrectionTracker, IntervalReport, SlowRank};
use dflop_loader::StepPlan;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::loader_config::RunningLoader;
use crate::error::DflopError;

/// Seconds by module, DP rank and microbatch; values that are not finite were not measured.
pub(super) type StageSeconds = HashMap<String, Vec<Vec<f64>>>;

/// Learns corrections from measured times; equal on all ranks that get the same times.
pub(super) struct Learner {
    tracker: CorrectionTracker,
    /// Steps after which plans change.
    interval_steps: u64,
    /// Slow ranks with a warning so far.
    warned: Vec<u32>,
}

impl Learner {
    pub(super) fn new(interval_steps: u64) -> Result<Self, DflopError> {
        let options = CorrectionOptions { interval_steps, ..CorrectionOptions::default() };
        Ok(Self { tracker: CorrectionTracker::new(options)?, interval_steps, warned: Vec::new() })
    }

    /// Checks that all reports of a run name the same interval.
    pub(super) fn check_interval(&self, interval_steps: u64) -> Result<(), DflopError> {
        if interval_steps == self.interval_steps {
            return Ok(());
        }
        let reason = format!("expected {} steps, as before, found {interval_steps}", self.interval_steps);
        Err(DflopError::config("interval", reason))
    }

    /// Returns the slow ranks in a report that had no warning before.
    pub(super) fn newly_slow(&mut self, report: &IntervalReport) -> Vec<SlowRank> {
        let is_new = |slow: &&SlowRank| !self.warned.contains(&slow.rank);
        let new: Vec<SlowRank> = report.slow_ranks.iter().filter(is_new).copied().collect();
        self.warned.extend(new.iter().map(|slow| slow.rank));
        new
    }

    /// Adds the module times for a step. At the end of an interval plans may change from a later step on.
    pub(super) fn learn(
        &mut self,
        running: &RunningLoader,
        plan: &StepPlan,
        seconds: &StageSeconds,
    ) -> Result<Option<IntervalReport>, DflopError> {
        let modules = running.planner.model().modules();
        check_names(modules, seconds)?;
        // In model order, so that all ranks make the same observations in the same order.
        for &module in modules {
            let Some(ranks) = seconds.get(module.name()) else { continue };
            check(module.name(), plan, ranks)?;
            self.observe(running, plan, Some(module), ranks)?;
        }
        self.end_step(running)
    }

    /// Adds the times for whole microbatches in a step.
    pub(super) fn learn_whole(
        &mut self,
        running: &RunningLoader,
        plan: &StepPlan,
        ranks: &[Vec<f64>],
    ) -> Result<Option<IntervalReport>, DflopError> {
        check("microbatches", plan, ranks)?;
        self.observe(running, plan, None, ranks)?;
        self.end_step(running)
    }

    fn observe(
        &mut self,
        running: &RunningLoader,
        plan: &StepPlan,
        module: Option<Module>,
        ranks: &[Vec<f64>],
    ) -> Result<(), DflopError> {
        for (rank, microbatches) in ranks.iter().enumerate() {
            for (microbatch, &seconds) in microbatches.iter().enumerate().filter(|(_, it)| it.is_finite()) {
                // The tracker counts in integer nanoseconds, so that all ranks compute the same values.
                let measured_ns = (seconds * 1e9).round() as u64;
                let place = [rank, microbatch];
                let observation = running.planner.observation(plan, place, module, measured_ns);
                if let Some(observation) = observation.filter(|_| measured_ns > 0) {
                    self.tracker.observe(&observation)?;
                }
            }
        }
        Ok(())
    }

    fn end_step(&mut self, running: &RunningLoader) -> Result<Option<IntervalReport>, DflopError> {
        let report = self.tracker.end_step();
        if let Some(table) = report.as_ref().and_then(|report| report.table.clone()) {
            running.correct(table)?;
        }
        Ok(report)
    }
}

fn check_names(modules: &[Module], seconds: &StageSeconds) -> Result<(), DflopError> {
    let is_unknown = |name: &&String| modules.iter().all(|module| module.name() != **name);
    let Some(name) = seconds.keys().find(is_unknown) else { return Ok(()) };
    let known: Vec<&str> = modules.iter().map(|module| module.name()).collect();
    let reason = format!("expected a module of {}, found `{name}`", known.join(", "));
    Err(DflopError::config("seconds", reason))
}

/// Checks that times match the plan's microbatches.
fn check(name: &str, plan: &StepPlan, ranks: &[Vec<f64>]) -> Result<(), DflopError> {
    let refused = |reason| Err(DflopError::config("seconds", reason));
    if ranks.len() != plan.ranks.len() {
        let (given, expected) = (ranks.len(), plan.ranks.len());
        return refused(format!("expected times of {expected} DP ranks for `{name}`, found {given}"));
    }
    for (rank, (given, planned)) in ranks.iter().zip(&plan.ranks).enumerate() {
        if given.len() != planned.len() {
            let (given, planned) = (given.len(), planned.len());
            return refused(format!(
                "expected times of {planned} microbatches for `{name}` on DP rank {rank}, found {given}"
            ));
        }
        if let Some(seconds) = given.iter().find(|seconds| **seconds < 0.0) {
            return refused(format!(
                "expected times of at least 0 for `{name}`, found {seconds} s on DP rank {rank}"
            ));
        }
    }
    Ok(())
}

/// The step plan for all data-parallel ranks: ``Step.plan``.
///
/// Examples:
///     >>> loader = dflop.BalancedLoader(
///     ...     "shards/", model="model/", global_batch_size=8, microbatches=2, dp_size=2
///     ... )
///     >>> plan = next(iter(loader)).plan
///     >>> plan.ranks  # places in the global batch, by rank and microbatch
///     [[[1, 6, 7], [4]], [[2, 5], [0, 3]]]
///     >>> plan.samples[:3]  # dataset and number in its index, by place
///     [(0, 122), (0, 144), (0, 8)]
///     >>> len(plan.module_seconds), plan.refused
///     (2, [])
#[pyclass(frozen, name = "StepPlan", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyStepPlan {
    pub(super) plan: Arc<StepPlan>,
}

#[pymethods]
impl PyStepPlan {
    /// Reads a plan from the JSON that pickling writes.
    #[new]
    fn new(json: &str) -> PyResult<Self> {
        let plan = serde_json::from_str(json)
            .map_err(|error| DflopError::config("json", format!("expected a pickled plan: {error}")))?;
        Ok(Self { plan: Arc::new(plan) })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyType>, (String,))> {
        let json = serde_json::to_string(&*slf.get().plan);
        let json = json.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
        Ok((slf.get_type(), (json,)))
    }

    /// Sample indices in the global batch, by DP rank and microbatch.
    #[getter]
    fn ranks(&self) -> Vec<Vec<Vec<u32>>> {
        self.plan.ranks.clone()
    }

    /// Unsupported samples, by index in the global batch, with the reason.
    #[getter]
    fn refused(&self) -> Vec<(usize, String)> {
        self.plan.refused.clone()
    }

    /// Dataset and index number for every sample in the global batch, in order.
    #[getter]
    fn samples(&self) -> Vec<(usize, u64)> {
        self.plan.samples.iter().map(|sample| (sample.dataset, sample.sample)).collect()
    }

    /// Predicted forward and backward seconds for every module, in the order of ``BalancedLoader.modules``,
    /// by DP rank and microbatch: the time for the samples, for the LLM including padding to a fixed length,
    /// and the fixed time per microbatch.
    #[getter]
    fn module_seconds(&self) -> Vec<Vec<Vec<f64>>> {
        let seconds = |ns: Vec<u64>| ns.into_iter().map(|ns| ns as f64 / 1e9).collect();
        let of_rank = |(rank, microbatches): (usize, &Vec<Vec<u32>>)| {
            (0..microbatches.len()).map(|slot| seconds(self.plan.microbatch_ns(rank, slot))).collect()
        };
        self.plan.ranks.iter().enumerate().map(of_rank).collect()
    }

    fn __repr__(&self) -> String {
        format!("StepPlan(step={}, digest={})", self.plan.step, self.plan.digest)
    }
}
