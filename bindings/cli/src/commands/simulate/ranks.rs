//! `dflop simulate --gpus`: compares strategies for ranks that run the whole model: DDP, FSDP and HSDP.
//!
//! Fills the `dflop simulate` report.

use super::shapes::{SimulatedSteps, dataset_report};
use super::{COMPARED, SimulateArgs, StrategyReport, print_launch_limits};
use crate::failure::Failure;
use crate::output::{Output, format_bytes, write_json};
use crate::report::{RunReport, write_report};
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::{RankMemory, ReplicaMemory, SavedActivations};
use dflop_costmodel::{DevicePreset, LaunchLimit};
use dflop_loader::settings::{RecomputationName, Settings};
use dflop_loader::{RankBalance, RankSummary, RankTraining, StepPlanner, Synchronization, compare_ranks};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;

const GIB: f64 = 1_073_741_824.0;
/// Samples in a microbatch, if no global batch is given.
const MICROBATCH_SAMPLES: u64 = 8;
/// Name of the balance by tokens.
const TOKENS: &str = "tokens";

#[derive(Debug, Serialize)]
struct RanksReport {
    steps: u64,
    /// Such as `FSDP over 8 GPUs`.
    layout: String,
    /// Point at which ranks wait for each other, as in `plan.synchronize`.
    synchronize: String,
    gpus: usize,
    gpus_per_node: u32,
    global_batch: u64,
    /// Microbatches per GPU.
    microbatches: usize,
    model: String,
    device: String,
    /// Whether times come from a measured profile; otherwise from a stated rate.
    is_measured: bool,
    /// Microbatch sizes below which launches limit a module.
    launch_limits: Vec<LaunchLimit>,
    /// Lower bound on the step time for every plan, mean over the steps.
    lower_bound_seconds: f64,
    strategies: Vec<RankReport>,
    /// Mean step of the last strategy if GPUs exchange media before the encoder, without the time for
    /// messages; `None` if GPUs meet at the end of a step only, or the model has no encoder.
    exchanged_step_seconds: Option<f64>,
    /// Communication per step; `None` if the links are unknown.
    communication: Option<CommunicationReport>,
    /// Memory per GPU with the largest microbatch of the last strategy, for several layouts.
    memory: Vec<MemoryReport>,
}

/// Simulated results for a strategy.
#[derive(Debug, Serialize)]
struct RankReport {
    #[serde(flatten)]
    strategy: StrategyReport,
    /// Mean seconds per step in which GPUs wait for parameters and gradients; not part of the step time.
    exposed_communication_seconds: Option<f64>,
    /// Speed-up with exposed communication in both steps.
    communicating_speedup: Option<f64>,
    /// Memory per GPU with this strategy's largest microbatch.
    memory_bytes: u64,
    fits: bool,
}

/// Communication per step on every GPU.
#[derive(Debug, Serialize)]
struct CommunicationReport {
    /// Parameters that all passes gather.
    gathered_bytes: u64,
    /// Gradients that all microbatches sum and divide, inside a shard group.
    scattered_bytes: u64,
    /// Seconds for both and for gradient sums across shard groups, hidden or not.
    seconds: f64,
}

/// Memory per GPU under a layout.
#[derive(Debug, Serialize)]
struct MemoryReport {
    layout: String,
    /// GPUs that shard parameters, gradients and optimizer state.
    shard_ranks: u32,
    parameter_bytes: u64,
    gradient_bytes: u64,
    optimizer_bytes: u64,
    /// Layers that are gathered at once.
    gathered_bytes: u64,
    /// Activations and working set of the largest microbatch.
    activation_bytes: u64,
    total_bytes: u64,
    fits: bool,
}

impl SimulateArgs {
    /// Uses every GPU as a rank that runs all modules, if a dataset is simulated on a number of GPUs.
    ///
    /// - `has_global_batch`: whether the number of samples is given
    pub(super) fn use_gpus_as_ranks(&mut self, has_global_batch: bool) {
        let Some(gpus) = self.shapes.gpus().filter(|_| self.shapes.path().is_none()) else { return };
        let plan = &mut self.planned.plan;
        plan.dp_size = gpus as usize;
        plan.is_one_device = true;
        if !has_global_batch {
            let microbatches = u64::from(gpus).saturating_mul(plan.microbatches as u64);
            plan.global_batch_size = microbatches.saturating_mul(MICROBATCH_SAMPLES);
        }
    }

    /// Sets the synchronization that ranks have unless another is given: that of FSDP.
    pub(super) fn synchronize_ranks(&self, settings: &mut Settings) -> Result<(), Failure> {
        if !self.planned.plan.is_one_device {
            return Ok(());
        }
        let reason = "has no effect with `--gpus`, whose ranks run all modules; leave it out, or give `--dp-size` in \
                      place of `--gpus`";
        self.set.refuse(&["plan.stages"], reason)?;
        if !self.set.is_given("plan.synchronize") {
            settings.plan.synchronize = Synchronization::PerMicrobatch;
        }
        Ok(())
    }
}

/// Describes ranks for people, such as `FSDP over 8 GPUs`, or `pipeline of 1 vision and 4 llm stages x 8
/// ranks`.
pub(super) fn layout(planner: &StepPlanner) -> String {
    let ranks = planner.dp_size();
    if let Some(synchronization) = planner.synchronization() {
        let shard_ranks = synchronization.shard_ranks(ranks).get();
        return if synchronization.meets_in_layers() && shard_ranks == ranks {
            format!("FSDP over {}", gpus(ranks))
        } else {
            data_parallel(ranks, shard_ranks)
        };
    }
    let stages = planner.pipeline().stages;
    let named = planner.model().modules().iter().zip(&stages);
    let mut parts: Vec<String> = named.map(|(module, count)| format!("{count} {module}")).collect();
    let last = parts.pop().unwrap_or_default();
    let parts = if parts.is_empty() { last } else { format!("{} and {last}", parts.join(", ")) };
    let word = if stages.last() == Some(&1) { "stage" } else { "stages" };
    format!("pipeline of {parts} {word} x {ranks} {}", if ranks == 1 { "rank" } else { "ranks" })
}

/// Names the layout by the number of ranks that shard the model.
fn data_parallel(ranks: usize, shard_ranks: usize) -> String {
    match shard_ranks {
        1 => format!("DDP over {}", gpus(ranks)),
        all if all == ranks => format!("FSDP over {}", gpus(ranks)),
        _ => format!("HSDP over {} in shard groups of {shard_ranks}", gpus(ranks)),
    }
}

fn gpus(count: usize) -> String {
    if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") }
}

pub(super) fn run(
    args: &SimulateArgs,
    settings: &Settings,
    planner: &StepPlanner,
    steps: u64,
    out: &mut Output,
) -> Result<(), Failure> {
    let model = &args.planned.plan.model;
    let is_measured = model.profile.is_given();
    let preset = if is_measured { None } else { Some(DevicePreset::named(&model.device)?) };
    let kept = if settings.cost.recompute == RecomputationName::Layers {
        SavedActivations::LayerInputs
    } else {
        SavedActivations::All
    };
    let memory =
        ReplicaMemory::new(planner.model().spec()).frozen(settings.cost.frozen()).saved_activations(kept);
    let gpus_per_node = args.shapes.gpus_per_node().max(1);
    let links = preset.and_then(|preset| preset.links());
    let training = RankTraining { memory, links, gpus_per_node };
    let compared = COMPARED.iter().map(|(strategy, name)| (RankBalance::Strategy(*strategy), *name));
    let (mut balances, mut names): (Vec<RankBalance>, Vec<&'static str>) = compared.unzip();
    // After the data-blind strategy.
    balances.insert(1, RankBalance::Tokens);
    names.insert(1, TOKENS);
    let summaries = compare_ranks(planner, &balances, 0..steps, &training)?;
    let memory_max = (args.shapes.memory_gib() * GIB) as u64;
    let Some(ours) = summaries.last() else {
        unreachable!("several ways are compared");
    };
    let report = RanksReport {
        steps,
        layout: layout(planner),
        synchronize: planner.synchronization().unwrap_or_default().to_string(),
        gpus: planner.dp_size(),
        gpus_per_node,
        global_batch: args.planned.plan.global_batch_size,
        microbatches: planner.microbatches(),
        model: model.name(),
        device: model.device_name(),
        is_measured,
        launch_limits: planner.model().launch_limits(),
        lower_bound_seconds: ours.steps.bound_seconds,
        strategies: strategies(&names, &summaries, memory_max),
        exchanged_step_seconds: ours.exchanged_seconds,
        communication: communication(planner, &training),
        memory: memories(planner, &training, &ours.microbatch_tokens, memory_max)?,
    };
    if let Some(path) = args.report.path() {
        write_report(path, &run_report(args, planner, &report)?)?;
    }
    if args.json { write_json(out, &report) } else { print(out, &report, args.shapes.memory_gib()) }
}

fn strategies(names: &[&'static str], summaries: &[RankSummary], memory_max: u64) -> Vec<RankReport> {
    let blind_seconds = summaries.first().map_or(0.0, |blind| blind.steps.mean_seconds());
    let whole_seconds = |summary: &RankSummary| Some(summary.steps.mean_seconds() + summary.exposed_seconds?);
    let blind_whole_seconds = summaries.first().and_then(whole_seconds);
    let speedup = |summary: &RankSummary| {
        let seconds = whole_seconds(summary).filter(|seconds| *seconds > 0.0)?;
        Some(blind_whole_seconds? / seconds)
    };
    let report = |(name, summary): (&'static str, &RankSummary)| RankReport {
        strategy: StrategyReport::new(name, &summary.steps, blind_seconds),
        exposed_communication_seconds: summary.exposed_seconds,
        communicating_speedup: speedup(summary),
        memory_bytes: summary.memory.total(),
        fits: summary.memory.total() <= memory_max,
    };
    names.iter().copied().zip(summaries).map(report).collect()
}

/// Sums the communication of all modules and microbatches in a step.
fn communication(planner: &StepPlanner, training: &RankTraining<'_>) -> Option<CommunicationReport> {
    let traffic = training.traffic(planner)?;
    let microbatches = planner.microbatches() as u64;
    let sum = |bytes: &dyn Fn(usize) -> u64| {
        (0..traffic.len()).map(bytes).fold(0, u64::saturating_add).saturating_mul(microbatches)
    };
    let seconds = |is_last| traffic.iter().map(|module| module.microbatch_seconds(is_last)).sum::<f64>();
    Some(CommunicationReport {
        gathered_bytes: sum(&|module| traffic[module].gathered_bytes.saturating_mul(2)),
        scattered_bytes: sum(&|module| traffic[module].scattered_bytes),
        seconds: seconds(false) * microbatches.saturating_sub(1) as f64 + seconds(true),
    })
}

/// Predicts the memory without sharding, in shard groups, and with all ranks sharing the state.
fn memories(
    planner: &StepPlanner,
    training: &RankTraining<'_>,
    tokens: &[u64],
    memory_max: u64,
) -> Result<Vec<MemoryReport>, Failure> {
    let ranks = planner.dp_size();
    let given = planner.synchronization().unwrap_or_default().shard_ranks(ranks).get();
    let node = training.gpus_per_node as usize;
    let group = if given > 1 && given < ranks { given } else { node };
    let mut sizes = vec![1, group, ranks];
    sizes.retain(|size| *size <= ranks && ranks.is_multiple_of(*size));
    sizes.dedup();
    let report = |size: usize| -> Result<MemoryReport, Failure> {
        let shard_ranks = u32::try_from(size).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN);
        let memory = training.memory.rank(shard_ranks, tokens)?;
        let RankMemory { parameters, gradients, optimizer, gathered, activations, working_set } = memory;
        Ok(MemoryReport {
            layout: data_parallel(ranks, size),
            shard_ranks: shard_ranks.get(),
            parameter_bytes: parameters,
            gradient_bytes: gradients,
            optimizer_bytes: optimizer,
            gathered_bytes: gathered,
            activation_bytes: activations.saturating_add(working_set),
            total_bytes: memory.total(),
            fits: memory.total() <= memory_max,
        })
    };
    sizes.into_iter().map(report).collect()
}

/// Returns the report on simulated ranks, with timelines of the strategies that plan by predicted times.
fn run_report(
    args: &SimulateArgs,
    planner: &StepPlanner,
    simulated: &RanksReport,
) -> Result<RunReport, Failure> {
    let RanksReport { steps, model, device, is_measured, launch_limits, strategies, .. } = simulated;
    let result = |report: &RankReport| report.strategy.to_result(*steps);
    let (by_tokens, by_time): (Vec<&RankReport>, Vec<&RankReport>) =
        strategies.iter().partition(|report| report.strategy.name == TOKENS);
    let planned = SimulatedSteps {
        planner,
        schedule: ScheduleKind::OneForwardOneBackward,
        steps: *steps,
        model,
        device,
        is_measured: *is_measured,
        launch_limits,
        layout: &simulated.layout,
        results: by_time.into_iter().map(result).collect(),
    };
    let mut report = dataset_report(args, &planned)?;
    for study in &mut report.studies {
        // After the data-blind strategy; there is no timeline.
        let timelines = study.steps.iter_mut().flat_map(|step| &mut step.timelines);
        let later = timelines.filter(|timeline| timeline.strategy > 0);
        later.for_each(|timeline| timeline.strategy += by_tokens.len());
        for (at, report) in by_tokens.iter().copied().enumerate() {
            study.strategies.insert(1 + at, result(report));
        }
    }
    report.fact("Lower bound", format!("{:.5} s", simulated.lower_bound_seconds));
    for memory in &simulated.memory {
        report.fact(&format!("Memory per GPU, {}", memory.layout), gib(memory.total_bytes) + " GiB");
    }
    report.notes.push(about_communication(simulated) + ".");
    Ok(report)
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / GIB)
}

/// Describes the communication for people.
fn about_communication(report: &RanksReport) -> String {
    let RanksReport { communication, is_measured, device, gpus_per_node, .. } = report;
    match communication {
        Some(CommunicationReport { gathered_bytes, scattered_bytes, seconds }) => format!(
            "communication per step: {} of parameters gathered, {} of gradients divided, {seconds:.5} s on the links of \
             {device}, {gpus_per_node} GPUs per node; exposed is what computing does not hide, and is not in the step",
            format_bytes(*gathered_bytes),
            format_bytes(*scattered_bytes)
        ),
        None if *is_measured => "communication is not counted: a profile has no links".to_owned(),
        None => format!("communication is not counted: {device} has no links"),
    }
}

fn print(out: &mut impl Write, report: &RanksReport, memory_gib: f64) -> Result<(), Failure> {
    let RanksReport { layout, steps, global_batch, microbatches, model, device, is_measured, .. } = report;
    let source = if *is_measured { "measured" } else { "a stated rate" };
    let microbatches =
        if *microbatches == 1 { "1 microbatch".to_owned() } else { format!("{microbatches} microbatches") };
    writeln!(
        out,
        "simulated: {layout}, {steps} steps of {global_batch} samples in {microbatches} per GPU, {model} on {device} \
         ({source})"
    )?;
    print_strategies(out, report, memory_gib)?;
    writeln!(out, "{}", about_communication(report))?;
    let ours = report.strategies.last().filter(|ours| ours.exposed_communication_seconds > Some(0.0));
    if let Some(speedup) = ours.and_then(|ours| ours.communicating_speedup) {
        writeln!(out, "with exposed communication, dflop has a speed-up of {speedup:.2}x")?;
    }
    print_memory(out, &report.memory, memory_gib)?;
    print_launch_limits(out, &report.launch_limits)
}

fn print_strategies(out: &mut impl Write, report: &RanksReport, memory_gib: f64) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<12} {:>12} {:>12} {:>8} {:>9} {:>10} {:>8}",
        "", "step s", "p95 s", "idle", "speed-up", "exposed s", "GiB"
    )?;
    for RankReport { strategy, exposed_communication_seconds, memory_bytes, fits, .. } in &report.strategies {
        let StrategyReport { name, step_seconds, step_seconds_p95, bubble_fraction, speedup, .. } = strategy;
        let exposed = exposed_communication_seconds.map_or_else(|| "-".to_owned(), |own| format!("{own:.5}"));
        let idle = bubble_fraction * 100.0;
        write!(
            out,
            "{name:<12} {step_seconds:>12.5} {step_seconds_p95:>12.5} {idle:>6.1} % {speedup:>8.2}x"
        )?;
        writeln!(out, " {exposed:>10} {:>8}{}", gib(*memory_bytes), excess(*fits, memory_gib))?;
    }
    let blind = report.strategies.first().map_or(0.0, |blind| blind.strategy.step_seconds);
    let mut print_mean = |name: &str, seconds: f64| {
        let speedup = if seconds > 0.0 { blind / seconds } else { 1.0 };
        writeln!(out, "{name:<12} {seconds:>12.5} {:>12} {:>8} {speedup:>8.2}x", "", "")
    };
    if let Some(seconds) = report.exchanged_step_seconds {
        print_mean("and exchange", seconds)?;
    }
    print_mean("lower bound", report.lower_bound_seconds)?;
    Ok(())
}

fn print_memory(out: &mut impl Write, memory: &[MemoryReport], memory_gib: f64) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<39} {:>10} {:>9} {:>9} {:>8} {:>11} {:>8}",
        "GiB per GPU", "parameters", "gradients", "optimizer", "gathered", "activations", "total"
    )?;
    for report in memory {
        writeln!(
            out,
            "{:<39} {:>10} {:>9} {:>9} {:>8} {:>11} {:>8}{}",
            report.layout,
            gib(report.parameter_bytes),
            gib(report.gradient_bytes),
            gib(report.optimizer_bytes),
            gib(report.gathered_bytes),
            gib(report.activation_bytes),
            gib(report.total_bytes),
            excess(report.fits, memory_gib)
        )?;
    }
    Ok(())
}

/// Marks what does not fit into the GPU memory.
fn excess(fits: bool, memory_gib: f64) -> String {
    if fits { String::new() } else { format!("  above {memory_gib} GiB") }
}
