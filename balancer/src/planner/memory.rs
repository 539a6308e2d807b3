//! Checks plans against memory before any simulation.
//!
//! A stage holds the microbatches between its forward and its backward pass, as many as the schedule has in
//! flight. Mean sizes give the least that these take; the simulation checks the actual microbatches.

use super::cluster::Placement;
use super::costs::StageBytes;
use super::space::shape::StageShape;
use super::space::{Family, SearchSpace};
use crate::schedule::{EncoderChains, StepShape};

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
    let [encoder, llm] = space.shapes(family);
    let [encoder_ranks, llm_ranks] = space.optimizer_ranks(family);
    let shape = space.step_shape(family, few);
    let batch_tokens = space.slack * space.workload.batch_tokens_max as f64;
    let tokens = batch_tokens / (f64::from(many) * f64::from(family.llm_dp));
    let longest = space.workload.tokens_max as f64;
    let batch_tiles = space.slack * space.workload.batch_tiles_max as f64;
    let tiles = batch_tiles / (f64::from(many) * f64::from(family.encoder_dp));
    // A rank that shares no media takes all tiles of a sample.
    let sharers = if family.is_shared() { family.encoder_dp } else { 1 };
    let most_tiles = (space.workload.tiles_max as f64 / f64::from(sharers)).ceil();
    let llm_bytes = |first_stage: usize| {
        let in_flight = |stage: u32| shape.in_flight(first_stage + stage as usize) as f64;
        fullest(llm, llm_ranks, in_flight, tokens, longest)
    };
    match family.placement {
        Placement::Disaggregated => {
            let in_flight = |stage: u32| shape.in_flight(stage as usize) as f64;
            let encoder_bytes = fullest(encoder, encoder_ranks, in_flight, tiles, most_tiles);
            MemoryRequirement { encoder_bytes, llm_bytes: llm_bytes(shape.encoder_stages()) }
        }
        Placement::Colocated => {
            let tiles = (space.workload.batch_tiles_max as f64 / f64::from(family.encoder_dp)).ceil();
            let phase = phase_bytes(space, family, tiles);
            let all = llm_bytes(0) + phase;
            MemoryRequirement { encoder_bytes: all, llm_bytes: all }
        }
        Placement::Joint => {
            let most_tiles = (space.workload.tiles_max as f64 / f64::from(llm.tp)).ceil();
            let joint = &space.joint[family.llm];
            let of_stage = |stage: usize| {
                let [encoder, llm] = joint.memory(stage);
                let in_flight = shape.in_flight(stage) as f64;
                // The longest sample need not be the one with most tiles; either is met alone.
                let with = |tokens_once: f64, tiles_once: f64| {
                    let held = |mean: f64, once: f64| once + (in_flight - 1.0) * mean;
                    // Layers of both modules are not computed at the same time.
                    let working =
                        (encoder.working_per_unit * tiles_once).max(llm.working_per_unit * tokens_once);
                    encoder.shared_by(encoder_ranks).at(held(tiles, tiles_once), 0.0)
                        + llm.shared_by(llm_ranks).at(held(tokens, tokens_once), 0.0)
                        + working
                };
                with(tokens.max(longest), tiles).max(with(tokens, tiles.max(most_tiles)))
            };
            let all = (0..llm.layers.len()).map(of_stage).fold(0.0, f64::max);
            MemoryRequirement { encoder_bytes: all, llm_bytes: all }
        }
    }
}

/// Returns the least memory of an LLM on GPUs of its own or with a colocated encoder, with `few` to `many`
/// microbatches of `ranks` ranks.
pub(super) fn llm_bytes(space: &SearchSpace<'_>, llm: usize, ranks: u32, few: u32, many: u32) -> f64 {
    let shape = &space.llm.shapes[llm];
    let batch_tokens = space.slack * space.workload.batch_tokens_max as f64;
    let tokens = batch_tokens / (f64::from(many) * f64::from(ranks));
    let step = StepShape {
        kind: space.options.schedule,
        encoders: EncoderChains::default(),
        stages: shape.pp as usize,
        slots: few as usize,
    };
    let optimizer_ranks = if space.options.has_sharded_optimizer { ranks } else { 1 };
    let in_flight = |stage: u32| step.in_flight(stage as usize) as f64;
    fullest(shape, optimizer_ranks, in_flight, tokens, space.workload.tokens_max as f64)
}

/// Returns the encoder's memory where a rank takes `tiles` tiles in one phase.
pub(super) fn phase_bytes(space: &SearchSpace<'_>, family: &Family, tiles: f64) -> f64 {
    let shape = &space.encoder.shapes[family.encoder];
    let ranks = space.optimizer_ranks(family)[0];
    shape.memory.iter().map(|(_, bytes)| bytes.shared_by(ranks).at(tiles, tiles)).fold(0.0, f64::max)
}

/// Whether some plan of the range may fit.
pub(super) fn may_fit(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> bool {
    requirement(space, family, few, many).most() <= space.budget_bytes
}

/// Returns the memory of the fullest stage with `mean` units per microbatch, one of them at least `largest`.
fn fullest(
    shape: &StageShape,
    optimizer_ranks: u32,
    in_flight: impl Fn(u32) -> f64,
    mean: f64,
    largest: f64,
) -> f64 {
    let of = |(stage, bytes): &(u32, StageBytes)| {
        // One of the microbatches in flight is the largest, and it is the one computed.
        let once = mean.max(largest);
        bytes.shared_by(optimizer_ranks).at(once + (in_flight(*stage) - 1.0) * mean, once)
    };
    shape.memory.iter().map(of).fold(0.0, f64::max)
}
