//! Logs warnings about skipped samples.

use crate::inputs::{InputsAhead, StepInputs};
use dflop_device::Device;
use dflop_loader::BalancedLoader;

/// Numbers of skipped samples in a loader, seen and logged so far.
#[derive(Debug, Default, Clone)]
struct Seen {
    listed: usize,
    unlisted: u64,
}

/// Numbers of skipped samples in a rank's loaders, seen and logged so far.
#[derive(Debug, Default)]
pub(super) struct SkipWarnings(Vec<Seen>);

impl SkipWarnings {
    /// Starts after the samples already skipped by the index, which are the same for all loaders; rank 0's
    /// first loader logs the index skips too.
    pub(super) fn new<D: Device>(rank: usize, inputs: &InputsAhead<D>) -> Self {
        let seen = |(number, loader): (usize, &BalancedLoader)| {
            let is_first = rank == 0 && number == 0;
            Seen { listed: if is_first { 0 } else { loader.skipped().len() }, unlisted: 0 }
        };
        Self(inputs.loaders().enumerate().map(seen).collect())
    }

    /// Logs the samples that this rank's loaders skipped since the last call, and, on rank 0, the samples
    /// left out of the step.
    pub(super) fn step<D: Device>(
        &mut self,
        rank: usize,
        inputs: &InputsAhead<D>,
        step_inputs: &StepInputs<D>,
    ) {
        for (loader, seen) in inputs.loaders().zip(&mut self.0) {
            seen.warn(loader);
        }
        for skipped in step_inputs.skipped.iter().filter(|_| rank == 0) {
            // All ranks have the same list, so one of them logs it.
            let row = inputs.planner().row(step_inputs.plan.samples[skipped.index as usize]);
            let (step, key, reason) = (step_inputs.plan.step, row.key(), &skipped.reason);
            tracing::warn!(step, key, reason, "a sample is left out of a step");
        }
    }
}

impl Seen {
    fn warn(&mut self, loader: &BalancedLoader) {
        let skipped = loader.skipped();
        for skipped in skipped.iter().skip(self.listed) {
            let (key, field) = (skipped.key.as_deref(), skipped.field.as_deref());
            let (shard, reason) = (&skipped.shard, &skipped.reason);
            tracing::warn!(shard, key, field, reason, "a sample cannot be used");
        }
        self.listed = skipped.len();
        // The account lists the first samples only, and each once; the others are numbers.
        let unlisted = loader.skip_log().skipped_samples() - skipped.len() as u64;
        if unlisted > self.unlisted {
            tracing::warn!(
                samples = unlisted,
                "more samples cannot be used, or were skipped again in a later epoch"
            );
            self.unlisted = unlisted;
        }
    }
}
