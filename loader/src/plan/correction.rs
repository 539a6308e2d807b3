//! What a run measures goes back into its plans: corrections that all ranks take at an agreed step.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use dflop_costmodel::correction::{CorrectionTable, Corrections, Observation};
use dflop_costmodel::{CostModel, Module, SampleShape};

use super::{StepPlan, StepPlanner};
use crate::error::{Error, Result};

impl StepPlanner {
    /// Plans with a correction from its step on; every clone of this planner does, a running loader's among them.
    ///
    /// All ranks take the same table before any of them plans its step: let it begin a few steps ahead of what the
    /// loaders have planned, see [`Self::planned_steps`]. Which samples make up a step does not change, only how they
    /// are cut. A run that is restored takes its tables again, in their order.
    ///
    /// # Errors
    /// [`Error::Config`] if this planner has planned the step already, or the table does not follow the last one, or
    /// costs come from a function, which corrections of the model do not reach.
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

    /// Returns the number of steps from 0 up to the last one that was planned.
    #[must_use]
    pub fn planned_steps(&self) -> u64 {
        self.planned.load(Ordering::Acquire)
    }

    /// Returns what a measured time of a module over a microbatch says, for a
    /// [`CorrectionTracker`](dflop_costmodel::correction::CorrectionTracker); `None` if no sample there has work for the module.
    ///
    /// - `measured_ns`: forward and backward of the whole module on one device, in nanoseconds; the sum over its stages
    ///
    /// # Panics
    /// If the plan has no such rank or microbatch.
    #[must_use]
    pub fn observation(
        &self,
        plan: &StepPlan,
        [rank, microbatch]: [usize; 2],
        module: Module,
        measured_ns: u64,
    ) -> Option<Observation> {
        let (mut shape, mut samples) = (SampleShape::default(), Vec::new());
        for &place in &plan.ranks[rank][microbatch] {
            self.row(plan.samples[place as usize]).read_shape(&mut shape);
            // A sample that the model refuses was planned at no cost.
            samples.extend(self.model.predict_uncorrected(module, &shape).ok().flatten());
        }
        (!samples.is_empty()).then_some(Observation { module, measured_ns, samples })
    }

    /// The cost model of a step; from here on its correction is settled.
    pub(super) fn model_at(&self, step: u64) -> CostModel {
        let corrections = self.corrections.lock().unwrap_or_else(PoisonError::into_inner);
        self.planned.fetch_max(step.saturating_add(1), Ordering::AcqRel);
        self.corrected(&corrections, step)
    }

    /// The same, settling nothing.
    pub(super) fn model_of(&self, step: u64) -> CostModel {
        self.corrected(&self.corrections.lock().unwrap_or_else(PoisonError::into_inner), step)
    }

    fn corrected(&self, corrections: &Corrections, step: u64) -> CostModel {
        let model = CostModel::clone(&self.model);
        match corrections.at_step(step) {
            Some(table) => model.correction(Some(table.clone())),
            None => model,
        }
    }
}
