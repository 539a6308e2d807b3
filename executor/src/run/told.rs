//! Warnings of samples that nobody learns from.

use crate::device::Device;
use crate::feed::{FedStep, Feed};

/// What was told so far.
#[derive(Debug, Default)]
pub(super) struct Told {
    skipped: usize,
}

impl Told {
    /// Begins behind what the index found, which is the same on all ranks and told by rank 0.
    pub(super) fn new<D: Device>(rank: usize, feed: &Feed<D>) -> Self {
        Self { skipped: if rank == 0 { 0 } else { feed.loader().skipped().len() } }
    }

    /// Warns of what this rank's loader could not deliver since the last call, and on rank 0 of what the step is without.
    pub(super) fn step<D: Device>(&mut self, rank: usize, feed: &Feed<D>, fed: &FedStep<D>) {
        let skipped = feed.loader().skipped();
        for skipped in skipped.iter().skip(self.skipped) {
            let (key, field) = (skipped.key.as_deref(), skipped.field.as_deref());
            let (shard, reason) = (&skipped.shard, &skipped.reason);
            tracing::warn!(shard, key, field, reason, "a sample cannot be used");
        }
        self.skipped = skipped.len();
        for dropped in fed.dropped.iter().filter(|_| rank == 0) {
            let row = feed.planner().row(fed.plan.samples[dropped.place as usize]);
            let (step, key, reason) = (fed.plan.step, row.key(), &dropped.reason);
            tracing::warn!(step, key, reason, "a sample is left out of a step");
        }
    }
}
