//! Describes the step of a plan to the search for pipelines: times of samples, stages, and limits of memory.

use super::{StageLoad, UnitTimes};
use crate::error::Result;
use crate::instance::Instance;
use crate::pipeline::{PipelineConfig, PipelineMemoryLimits, StageMemoryLimit};
use crate::planner::cluster::Placement;
use crate::planner::costs::StageBytes;
use crate::planner::space::{Candidate, SearchSpace};
use crate::planner::workload::ItemSize;

/// Describes a batch and the pipelines of a plan that is not colocated.
///
/// - `sizes_ns`: times that each sample adds to the slowest stage of each module
///
/// # Errors
/// [`crate::Error`] if times overflow.
pub(super) fn describe(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes_ns: &[[u64; 2]],
) -> Result<(Instance, PipelineConfig)> {
    let kind = space.step_shape(&candidate.family, candidate.microbatches).kind;
    let (instance, config) = match candidate.family.placement {
        Placement::Joint => joint(space, candidate, batch)?,
        _ => shared_encoder(space, candidate, batch, sizes_ns)?,
    };
    Ok((instance, config.schedule(kind)))
}

/// Describes a step whose encoder serves all LLM ranks.
fn shared_encoder(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    sizes_ns: &[[u64; 2]],
) -> Result<(Instance, PipelineConfig)> {
    let family = &candidate.family;
    let (ranks, encoder_ranks) = (family.llm_dp as usize, family.encoder_dp as usize);
    let [encoder, llm] = space.shapes(family);
    // A partition takes the encoder's time on its ranks; here it is the time on a single one.
    let alone = |[encoder_ns, llm_ns]: &[u64; 2]| {
        [encoder_ns.saturating_mul(encoder_ranks as u64) / ranks as u64, *llm_ns]
    };
    let sizes_ns: Vec<[u64; 2]> = sizes_ns.iter().map(alone).collect();
    let instance = Instance::new(candidate.groups(), 2, sizes_ns.concat())?;
    let step = space.step_shape(family, candidate.microbatches);
    let sharers = space.optimizer_ranks(family);
    let mut stages = Vec::new();
    for (module, shape, first) in [(0, encoder, 0), (1, llm, step.encoder_stages())] {
        stages.extend(shape.memory.iter().map(|(stage, bytes)| {
            let mut parts = [StageBytes::default(); 2];
            parts[module] = bytes.shared_by(sharers[module]);
            limit(space, &parts, step.in_flight(first + *stage as usize))
        }));
    }
    let units = batch.iter().flat_map(|item| [u64::from(item.tiles), u64::from(item.tokens)]).collect();
    let config = PipelineConfig::new(ranks, vec![encoder.pp as usize, llm.pp as usize])
        .module_dp_sizes(vec![encoder_ranks, ranks])
        .memory(PipelineMemoryLimits { units, stages });
    Ok((instance, config))
}

/// Describes a step of joint stages: neighbors with the same work are one module.
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
    let stages = modules.iter().map(|stages| stages.len()).collect();
    let config = PipelineConfig::new(family.llm_dp as usize, stages);
    Ok((instance, config.memory(joint_memory(space, candidate, batch, modules.len()))))
}

/// Limits the memory of joint stages, whose tiles and tokens are the units of the first two modules. A single
/// module has one kind of units: the bytes of a sample in the first stage.
fn joint_memory(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    modules: usize,
) -> PipelineMemoryLimits {
    let family = &candidate.family;
    let [_, llm] = space.shapes(family);
    let step = space.step_shape(family, candidate.microbatches);
    let [encoder_ranks, llm_ranks] = space.optimizer_ranks(family);
    let of_stage = |stage: usize| {
        let [encoder, llm_bytes] = space.joint[family.llm].memory(stage);
        let share = 1.0 / f64::from(llm.tp);
        let encoder = StageBytes {
            kept_per_unit: encoder.kept_per_unit * share,
            working_per_unit: encoder.working_per_unit * share,
            ..encoder.shared_by(encoder_ranks)
        };
        limit(space, &[encoder, llm_bytes.shared_by(llm_ranks)], step.in_flight(stage))
    };
    let stages: Vec<StageMemoryLimit> = (0..step.stages).map(of_stage).collect();
    if modules == 1 {
        let StageMemoryLimit { in_flight, kept, working, bytes_max } = &stages[0];
        let bytes = [0, 1].map(|module| kept[module] + working[module]);
        let of = |item: &ItemSize| u64::from(item.tiles) * bytes[0] + u64::from(item.tokens) * bytes[1];
        let limit = StageMemoryLimit {
            in_flight: *in_flight,
            kept: vec![1],
            working: vec![0],
            bytes_max: *bytes_max,
        };
        return PipelineMemoryLimits { units: batch.iter().map(of).collect(), stages: vec![limit] };
    }
    let of = |item: &ItemSize| {
        let mut units = vec![0; modules];
        (units[0], units[1]) = (u64::from(item.tiles), u64::from(item.tokens));
        units
    };
    let pad = |factors: Vec<u64>| factors.into_iter().chain(std::iter::repeat(0)).take(modules).collect();
    let widen = |limit: StageMemoryLimit| StageMemoryLimit {
        kept: pad(limit.kept),
        working: pad(limit.working),
        ..limit
    };
    PipelineMemoryLimits {
        units: batch.iter().flat_map(of).collect(),
        stages: stages.into_iter().map(widen).collect(),
    }
}

/// Limits the microbatches of a stage to the memory that its state leaves.
fn limit(space: &SearchSpace<'_>, parts: &[StageBytes; 2], in_flight: usize) -> StageMemoryLimit {
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
