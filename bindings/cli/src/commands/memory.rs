//! `dflop memory`: predicts the memory for every pipeline stage in a model.

use std::io::Write;
use std::num::NonZeroU32;

use clap::{Args, ValueEnum};
use dflop_costmodel::memory::{
    Execution, MeasuredMemory, ModuleStages, PipelineMemory, Precision, SavedActivations, StageMemory,
    StateBytes, split_layers,
};
use dflop_costmodel::{ModelSpec, Module};
use serde::Serialize;

use crate::args::model::{ModelArgs, TrainerArgs};
use crate::args::set::{SetArgs, accepted};
use crate::failure::Failure;
use crate::output::{Output, write_json};
use dflop_loader::model::model_profile;
use dflop_loader::settings::{RecomputationName, Settings};

const GIB: f64 = 1_073_741_824.0;

/// Predict the memory for every pipeline stage: parameters, gradients, optimizer, activations, working set.
#[derive(Debug, Args)]
pub(crate) struct MemoryArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens per module in the largest microbatch on a rank: encoder patches, LLM positions.
    #[arg(long, value_name = "N,N", value_delimiter = ',', required = true)]
    tokens: Vec<u64>,
    /// Tensor-parallel degree per module, such as `1,4` [default: 1 each].
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    tp: Option<Vec<NonZeroU32>>,
    /// Number of pipeline stages per module, such as `1,3`, with layers as even as possible [default: 1
    /// each].
    #[arg(long, value_name = "N,N", value_delimiter = ',', conflicts_with = "layers")]
    stages: Option<Vec<NonZeroU32>>,
    /// Layers in every stage of a module, such as `10,9,9`; once per module.
    #[arg(long, value_name = "N,N")]
    layers: Vec<String>,
    /// Number of microbatches per step on a DP rank.
    #[arg(long, value_name = "M", default_value_t = NonZeroU32::MIN)]
    microbatches: NonZeroU32,
    /// DP ranks that shard the optimizer state (ZeRO stage 1).
    #[arg(long, value_name = "R", default_value_t = NonZeroU32::MIN)]
    optimizer_ranks: NonZeroU32,
    /// Weight and activation type; with `bf16` the optimizer has 32-bit weight copies, and with
    /// `bf16-f32-gradients` gradients have 32 bits as well, as in `dflop train`.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Bf16)]
    precision: PrecisionArg,
    #[command(flatten)]
    trainer: TrainerArgs,
    /// Additional memory per stage in GiB: communication buffers, workspaces, fragmentation.
    #[arg(long, value_name = "GIB", default_value_t = 0.0)]
    buffers_gib: f64,
    /// Device memory in GiB; reports whether every stage fits.
    #[arg(long, value_name = "GIB")]
    memory_gib: Option<f64>,
    #[command(flatten)]
    set: SetArgs<MemoryAccepted>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(MemoryAccepted: "cost.freeze", "cost.recompute", "space.sequence_parallel");

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PrecisionArg {
    /// 16 bits.
    Bf16,
    /// 16 bits, gradients 32 bits.
    #[value(name = "bf16-f32-gradients")]
    Bf16F32Gradients,
    /// 32 bits.
    F32,
}

impl MemoryArgs {
    const fn state_bytes(&self) -> StateBytes {
        match self.precision {
            PrecisionArg::F32 => StateBytes::ADAM_F32,
            PrecisionArg::Bf16F32Gradients => StateBytes::ADAM_F32_GRADIENTS,
            PrecisionArg::Bf16 => StateBytes::ADAM,
        }
    }
}

#[derive(Debug, Serialize)]
struct MemoryReport {
    model: String,
    parameters: u64,
    memory_bytes: Option<u64>,
    fits: Option<bool>,
    stages: Vec<StageReport>,
}

#[derive(Debug, Serialize)]
struct StageReport {
    module: Module,
    stage: u32,
    layers: u32,
    microbatches_in_flight: u32,
    parameters: u64,
    state_bytes: u64,
    activation_bytes: u64,
    working_set_bytes: u64,
    buffer_bytes: u64,
    total_bytes: u64,
    /// Free device memory; negative if the stage does not fit.
    headroom_bytes: Option<i128>,
    is_measured: bool,
}

pub(crate) fn run(args: &MemoryArgs, out: &mut Output) -> Result<(), Failure> {
    let spec = args.model.spec()?;
    let settings = args.set.settings()?;
    let layouts = layouts(args, &settings, &spec)?;
    let stages = memory(args, &settings, &spec)?.stages(&layouts)?;
    let memory_bytes = args.memory_gib.map(|gib| bytes("memory-gib", gib)).transpose()?;
    let stages: Vec<StageReport> = stages.iter().map(|stage| report(stage, memory_bytes)).collect();
    let has_room = |stage: &StageReport| stage.headroom_bytes.is_none_or(|bytes| bytes >= 0);
    let fits = memory_bytes.map(|_| stages.iter().all(has_room));
    let report =
        MemoryReport { model: args.model.name(), parameters: spec.parameters(), memory_bytes, fits, stages };
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

/// Builds the memory model for the arguments, from measurements for modules whose profile has bytes.
fn memory<'a>(
    args: &MemoryArgs,
    settings: &Settings,
    spec: &'a ModelSpec,
) -> Result<PipelineMemory<'a>, Failure> {
    let frozen = settings.cost.frozen();
    let kept = if settings.cost.recompute == RecomputationName::Layers {
        SavedActivations::LayerInputs
    } else {
        SavedActivations::All
    };
    let mut memory = PipelineMemory::new(spec)
        .frozen(frozen)
        .saved_activations(kept)
        .trained_state(StateBytes { optimizer_ranks: args.optimizer_ranks, ..args.state_bytes() })
        .buffer_bytes(bytes("buffers-gib", args.buffers_gib)?)
        .microbatches(args.microbatches.get());
    // Checked before the profile is read, because it is the cheaper mistake to find.
    frozen.check(spec)?;
    if let Some(path) = args.model.profile.path() {
        let profile = model_profile(path, spec)?;
        for module in modules(spec) {
            let points = MeasuredMemory::from_profile(&profile, spec, module)
                .map_err(|error| Failure::from(error).in_file(path))?;
            memory = match points {
                Some(points) => memory.measured(module, points),
                None => memory,
            };
        }
    }
    Ok(memory)
}

fn layouts(args: &MemoryArgs, settings: &Settings, spec: &ModelSpec) -> Result<Vec<ModuleStages>, Failure> {
    let modules = modules(spec);
    let names = modules.iter().map(|module| module.name()).collect::<Vec<_>>().join(",");
    let check = |argument: &str, found: usize| {
        if found == modules.len() {
            return Ok(());
        }
        let expected = modules.len();
        Err(Failure::Misuse(format!(
            "`--{argument}` names {found} modules, the model has {expected}: {names}"
        )))
    };
    let one_each = vec![NonZeroU32::MIN; modules.len()];
    let tp = args.tp.as_ref().unwrap_or(&one_each);
    let stages = args.stages.as_ref().unwrap_or(&one_each);
    check("tokens", args.tokens.len())?;
    check("tp", tp.len())?;
    check("stages", stages.len())?;
    if !args.layers.is_empty() {
        check("layers", args.layers.len())?;
    }
    let kernels = args.trainer.trainer().kernels();
    let layout = |(at, module): (usize, &Module)| {
        let layers = match args.layers.get(at) {
            Some(layers) => parse_layers(layers)?,
            None => split_layers(module_layers(spec, *module), stages[at].get()),
        };
        let precision = match args.precision {
            PrecisionArg::Bf16 | PrecisionArg::Bf16F32Gradients => Precision::Bf16,
            PrecisionArg::F32 => Precision::F32,
        };
        let is_sequence_parallel = settings.space.sequence_parallel;
        let execution = Execution { tp: tp[at], is_sequence_parallel, kernels, precision };
        Ok(ModuleStages { layers, execution, microbatch_tokens: args.tokens[at] })
    };
    modules.iter().enumerate().map(layout).collect()
}

fn parse_layers(layers: &str) -> Result<Vec<u32>, Failure> {
    let number = |word: &str| word.trim().parse::<u32>();
    let parsed = layers.split(',').map(number).collect::<Result<_, _>>();
    parsed.map_err(|_| {
        Failure::Misuse(format!("invalid `--layers`: `{layers}` is not a list such as `10,9,9`"))
    })
}

fn modules(spec: &ModelSpec) -> Vec<Module> {
    spec.encoders().map(|(module, ..)| module).chain([Module::Llm]).collect()
}

fn module_layers(spec: &ModelSpec, module: Module) -> u32 {
    let encoder = spec.encoders().find(|(of, ..)| *of == module);
    encoder.map_or(spec.llm.layers, |(_, encoder, _)| encoder.layers)
}

fn bytes(argument: &str, gib: f64) -> Result<u64, Failure> {
    if !gib.is_finite() || gib < 0.0 {
        return Err(Failure::Misuse(format!("invalid `--{argument}`: {gib} is not a size")));
    }
    Ok((gib * GIB) as u64)
}

fn report(stage: &StageMemory, memory_bytes: Option<u64>) -> StageReport {
    let peak = stage.peak;
    // Signed: the headroom of a stage that does not fit is negative.
    let headroom = |memory: u64| i128::from(memory) - i128::from(peak.total());
    StageReport {
        module: stage.module,
        stage: stage.stage,
        layers: stage.layers,
        microbatches_in_flight: stage.in_flight,
        parameters: stage.parameters,
        state_bytes: peak.state,
        activation_bytes: peak.activations,
        working_set_bytes: peak.working_set,
        buffer_bytes: peak.buffers,
        total_bytes: peak.total(),
        headroom_bytes: memory_bytes.map(headroom),
        is_measured: stage.is_measured,
    }
}

fn print(out: &mut impl Write, report: &MemoryReport) -> Result<(), Failure> {
    let parameters = report.parameters as f64 / 1e9;
    writeln!(
        out,
        "{}: {parameters:.2} billion parameters; GiB of the fullest rank of every stage",
        report.model
    )?;
    writeln!(
        out,
        "{:<10} {:>6} {:>9} {:>9} {:>11} {:>11} {:>8} {:>8}",
        "stage", "layers", "in flight", "state", "activations", "working set", "buffers", "total"
    )?;
    for stage in &report.stages {
        let gib = |bytes: u64| format!("{:.2}", bytes as f64 / GIB);
        write!(
            out,
            "{:<10} {:>6} {:>9} {:>9} {:>11} {:>11} {:>8} {:>8}",
            format!("{} {}", stage.module, stage.stage),
            stage.layers,
            stage.microbatches_in_flight,
            gib(stage.state_bytes),
            gib(stage.activation_bytes),
            gib(stage.working_set_bytes),
            gib(stage.buffer_bytes),
            gib(stage.total_bytes)
        )?;
        let measured = if stage.is_measured { "  measured" } else { "" };
        match stage.headroom_bytes {
            Some(left) if left < 0 => writeln!(out, "{measured}  {:.2} too many", -left as f64 / GIB)?,
            Some(left) => writeln!(out, "{measured}  {:.2} left", left as f64 / GIB)?,
            None => writeln!(out, "{measured}")?,
        }
    }
    Ok(())
}
