//! What the cost model and the simulator say of a step before it runs.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Action, Part, PassKind};

use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{Job, simulate};

/// Predicted times of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forecast {
    /// When the last rank ends, messages and sums of gradients taken as free.
    pub makespan_ns: u64,
    /// When each pass of one rank runs, nanoseconds since the step's begin.
    passes: BTreeMap<(PassKind, Part), Range<u64>>,
}

impl Forecast {
    /// Simulates the schedule of a job; a stage takes its share of a module's time by its layers, a third of it forward.
    pub(super) fn new(job: &Job, pipeline_rank: usize, predicted: &PredictedTimes) -> Result<Self> {
        let layers = |module: usize| job.model().layers(job.modules()[module].module).max(1) as u64;
        let stage_ns = |stage: u16, microbatch: u32| {
            let stage = &job.stages()[usize::from(stage)];
            let module_ns = predicted.module_ns(stage.module(), microbatch);
            let own = stage.range.layers.len() as u64;
            (u128::from(module_ns) * u128::from(own) / u128::from(layers(stage.module()))) as u64
        };
        let (makespan_ns, events) = simulate(job, predicted.rounds(), stage_ns)?;
        let own = events.into_iter().filter(|(rank, ..)| *rank == pipeline_rank);
        let passes = own.map(|(_, pass, range)| ((pass.kind, pass.part), range)).collect();
        Ok(Self { makespan_ns, passes })
    }

    /// When an action runs, if it is a pass of this rank.
    #[must_use]
    pub fn range(&self, action: Action) -> Option<Range<u64>> {
        let pass = action.pass()?;
        self.passes.get(&(pass.kind, pass.part)).cloned()
    }
}
