//! Compares the predicted memory of ranks with the available memory.

use std::num::NonZeroU32;

use dflop_costmodel::memory::{
    Execution, ModuleStages, PipelineMemory, Precision, StageMemory, StateBytes, format_bytes,
};
use dflop_loader::StepPlanner;

use super::Findings;
use super::launcher::Launch;
use crate::Result;
use crate::models::ModuleKind;
use crate::run::compute_device::ComputeDevice;
use crate::run::config::PrecisionName;
use crate::run::setup::{Setup, machine_memory_bytes};

const SUBJECT: &str = "memory";
const ADVICE: &str = "use more stages, more microbatches or `model.recompute_layers`";

/// Largest microbatch in tokens: positions inside the encoders, and in the LLM.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MicrobatchTokens {
    encoder: u64,
    llm: u64,
}

/// Returns the tokens in the largest microbatch of the first step.
pub(super) fn largest_microbatch(report: &mut Findings, planner: &StepPlanner) -> Option<MicrobatchTokens> {
    let plan = match planner.plan(planner.first_step()) {
        Ok(plan) => plan,
        Err(error) => {
            report.failed("plan", error);
            return None;
        }
    };
    let mut largest = MicrobatchTokens::default();
    for microbatch in plan.ranks.iter().flatten() {
        let costs = || microbatch.iter().map(|&place| plan.costs[place as usize]);
        largest.llm = largest.llm.max(costs().map(|cost| u64::from(cost.tokens)).sum());
        largest.encoder = largest.encoder.max(costs().map(|cost| u64::from(cost.encoder_tokens)).sum());
    }
    Some(largest)
}

/// - `tokens`: tokens in the largest microbatch, if the index exists; otherwise only the rank states count
/// - `device_bytes`: GPU memory, if ranks compute on GPUs
pub(super) fn check(
    report: &mut Findings,
    setup: &Setup,
    launch: &Launch,
    tokens: Option<MicrobatchTokens>,
    device_bytes: Option<u64>,
) {
    let config = &setup.config;
    let stages = match stages(setup, tokens) {
        Ok(stages) => stages,
        Err(failure) => return report.failed(SUBJECT, failure),
    };
    let needs: Vec<(usize, u64)> = launch
        .ranks_of_machine(setup.job.world_size())
        .filter_map(|rank| Some((rank, bytes_of_rank(setup, &stages, rank)?)))
        .collect();
    let Some((rank, most)) = needs.iter().copied().max_by_key(|(_, bytes)| *bytes) else {
        return report.skipped(SUBJECT, "the job has no rank on this machine");
    };
    let parts = if tokens.is_some() { "state and activations" } else { "state alone, as there is no index" };
    let need = format!("rank {rank} needs about {} ({parts})", format_bytes(most));
    let limit = config.parallel.memory_gib.map(|gib| (gib * f64::from(1 << 30)) as u64);
    if let Some(limit) = limit.filter(|limit| *limit < most) {
        let finding = format!("{need}, `parallel.memory_gib` allows {}", format_bytes(limit));
        return report.wrong(SUBJECT, finding, format!("{ADVICE}, or allow more"));
    }
    let sum = || needs.iter().map(|(_, bytes)| bytes).sum();
    let (sum, there, owner) = match (config.parallel.compute_device, device_bytes) {
        (ComputeDevice::Cpu, _) => (sum(), machine_memory_bytes(), "machine"),
        // All ranks of the machine share the device that is named.
        (ComputeDevice::Cuda(Some(_)), Some(bytes)) => (sum(), Some(bytes), "device"),
        (ComputeDevice::Cuda(None), Some(bytes)) => (most, Some(bytes), "device"),
        (ComputeDevice::Cuda(_), None) => {
            return report.note(SUBJECT, format!("{need}; no device to compare with"));
        }
    };
    match there {
        Some(there) if sum > there => {
            let all = format!("ranks here need {} together", format_bytes(sum));
            report.wrong(SUBJECT, format!("{need}, {all}, the {owner} has {}", format_bytes(there)), ADVICE);
        }
        Some(there) => report.ok(SUBJECT, format!("{need}, the {owner} has {}", format_bytes(there))),
        None => report.note(SUBJECT, format!("{need}; the system does not report the memory of the machine")),
    }
}

/// Predicts the memory for all stages, in job order.
fn stages(setup: &Setup, tokens: Option<MicrobatchTokens>) -> Result<Vec<StageMemory>> {
    let config = &setup.config;
    let tokens = tokens.unwrap_or_default();
    let modules = setup.job.modules();
    let llm_dp = modules.last().map_or(1, |llm| llm.dp_size) as u64;
    let precision = match config.optimizer.precision {
        PrecisionName::F32 => Precision::F32,
        PrecisionName::Bf16 => Precision::Bf16,
    };
    let layouts = modules.iter().map(|module| ModuleStages {
        layers: module.stages.iter().map(|layers| layers.len() as u32).collect(),
        execution: Execution { tp: non_zero(module.tp_size), precision, ..Execution::default() },
        microbatch_tokens: match module.module {
            ModuleKind::Llm => tokens.llm,
            // The encoder replicas share the media of the LLM replicas.
            _ => (tokens.encoder * llm_dp).div_ceil(module.dp_size.max(1) as u64),
        },
    });
    let layouts: Vec<ModuleStages> = layouts.collect();
    let mut memory = PipelineMemory::new(&setup.spec)
        .frozen(setup.groups.parts)
        .trained_state(state_bytes(setup))
        .microbatches(config.parallel.microbatches as u32);
    for (module, every) in setup.recomputed_layers() {
        memory = memory.recomputed_layers(module, every);
    }
    Ok(memory.stages(&layouts)?)
}

/// State bytes per parameter: gradients are added in 32 bits, bf16 weights have a 32-bit copy.
fn state_bytes(setup: &Setup) -> StateBytes {
    let config = &setup.config;
    let each = match config.optimizer.precision {
        PrecisionName::F32 => StateBytes::ADAM_F32,
        PrecisionName::Bf16 => StateBytes::ADAM_F32_GRADIENTS,
    };
    let sharing = setup.job.modules().iter().map(|module| module.dp_size).min().unwrap_or(1);
    let sharing = if config.optimizer.zero_stage == 1 { sharing } else { 1 };
    StateBytes { optimizer_ranks: non_zero(sharing), ..each }
}

/// Sums the stage memory on a rank.
fn bytes_of_rank(setup: &Setup, stages: &[StageMemory], rank: usize) -> Option<u64> {
    let roles = setup.job.roles(rank).ok()?;
    let own = roles.iter().flat_map(|role| &role.stages).filter_map(|&stage| stages.get(usize::from(stage)));
    Some(own.map(|stage| stage.peak.total()).fold(0, u64::saturating_add))
}

fn non_zero(number: usize) -> NonZeroU32 {
    u32::try_from(number).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN)
}
