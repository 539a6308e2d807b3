//! Logs warnings about skipped samples.

use crate::inputs::{InputReader, StepInputs};
use dflop_device::Device;

/// Numbers of skipped samples seen and logged so far.
#[derive(Debug, Default)]
pub(super) struct SkipWarnings {
    listed: usize,
    unlisted: u64,
}

impl SkipWarnings {
    /// Starts after the samples that the index already skipped, which are the same on all ranks; rank 0 logs
    /// those too.
    pub(super) fn new<D: Device>(rank: usize, inputs: &InputReader<D>) -> Self {
        Self { listed: if rank == 0 { 0 } else { inputs.loader().skipped().len() }, unlisted: 0 }
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
        for skipped in skipped.iter().skip(self.listed) {
            let (key, field) = (skipped.key.as_deref(), skipped.field.as_deref());
            let (shard, reason) = (&skipped.shard, &skipped.reason);
            tracing::warn!(shard, key, field, reason, "a sample cannot be used");
        }
        self.listed = skipped.len();
        // The account lists the first samples only, and each once; the others are numbers.
        let unlisted = inputs.loader().skip_log().skipped_samples() - skipped.len() as u64;
        if unlisted > self.unlisted {
            tracing::warn!(
                samples = unlisted,
                "more samples cannot be used, or were skipped again in a later epoch"
            );
            self.unlisted = unlisted;
        }
        for skipped in step_inputs.skipped.iter().filter(|_| rank == 0) {
            // All ranks have the same list, so one of them logs it.
            let row = inputs.planner().row(step_inputs.plan.samples[skipped.index as usize]);
            let (step, key, reason) = (step_inputs.plan.step, row.key(), &skipped.reason);
            tracing::warn!(step, key, reason, "a sample is left out of a step");
        }
    }
}
