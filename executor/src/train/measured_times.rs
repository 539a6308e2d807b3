//! Measured times of modules over microbatches, added up over the ranks that hold their stages.

use crate::comm::{At, Comm};
use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{Job, RankPlacement, TimedAction};

/// Forward and backward of every module over every microbatch of a step, in nanoseconds of CPU time; equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredTimes {
    /// By module; first place of each.
    starts: Vec<usize>,
    ns: Vec<u64>,
    /// Time that all ranks computed, on the clock on the wall.
    pub(super) busy_ns: u64,
    /// Time that all ranks waited for data.
    pub(super) waited_ns: u64,
}

impl MeasuredTimes {
    /// Adds up what ranks measured; all of them call it together.
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
        let cells = starts[starts.len() - 1];
        let mut ns = vec![0; cells + 2];
        for timed in timeline {
            let Some(part) = timed.action.pass().map(|pass| pass.part) else { continue };
            ns[cells] += timed.end_ns - timed.start_ns;
            if placement.tp_rank == 0 {
                let module = job.stages()[usize::from(part.stage)].module();
                ns[starts[module] + part.microbatch as usize] += timed.cpu_ns;
            }
        }
        ns[cells + 1] = waited_ns;
        comm.all_reduce(At::step(step, "add up times"), ns.as_mut_slice().into())?;
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
