//! Corrects the cost model behind the plans by measured times.

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTracker};
use dflop_loader::plan::{StepPlan, StepPlanner};

use super::measured_times::MeasuredTimes;
use crate::error::{Error, Result};
use crate::inputs::PredictedTimes;
use crate::pipeline::Job;

/// Learns corrections; every rank the same.
pub(super) struct PlanCorrector(CorrectionTracker);

impl PlanCorrector {
    pub(super) fn new(options: CorrectionOptions) -> Result<Self> {
        Ok(Self(CorrectionTracker::new(options)?))
    }

    /// Takes the times of a step; at the end of an interval plans may change from a later step on.
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
            "predicted against measured stage times"
        );
        match interval.table {
            Some(table) => planner.correct(table).map_err(Error::from),
            None => Ok(()),
        }
    }
}
