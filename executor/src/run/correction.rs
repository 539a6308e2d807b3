//! Measured times of modules over microbatches, added up over the ranks that hold their stages.

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTracker};
use dflop_loader::plan::{StepPlan as LoaderPlan, StepPlanner};

use crate::comm::{Comm, StepContext};
use crate::error::{Error, Result};
use crate::feed::PlannedTimes;
use crate::pipeline::{Job, Place, Timed};

/// Forward and backward of every module over every microbatch of a step, in nanoseconds of CPU time; equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimes {
    /// By module; first place of each.
    starts: Vec<usize>,
    ns: Vec<u64>,
    /// Time that all ranks computed, on the clock on the wall.
    pub(super) busy_ns: u64,
    /// Time that all ranks waited for data.
    pub(super) waited_ns: u64,
}

impl StepTimes {
    /// Adds up what ranks measured; all of them call it together.
    pub(super) fn exchange(
        comm: &dyn Comm,
        job: &Job,
        place: &Place,
        step: u64,
        planned: &PlannedTimes,
        (timeline, waited_ns): (&[Timed], u64),
    ) -> Result<Self> {
        let mut starts = vec![0];
        for microbatches in planned.microbatches() {
            starts.push(starts[starts.len() - 1] + microbatches);
        }
        let cells = starts[starts.len() - 1];
        let mut ns = vec![0; cells + 2];
        for timed in timeline {
            let Some(part) = timed.action.pass().map(|pass| pass.part) else { continue };
            ns[cells] += timed.end_ns - timed.start_ns;
            if place.tp_rank == 0 {
                let module = job.stages()[usize::from(part.stage)].module();
                ns[starts[module] + part.microbatch as usize] += timed.cpu_ns;
            }
        }
        ns[cells + 1] = waited_ns;
        comm.all_reduce(StepContext::step(step, "add up times"), ns.as_mut_slice().into())?;
        let (busy_ns, waited_ns) = (ns[cells], ns[cells + 1]);
        ns.truncate(cells);
        Ok(Self { starts, ns, busy_ns, waited_ns })
    }

    /// Returns the time of a module over one of its microbatches.
    ///
    /// # Panics
    /// If there is no such module or microbatch.
    #[must_use]
    pub fn module_ns(&self, module: usize, microbatch: usize) -> u64 {
        self.ns[self.starts[module] + microbatch]
    }
}

/// Learns corrections; every rank the same.
pub(super) struct Learner(CorrectionTracker);

impl Learner {
    pub(super) fn new(options: CorrectionOptions) -> Result<Self> {
        Ok(Self(CorrectionTracker::new(options)?))
    }

    /// Takes the times of a step; at the end of an interval plans may change from a later step on.
    pub(super) fn learn(
        &mut self,
        job: &Job,
        planner: &StepPlanner,
        plan: &LoaderPlan,
        planned: &PlannedTimes,
        times: &StepTimes,
    ) -> Result<()> {
        if self.0.is_tracking() {
            let measured = |module, microbatch| times.module_ns(module, microbatch);
            for observation in planned.observations(job, planner, plan, measured) {
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
