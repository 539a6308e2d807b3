//! Corrects the cost model of later plans by measured times.

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTracker};
use dflop_loader::{StepPlan, StepPlanner};

use super::measured_times::MeasuredTimes;
use crate::error::{Error, Result};
use crate::inputs::PredictedTimes;
use crate::pipeline::Job;

/// Updates correction tables from measured times; every rank computes the same ones.
pub(super) struct PlanCorrector(CorrectionTracker);

impl PlanCorrector {
    pub(super) fn new(options: CorrectionOptions) -> Result<Self> {
        Ok(Self(CorrectionTracker::new(options)?))
    }

    /// Adds the times of a step. At the end of an interval, the planner may get a new table for later steps.
    pub(super) fn add_step(
        &mut self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        predicted: &PredictedTimes,
        times: &MeasuredTimes,
    ) -> Result<()> {
        if self.0.is_tracking() {
            let measured = |module, microbatch| times.module_ns(module, microbatch);
            for observation in predicted.observations(job, planner, plan, measured) {
                self.0.observe(&observation)?;
            }
        }
        let Some(interval) = self.0.end_step() else { return Ok(()) };
        tracing::info!(
            error = interval.error_uncorrected,
            corrected = interval.error_corrected,
            "predicted and measured stage times"
        );
        match interval.table {
            Some(table) => planner.correct(table).map_err(Error::from),
            None => Ok(()),
        }
    }
}
