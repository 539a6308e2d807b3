//! Learns cost model corrections from measured times, and applies them to later plans if enabled.

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable, CorrectionTracker, SlowRank};
use dflop_loader::{StepPlan, StepPlanner};
use serde::Serialize;

use super::correction_record::CorrectionRecorder;
use super::measured_times::MeasuredTimes;
use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::Job;

/// Settings for learned corrections.
#[derive(Debug, Clone, Default)]
pub struct CorrectionSettings {
    /// Rule by which tables are learned from measured times.
    pub options: CorrectionOptions,
    /// Whether learned tables correct later plans. If so, the plans and the last digits in losses depend on
    /// machine load.
    pub is_applied: bool,
    /// Tables from a restored state, [`crate::checkpoint::RunState::corrections`].
    pub restored: Vec<CorrectionTable>,
}

/// Prediction errors over a step interval, and the table learned from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CorrectionReport {
    /// Mean error without correction, as a fraction of the measured time.
    pub error_uncorrected: f64,
    /// Mean error with the table that was learned before the interval, if there was one.
    pub error_corrected: Option<f64>,
    /// New table version, if the table differs from the previous table.
    pub version: Option<u64>,
    /// Data-parallel ranks in a module that need longer for the same work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slow_ranks: Vec<SlowRank>,
    /// Whether the table corrects plans.
    pub is_applied: bool,
}

/// Updates correction tables from measured times; every rank computes the same tables.
pub(super) struct PlanCorrector {
    tracker: CorrectionTracker,
    is_applied: bool,
    recorder: Option<CorrectionRecorder>,
    /// Tables that plans for the next or later steps may need, in order.
    tables: Vec<CorrectionTable>,
}

impl PlanCorrector {
    /// Starts learning, or continues at a step after 0.
    pub(super) fn new(settings: CorrectionSettings, step: u64) -> Result<Self> {
        let CorrectionSettings { options, is_applied, restored: tables } = settings;
        let tracker = CorrectionTracker::new(options)?.resume(step, tables.last().cloned());
        Ok(Self { tracker, is_applied, recorder: None, tables })
    }

    /// Records the tables from this step on.
    pub(super) fn record(&mut self, recorder: CorrectionRecorder) {
        self.recorder = Some(recorder);
    }

    /// Adds step times. At the end of an interval, returns a report and may pass a new table to the planner
    /// for later steps.
    pub(super) fn add_step(
        &mut self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        predicted: &PredictedTimes,
        times: &MeasuredTimes,
    ) -> Result<Option<CorrectionReport>> {
        if self.tracker.is_tracking() {
            let measured = |module, microbatch| times.module_ns(module, microbatch);
            for observation in predicted.observations(job, planner, plan, measured) {
                self.tracker.observe(&observation)?;
            }
        }
        let interval = self.tracker.end_step();
        let table = interval.as_ref().and_then(|interval| interval.table.as_ref());
        if let Some(recorder) = &mut self.recorder {
            recorder.step(plan.step, table)?;
        }
        if let Some(table) = table {
            if self.is_applied {
                planner.correct(table.clone())?;
            }
            self.tables.push(table.clone());
        }
        // a table ends when a later one is in force
        let next = plan.step + 1;
        let ended = self.tables.iter().skip(1).take_while(|table| table.effective_step() <= next).count();
        self.tables.drain(..ended);
        Ok(interval.map(|interval| CorrectionReport {
            error_uncorrected: interval.error_uncorrected,
            error_corrected: interval.error_corrected,
            version: interval.table.as_ref().map(CorrectionTable::version),
            slow_ranks: interval.slow_ranks,
            is_applied: self.is_applied,
        }))
    }

    /// Returns the tables that a run resuming at the next step needs, in order.
    pub(super) fn tables(&self) -> &[CorrectionTable] {
        &self.tables
    }
}
