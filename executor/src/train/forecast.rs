//! Simulates a step before it runs, with predicted pass times.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Action, Part, PassKind};
use dflop_balancer::split_time;

use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{Job, PassTimes, RankRole, simulate};

/// Predicted step schedule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Time when the last rank ends, in nanoseconds, with free messages and gradient sums.
    pub makespan_ns: u64,
    /// Pass time ranges on this rank, in nanoseconds since the step start.
    passes: BTreeMap<(PassKind, Part), Range<u64>>,
}

impl Forecast {
    /// Simulates a job's schedule.
    ///
    /// - `roles`: rank roles
    /// - `rounds`: microbatches per LLM DP rank
    pub(super) fn new(job: &Job, roles: &[RankRole], rounds: usize, times: &PassTimes) -> Result<Self> {
        let (makespan_ns, events) = simulate(job, rounds, times)?;
        let is_own = |rank: usize| roles.iter().any(|role| role.pipeline_rank == rank);
        let own = events.into_iter().filter(|(rank, ..)| is_own(*rank));
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

/// Divides planned module times: a stage's time is the module time multiplied by the stage's share in the
/// layers; a third is forward, or everything if nothing is trained in this or earlier stages.
pub(super) fn planned_passes(job: &Job, predicted: &PredictedTimes) -> Result<PassTimes> {
    PassTimes::zero(job, predicted.rounds()).fill(|part: Part| {
        let stage = &job.stages()[usize::from(part.stage)];
        let layers = job.model().layers(stage.range.module).max(1) as u128;
        let module_ns = u128::from(predicted.module_ns(stage.module(), part.microbatch));
        // Nanoseconds times layers may exceed 64 bits.
        let stage_ns = (module_ns * stage.range.layers.len() as u128 / layers) as u64;
        let (forward, backward) = if stage.has_backward { split_time(stage_ns) } else { (stage_ns, 0) };
        Ok([forward, backward])
    })
}
