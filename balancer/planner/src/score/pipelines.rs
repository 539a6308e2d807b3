//! Describes a plan's step for the pipeline search: sample times, stages, and memory limits.

use super::{ItemTimes, StageLoad, UnitTimes};
use crate::cluster::Placement;
use crate::costs::StageBytes;
use crate::space::shape::StageShape;
use crate::space::{Candidate, SearchSpace};
use crate::workload::ItemSize;
use dflop_balancer::{Instance, PipelineConfig, PipelineMemoryLimits, Result, StageMemoryLimit};

/// Describes a batch and the pipelines for a plan without colocated encoders.
///
/// - `sizes`: times that each sample adds to each module's slowest stage
///
/// # Errors
/// [`dflop_balancer::Error`] if times overflow.
pub(super) fn describe(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes: &ItemTimes,
) -> Result<(Instance, PipelineConfig)> {
    let kind = space.step_shape(&candidate.family, candidate.microbatches).kind;
    let (instance, config) = match candidate.family.placement {
        Placement::Joint => joint(space, candidate, batch)?,
        _ => beside_encoders(space, candidate, batch, sizes)?,
    };
    Ok((instance, config.schedule(kind)))
}

/// Describes a step whose encoders have separate GPUs.
fn beside_encoders(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes: &ItemTimes,
) -> Result<(Instance, PipelineConfig)> {
    let family = &candidate.family;
    let ranks = family.llm_dp as usize;
    let encoders = family.encoders.len();
    let dp_sizes: Vec<usize> = family.encoders.iter().map(|part| part.dp as usize).chain([ranks]).collect();
    // A partition uses an encoder's time over its ranks; here the time is for a single rank.
    let alone = |(at, ns): (usize, &u64)| match at % (encoders + 1) {
        module if module < encoders => ns.saturating_mul(dp_sizes[module] as u64) / ranks as u64,
        _ => *ns,
    };
    let times_ns = sizes.ns.iter().enumerate().map(alone).collect();
    let instance = Instance::new(candidate.groups(), encoders + 1, times_ns)?;
    let step = space.step_shape(family, candidate.microbatches);
    let mut stages = Vec::new();
    let mut add = |module: usize, shape: &StageShape, dp: u32, first: usize| {
        let sharers = space.optimizer_ranks(dp);
        stages.extend(shape.memory.iter().map(|(stage, bytes)| {
            let mut parts = vec![StageBytes::default(); encoders + 1];
            parts[module] = bytes.shared_by(sharers);
            limit(space, &parts, step.in_flight(first + *stage as usize))
        }));
    };
    for (encoder, (first, _)) in step.encoders.each().enumerate() {
        add(encoder, space.encoder_shape(family, encoder), family.encoders[encoder].dp, first);
    }
    let llm = space.llm_shape(family);
    add(encoders, llm, family.llm_dp, step.encoder_stages());
    let units = batch.iter().flat_map(|item| item_units(item, encoders)).collect();
    let shapes = space.encoder_shapes(family).chain([llm]);
    let config = PipelineConfig::new(ranks, shapes.map(|shape| shape.pp as usize).collect())
        .module_dp_sizes(dp_sizes)
        .memory(PipelineMemoryLimits { units, stages });
    let config = if encoders > 1 { config.parallel_encoders() } else { config };
    Ok((instance, config))
}

/// Lists a sample's units in each encoder and in the LLM.
fn item_units(item: &ItemSize, encoders: usize) -> impl Iterator<Item = u64> {
    let media = (0..encoders).map(|encoder| u64::from(item.media(encoder).units));
    media.chain([u64::from(item.tokens)])
}

/// Describes a step with joint stages: neighbors with equal work form one module.
fn joint(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<(Instance, PipelineConfig)> {
    let family = &candidate.family;
    let units = UnitTimes::new(space, candidate);
    let loads = units.stages_of_joint(space, family);
    let modules: Vec<&[StageLoad]> = loads.chunk_by(|one, other| one == other).collect();
    let times =
        |item: &ItemSize| modules.iter().map(|stages| units.of(&stages[0], item)).collect::<Vec<u64>>();
    let times_ns = batch.iter().flat_map(times).collect();
    let instance = Instance::new(candidate.groups(), modules.len(), times_ns)?;
    let stages: Vec<usize> = modules.iter().map(|stages| stages.len()).collect();
    let firsts: Vec<usize> = (0..stages.len()).map(|module| stages[..module].iter().sum()).collect();
    let config = PipelineConfig::new(family.llm_dp as usize, stages);
    Ok((instance, config.memory(joint_memory(space, candidate, batch, &firsts))))
}

/// Limits the memory of joint stages, whose media and tokens are the first modules' units. If there are fewer
/// modules than unit kinds, each module has a single unit kind: a sample's bytes in the module's first stage.
fn joint_memory(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    modules: &[usize],
) -> PipelineMemoryLimits {
    let family = &candidate.family;
    let (llm, encoders) = (space.llm_shape(family), family.encoders.len());
    let joint = &space.joint[family.llm];
    let step = space.step_shape(family, candidate.microbatches);
    let llm_ranks = space.optimizer_ranks(family.llm_dp);
    let of_stage = |stage: usize| {
        let share = 1.0 / f64::from(llm.tp);
        let of_encoder = |encoder: usize| {
            let bytes = joint.encoder_memory(encoder, stage);
            StageBytes {
                kept_per_unit: bytes.kept_per_unit * share,
                working_per_unit: bytes.working_per_unit * share,
                ..bytes.shared_by(space.optimizer_ranks(family.encoders[encoder].dp))
            }
        };
        let parts = (0..encoders).map(of_encoder).chain([joint.llm_memory(stage).shared_by(llm_ranks)]);
        limit(space, &parts.collect::<Vec<StageBytes>>(), step.in_flight(stage))
    };
    let stages: Vec<StageMemoryLimit> = (0..step.stages).map(of_stage).collect();
    let kinds = encoders + 1;
    if modules.len() < kinds {
        let firsts: Vec<&StageMemoryLimit> = modules.iter().map(|first| &stages[*first]).collect();
        let bytes = |item: &ItemSize, limit: &StageMemoryLimit| {
            let factors = limit.kept.iter().zip(&limit.working).map(|(kept, working)| kept + working);
            item_units(item, encoders).zip(factors).map(|(units, bytes)| units * bytes).sum::<u64>()
        };
        let units = batch.iter().flat_map(|item| firsts.iter().map(|limit| bytes(item, limit))).collect();
        let of = |(module, limit): (usize, &&StageMemoryLimit)| {
            let mut kept = vec![0; firsts.len()];
            kept[module] = 1;
            StageMemoryLimit { kept, working: vec![0; firsts.len()], ..(*limit).clone() }
        };
        return PipelineMemoryLimits { units, stages: firsts.iter().enumerate().map(of).collect() };
    }
    let rest = modules.len() - kinds;
    let pad = |factors: Vec<u64>| factors.into_iter().chain(std::iter::repeat_n(0, rest)).collect();
    let widen = |limit: StageMemoryLimit| StageMemoryLimit {
        kept: pad(limit.kept),
        working: pad(limit.working),
        ..limit
    };
    let of = |item| item_units(item, encoders).chain(std::iter::repeat_n(0, rest));
    PipelineMemoryLimits {
        units: batch.iter().flat_map(of).collect(),
        stages: stages.into_iter().map(widen).collect(),
    }
}

/// Limits a stage's microbatches to the memory that remains after its state.
fn limit(space: &SearchSpace<'_>, parts: &[StageBytes], in_flight: usize) -> StageMemoryLimit {
    let fixed: f64 = parts.iter().map(|part| part.fixed + part.optimizer).sum();
    let factors = |of: fn(&StageBytes) -> f64| parts.iter().map(|part| of(part).ceil() as u64).collect();
    StageMemoryLimit {
        in_flight,
        kept: factors(|part| part.kept_per_unit),
        working: factors(|part| part.working_per_unit),
        // Casts of negative numbers give 0: nothing fits.
        bytes_max: (space.budget_bytes - fixed) as u64,
    }
}
