//! Checks memory before any simulation.
//!
//! A stage holds each microbatch between its forward and its backward pass, as many microbatches as the
//! schedule has in flight. Mean sizes give a lower bound on memory; the simulation checks the actual
//! microbatches.

use super::shape::StageShape;
use super::{EncoderPart, Family, SearchSpace};
use crate::cluster::Placement;
use crate::costs::StageBytes;
use crate::workload::ENCODERS_MAX;
use dflop_balancer::schedule::{EncoderChains, Part, Pass, PassKind, StepShape};

/// Memory on each module's fullest GPU in bytes; colocated modules count the same GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct MemoryRequirement {
    /// Memory for each encoder in the model; 0 for missing encoders.
    pub(crate) encoder_bytes: [f64; ENCODERS_MAX],
    pub(crate) llm_bytes: f64,
}

impl MemoryRequirement {
    /// Creates the requirement for GPUs shared by all modules in a family.
    pub(crate) fn for_all_modules(family: &Family, bytes: f64) -> Self {
        let mut all = Self { llm_bytes: bytes, ..Self::default() };
        all.encoder_bytes[..family.encoders.len()].fill(bytes);
        all
    }

    /// Returns the larger requirement for each module.
    pub(crate) fn max(self, other: Self) -> Self {
        let mut all = self;
        all.llm_bytes = all.llm_bytes.max(other.llm_bytes);
        for (one, other) in all.encoder_bytes.iter_mut().zip(other.encoder_bytes) {
            *one = one.max(other);
        }
        all
    }

    /// Returns the fullest module's requirement.
    pub(crate) fn most(&self) -> f64 {
        self.encoder_bytes.iter().copied().fold(self.llm_bytes, f64::max)
    }
}

/// Returns the minimum memory for a family's plans with `few` to `many` microbatches, on the fullest batch.
///
/// Every plan meets the longest sample at some step; average microbatches, times the space's slack, are in
/// flight with it.
pub(crate) fn requirement(
    space: &SearchSpace<'_>,
    family: &Family,
    few: u32,
    many: u32,
) -> MemoryRequirement {
    let (workload, llm) = (space.workload, space.llm_shape(family));
    let llm_ranks = space.optimizer_ranks(family.llm_dp);
    let shape = space.step_shape(family, few);
    let batch_tokens = space.slack * workload.batch_tokens_max as f64;
    let tokens = batch_tokens / (f64::from(many) * f64::from(family.llm_dp));
    let longest = workload.tokens_max as f64;
    let llm_bytes = |first_stage: usize| {
        if llm.chunks > 1 {
            return chunks_least(llm, llm_ranks, shape, [tokens, longest]);
        }
        let in_flight = |stage: u32| shape.in_flight(first_stage + stage as usize) as f64;
        fullest(llm, llm_ranks, in_flight, tokens, longest)
    };
    match family.placement {
        Placement::Disaggregated => {
            let mut all =
                MemoryRequirement { llm_bytes: llm_bytes(shape.encoder_stages()), ..Default::default() };
            for (encoder, (first_stage, _)) in shape.encoders.each().enumerate() {
                let part = family.encoders[encoder];
                // A rank that shares no media processes all tiles in a sample.
                let sharers = if family.is_shared(encoder) { part.dp } else { 1 };
                let in_flight = |stage: u32| shape.in_flight(first_stage + stage as usize) as f64;
                all.encoder_bytes[encoder] = encoder_bytes(space, encoder, part, sharers, many, in_flight);
            }
            all
        }
        Placement::Colocated => {
            let units = |encoder: usize| {
                let dp = f64::from(family.encoders[encoder].dp);
                (workload.media(encoder).batch_units_max as f64 / dp).ceil()
            };
            MemoryRequirement::for_all_modules(family, llm_bytes(0) + phase_bytes(space, family, units))
        }
        Placement::Joint => {
            let joint = &space.joint[family.llm];
            let media = joint_media(space, family, many);
            let of_stage = |stage: usize| {
                let llm = joint.llm_memory(stage).shared_by(llm_ranks);
                let in_flight = shape.in_flight(stage) as f64;
                let held = |mean: f64, once: f64| once + (in_flight - 1.0) * mean;
                // The longest sample may not have the most tiles; each of the two is met separately.
                let with = |tokens_once: f64, is_most: bool| {
                    let mut bytes = llm.state();
                    let mut kept = llm.kept_per_unit * held(tokens, tokens_once);
                    let mut sums = llm.all_sums();
                    let mut working = llm.working_per_unit * tokens_once;
                    for (encoder, [mean, most]) in media.iter().enumerate() {
                        let ranks = space.optimizer_ranks(family.encoders[encoder].dp);
                        let part = joint.encoder_memory(encoder, stage).shared_by(ranks);
                        let once = if is_most { mean.max(*most) } else { *mean };
                        bytes += part.state();
                        kept += part.kept_per_unit * held(*mean, once);
                        sums += part.all_sums();
                        // Layers from two modules are not computed at the same time.
                        working = working.max(part.working_per_unit * once);
                    }
                    bytes + (kept + working).max(sums)
                };
                with(tokens.max(longest), false).max(with(tokens, true))
            };
            let all = (0..llm.layers.len()).map(of_stage).fold(0.0, f64::max);
            MemoryRequirement::for_all_modules(family, all)
        }
    }
}

/// Returns each encoder's units per GPU in a joint plan: in the mean microbatch, and in the largest sample.
fn joint_media(space: &SearchSpace<'_>, family: &Family, many: u32) -> Vec<[f64; 2]> {
    let sharers = f64::from(space.llm_shape(family).tp);
    let of = |encoder: usize| {
        let media = space.workload.media(encoder);
        let dp = f64::from(family.encoders[encoder].dp);
        let mean = space.slack * media.batch_units_max as f64 / (f64::from(many) * dp);
        [mean, (media.units_max as f64 / sharers).ceil()]
    };
    (0..family.encoders.len()).map(of).collect()
}

/// Returns the minimum memory for an encoder on separate GPUs, with up to `many` microbatches.
///
/// - `sharers`: ranks that share a sample's media
/// - `in_flight`: microbatches held by each encoder stage
pub(crate) fn encoder_bytes(
    space: &SearchSpace<'_>,
    encoder: usize,
    part: EncoderPart,
    sharers: u32,
    many: u32,
    in_flight: impl Fn(u32) -> f64,
) -> f64 {
    let media = space.workload.media(encoder);
    let batch_units = space.slack * media.batch_units_max as f64;
    let mean = batch_units / (f64::from(many) * f64::from(part.dp));
    let most = (media.units_max as f64 / f64::from(sharers)).ceil();
    let shape = &space.encoders[encoder].shapes[part.shape as usize];
    fullest(shape, space.optimizer_ranks(part.dp), in_flight, mean, most)
}

/// Returns the minimum memory for an LLM on separate GPUs or with a colocated encoder, with `few` to `many`
/// microbatches on `ranks` ranks.
pub(crate) fn llm_bytes(space: &SearchSpace<'_>, llm: usize, ranks: u32, few: u32, many: u32) -> f64 {
    let shape = &space.llm.shapes[llm];
    let batch_tokens = space.slack * space.workload.batch_tokens_max as f64;
    let tokens = batch_tokens / (f64::from(many) * f64::from(ranks));
    let step = StepShape {
        kind: space.options.schedule,
        encoders: EncoderChains::default(),
        stages: shape.layers.len(),
        slots: few as usize,
    };
    let optimizer_ranks = space.optimizer_ranks(ranks);
    if shape.chunks > 1 {
        let units = [tokens, space.workload.tokens_max as f64];
        return chunks_least(shape, optimizer_ranks, step, units);
    }
    let in_flight = |stage: u32| step.in_flight(stage as usize) as f64;
    fullest(shape, optimizer_ranks, in_flight, tokens, space.workload.tokens_max as f64)
}

/// Returns the memory for colocated encoders if a rank of each encoder processes `units` units in one phase.
pub(crate) fn phase_bytes(space: &SearchSpace<'_>, family: &Family, units: impl Fn(usize) -> f64) -> f64 {
    let of = |(encoder, shape): (usize, &StageShape)| {
        let ranks = space.optimizer_ranks(family.encoders[encoder].dp);
        let units = units(encoder);
        shape.memory.iter().map(|(_, bytes)| bytes.shared_by(ranks).at(units, units)).fold(0.0, f64::max)
    };
    space.encoder_shapes(family).enumerate().map(of).sum()
}

/// Returns the memory on the fullest rank of a pipeline whose ranks hold several stages.
///
/// - `passes`: passes in a step, in order, whose microbatches have these units
pub(crate) fn chunks_bytes(shape: &StageShape, optimizer_ranks: u32, passes: &[Pass], units: &[f64]) -> f64 {
    let ranks = shape.pp as usize;
    let (mut held, mut most) = (vec![0.0_f64; ranks], vec![0.0_f64; ranks]);
    for Pass { kind, part } in passes {
        let stage = usize::from(part.stage);
        let bytes = shape.memory[stage].1.kept_per_unit * units[part.microbatch as usize];
        let held = &mut held[stage % ranks];
        *held += if *kind == PassKind::Forward { bytes } else { -bytes };
        most[stage % ranks] = most[stage % ranks].max(*held);
    }
    let largest = units.iter().copied().fold(0.0, f64::max);
    let of_rank = |(rank, held): (usize, &f64)| {
        let own = || shape.memory.iter().skip(rank).step_by(ranks).map(|(_, bytes)| bytes);
        let shared = || own().map(|bytes| bytes.shared_by(optimizer_ranks));
        let fixed: f64 = shared().map(|bytes| bytes.state()).sum();
        let sums: f64 = shared().map(|bytes| bytes.all_sums()).sum();
        // Stages on a rank are not computed at the same time.
        let working = own().map(|bytes| bytes.working_per_unit * largest).fold(0.0, f64::max);
        fixed + (held + working).max(sums)
    };
    most.iter().enumerate().map(of_rank).fold(0.0, f64::max)
}

/// Returns the minimum memory for an LLM whose ranks hold several stages, with `mean` units per microbatch,
/// and at least `largest` in a single microbatch.
fn chunks_least(shape: &StageShape, optimizer_ranks: u32, step: StepShape, [mean, largest]: [f64; 2]) -> f64 {
    // The first groups of microbatches fill the ranks.
    let slots = step.slots.min(3 * shape.pp as usize);
    let held = chunks_bytes(
        shape,
        optimizer_ranks,
        &StepShape { slots, ..step }.ordered_passes(),
        &vec![mean; slots],
    );
    // Each microbatch is in all stages of a rank at some time.
    let one = [PassKind::Forward, PassKind::Backward].map(|kind| {
        (0..step.stages).map(move |stage| Pass { kind, part: Part { microbatch: 0, stage: stage as u16 } })
    });
    let one: Vec<Pass> = one.into_iter().flatten().collect();
    held.max(chunks_bytes(shape, optimizer_ranks, &one, &[mean.max(largest)]))
}

/// Whether any plan in the range may fit.
pub(crate) fn may_fit(space: &SearchSpace<'_>, family: &Family, few: u32, many: u32) -> bool {
    requirement(space, family, few, many).most() <= space.budget_bytes
}

/// Returns the fullest stage's memory with `mean` units per microbatch, and at least `largest` in a single
/// microbatch.
fn fullest(
    shape: &StageShape,
    optimizer_ranks: u32,
    in_flight: impl Fn(u32) -> f64,
    mean: f64,
    largest: f64,
) -> f64 {
    let of = |(stage, bytes): &(u32, StageBytes)| {
        // The largest microbatch is in flight, and is the one being computed.
        let once = mean.max(largest);
        bytes.shared_by(optimizer_ranks).at(once + (in_flight(*stage) - 1.0) * mean, once)
    };
    shape.memory.iter().map(of).fold(0.0, f64::max)
}
