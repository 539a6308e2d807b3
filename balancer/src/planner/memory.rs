//! Checks plans against memory before any simulation.
//!
//! A 1F1B stage holds the microbatches between its forward and its backward pass. Mean sizes give the least
//! that these take; the simulation checks the actual microbatches.

use super::cluster::Placement;
use super::costs::StageBytes;
use super::space::shape::StageShape;
use super::space::{Family, SearchSpace};

/// Memory of each module's fullest GPU in bytes; of the same GPU where modules are colocated.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct MemoryRequirement {
    pub(super) encoder_bytes: f64,
    pub(super) llm_bytes: f64,
}

impl MemoryRequirement {
    /// Returns the larger requirement of each module.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            encoder_bytes: self.encoder_bytes.max(other.encoder_bytes),
            llm_bytes: self.llm_bytes.max(other.llm_bytes),
        }
    }

    /// Returns the requirement of the fuller module.
    pub(super) fn most(&self) -> f64 {
        self.encoder_bytes.max(self.llm_bytes)
    }
}

/// Returns the least memory of plans of a family with `few` to `many` microbatches, on the fullest batch.
///
/// Every plan meets the longest sample at some step; in flight with it are average microbatches, times the
/// space's slack.
pub(super) fn requirement(
    space: &SearchSpace<'_>,
    family: &Family,
    few: u32,
    many: u32,
) -> MemoryRequirement {
    let llm = &space.llm.shapes[family.llm];
    let encoder = &space.encoder.shapes[family.encoder];
    let llm_bytes = llm_bytes(space, family.llm, family.llm_dp, few, many);
    match family.placement {
        Placement::Disaggregated => {
            let batch_tiles = space.slack * space.workload.batch_tiles_max as f64;
            let tiles = batch_tiles / (f64::from(many) * f64::from(family.encoder_dp));
            let largest = (space.workload.tiles_max as f64 / f64::from(family.encoder_dp)).ceil();
            let encoder_bytes = fullest(encoder, encoder.pp + llm.pp, few, tiles, largest);
            MemoryRequirement { encoder_bytes, llm_bytes }
        }
        Placement::Colocated => {
            let all = llm_bytes + phase_bytes(space, family, space.workload.batch_tiles_max as f64);
            MemoryRequirement { encoder_bytes: all, llm_bytes: all }
        }
    }
}

/// Returns the least memory of an LLM with `few` to `many` microbatches of `ranks` ranks.
pub(super) fn llm_bytes(space: &SearchSpace<'_>, llm: usize, ranks: u32, few: u32, many: u32) -> f64 {
    let shape = &space.llm.shapes[llm];
    let batch_tokens = space.slack * space.workload.batch_tokens_max as f64;
    let tokens = batch_tokens / (f64::from(many) * f64::from(ranks));
    fullest(shape, shape.pp, few, tokens, space.workload.tokens_max as f64)
}

/// Returns the encoder's memory for a batch of `batch_tiles` tiles that runs in one phase.
pub(super) fn phase_bytes(space: &SearchSpace<'_>, family: &Family, batch_tiles: f64) -> f64 {
    let shape = &space.encoder.shapes[family.encoder];
    let tiles = (batch_tiles / f64::from(family.encoder_dp)).ceil();
    shape.memory.iter().map(|(_, bytes)| bytes.at(tiles, tiles)).fold(0.0, f64::max)
}

/// Whether some plan of the range may fit.
pub(super) fn may_fit(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> bool {
    requirement(space, family, few, many).most() <= space.budget_bytes
}

/// Returns the memory of the fullest stage with `mean` units per microbatch, one of them at least `largest`.
fn fullest(shape: &StageShape, stages_to_end: u32, microbatches: u32, mean: f64, largest: f64) -> f64 {
    let of = |(stage, bytes): &(u32, StageBytes)| {
        let in_flight = f64::from(in_flight(stages_to_end, *stage, microbatches));
        // One of the microbatches in flight is the largest, and it is the one computed.
        let once = mean.max(largest);
        bytes.at(once + (in_flight - 1.0) * mean, once)
    };
    shape.memory.iter().map(of).fold(0.0, f64::max)
}

/// Returns the microbatches in flight at a stage, `stages_to_end - stage` stages from the end including
/// itself.
pub(super) fn in_flight(stages_to_end: u32, stage: u32, microbatches: u32) -> u32 {
    // 1F1B runs this many forward passes before the first backward pass.
    (stages_to_end - stage).min(microbatches).max(1)
}
