//! Sums measured times of modules over the ranks that hold their stages.

use crate::comm::{Comm, StepContext};
use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{Job, RankPlacement, TimedAction};

/// CPU time of every module over every microbatch of a step, forward and backward, nanoseconds; equal on all
/// ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredTimes {
    /// Index in `ns` of the first microbatch of each module.
    starts: Vec<usize>,
    ns: Vec<u64>,
    /// Wall time of passes, summed over all ranks.
    pub(super) busy_ns: u64,
    /// Time of waiting for data, summed over all ranks.
    pub(super) waited_ns: u64,
}

impl MeasuredTimes {
    /// Sums the times that ranks measured; all of them call it together.
    pub(super) fn exchange(
        comm: &dyn Comm,
        job: &Job,
        placement: &RankPlacement,
        step: u64,
        predicted: &PredictedTimes,
        (timeline, waited_ns): (&[TimedAction], u64),
    ) -> Result<Self> {
        let mut starts = vec![0];
        for microbatches in predicted.microbatches() {
            starts.push(starts[starts.len() - 1] + microbatches);
        }
        // One all-reduce for everything: times by module and microbatch, then busy time, then waiting time.
        let cells = starts[starts.len() - 1];
        let mut ns = vec![0; cells + 2];
        for timed in timeline {
            let Some(part) = timed.action.pass().map(|pass| pass.part) else { continue };
            ns[cells] += timed.end_ns - timed.start_ns;
            // All TP ranks of a stage run the same pass; the first one counts.
            if placement.tp_rank == 0 {
                let module = job.stages()[usize::from(part.stage)].module();
                ns[starts[module] + part.microbatch as usize] += timed.cpu_ns;
            }
        }
        ns[cells + 1] = waited_ns;
        comm.all_reduce(StepContext::step(step, "sum times"), ns.as_mut_slice().into())?;
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
