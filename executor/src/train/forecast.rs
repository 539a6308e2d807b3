//! Simulates a step before it runs, with the times that the cost model predicts.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Action, Part, PassKind};

use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{Job, simulate};

/// Predicted schedule of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forecast {
    /// End of the last rank, with messages and gradient sums taken as free.
    pub makespan_ns: u64,
    /// Times of each pass of one rank, in nanoseconds since the start of the step.
    passes: BTreeMap<(PassKind, Part), Range<u64>>,
}

impl Forecast {
    /// Simulates the schedule of a job. A stage takes the share of its module's time that its layers have, a
    /// third of it forward.
    pub(super) fn new(job: &Job, pipeline_rank: usize, predicted: &PredictedTimes) -> Result<Self> {
        let layers = |module: usize| job.model().layers(job.modules()[module].module).max(1) as u64;
        let stage_ns = |stage: u16, microbatch: u32| {
            let stage = &job.stages()[usize::from(stage)];
            let module_ns = predicted.module_ns(stage.module(), microbatch);
            let own = stage.range.layers.len() as u64;
            // Nanoseconds times layers may exceed 64 bits.
            (u128::from(module_ns) * u128::from(own) / u128::from(layers(stage.module()))) as u64
        };
        let (makespan_ns, events) = simulate(job, predicted.rounds(), stage_ns)?;
        let own = events.into_iter().filter(|(rank, ..)| *rank == pipeline_rank);
        let passes = own.map(|(_, pass, range)| ((pass.kind, pass.part), range)).collect();
        Ok(Self { makespan_ns, passes })
    }

    /// Returns the predicted time range of an action, if it is a pass of this rank.
    #[must_use]
    pub fn range(&self, action: Action) -> Option<Range<u64>> {
        let pass = action.pass()?;
        self.passes.get(&(pass.kind, pass.part)).cloned()
    }
}
