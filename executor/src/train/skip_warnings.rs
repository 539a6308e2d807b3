//! Logs warnings about skipped samples.

use crate::device::Device;
use crate::inputs::{InputReader, StepInputs};

/// Number of skipped samples logged so far.
#[derive(Debug, Default)]
pub(super) struct SkipWarnings {
    skipped: usize,
}

impl SkipWarnings {
    /// Starts after the samples that the index already skipped, which are the same on all ranks; rank 0 logs
    /// those too.
    pub(super) fn new<D: Device>(rank: usize, inputs: &InputReader<D>) -> Self {
        Self { skipped: if rank == 0 { 0 } else { inputs.loader().skipped().len() } }
    }

    /// Logs the samples that this rank's loader skipped since the last call, and on rank 0 those left out of
    /// the step.
    pub(super) fn step<D: Device>(
        &mut self,
        rank: usize,
        inputs: &InputReader<D>,
        step_inputs: &StepInputs<D>,
    ) {
        let skipped = inputs.loader().skipped();
        for skipped in skipped.iter().skip(self.skipped) {
            let (key, field) = (skipped.key.as_deref(), skipped.field.as_deref());
            let (shard, reason) = (&skipped.shard, &skipped.reason);
            tracing::warn!(shard, key, field, reason, "a sample cannot be used");
        }
        self.skipped = skipped.len();
        for skipped in step_inputs.skipped.iter().filter(|_| rank == 0) {
            // All ranks have the same list, so one of them logs it.
            let row = inputs.planner().row(step_inputs.plan.samples[skipped.index as usize]);
            let (step, key, reason) = (step_inputs.plan.step, row.key(), &skipped.reason);
            tracing::warn!(step, key, reason, "a sample is left out of a step");
        }
    }
}
