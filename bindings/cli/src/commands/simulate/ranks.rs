//! `dflop simulate --gpus`: compares strategies and layouts for ranks that run the whole model.
//!
//! Layouts are DDP, `ZeRO` stages, FSDP and HSDP.
//!
//! Fills the `dflop simulate` report.

use super::context::ContextReport;
use super::shapes::{SimulatedSteps, dataset_report};
use super::{COMPARED, SimulateArgs, StrategyReport, print_launch_limits};
use crate::failure::Failure;
use crate::output::layouts::{
    BYTES_PER_GIB, LayoutMemory, NAME_COLUMNS, excess, gib, print_memory, seconds, trainer_settings,
};
use crate::output::{Output, format_bytes, write_json};
use crate::report::{RunReport, write_report};
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::{ReplicaMemory, SavedActivations};
use dflop_costmodel::{DevicePreset, LaunchLimit, ModuleTraffic, RankLayout, Sharding};
use dflop_loader::settings::{RecomputationName, Settings, StepSchedule};
use dflop_loader::{
    LayoutSummary, RankBalance, RankSummary, RankTraining, StepPlanner, Synchronization, compare_layouts,
    compare_ranks,
};
use serde::Serialize;
use std::io::Write;

/// Samples in a microbatch, if no global batch is given.
pub(crate) const MICROBATCH_SAMPLES: u64 = 8;
/// Name of the balance by tokens.
const TOKENS: &str = "tokens";

#[derive(Debug, Serialize)]
struct RanksReport {
    steps: u64,
    /// Such as `FSDP over 8 GPUs`.
    layout: String,
    /// Point at which ranks wait for each other, as in `plan.schedule`.
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
    /// Steps in which GPUs share samples; `None` if the links are unknown, or no two GPUs can share a sample.
    context: Option<ContextReport>,
    /// Communication per step; `None` if the links are unknown.
    communication: Option<CommunicationReport>,
    /// Step time of several layouts, with the same global batches and number of microbatches.
    layouts: Vec<LayoutReport>,
    /// Memory per GPU with the largest microbatch of the balanced plan, for the same layouts.
    memory: Vec<LayoutMemory>,
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

/// Simulated results for a layout.
#[derive(Debug, Serialize)]
struct LayoutReport {
    layout: String,
    /// Mean step of the balanced plan, without exposed communication.
    step_seconds: f64,
    /// Mean step of the data-blind plan, without exposed communication.
    blind_step_seconds: f64,
    /// As in [`RankReport`], for the balanced plan.
    exposed_communication_seconds: Option<f64>,
    /// Speed-up over the data-blind plan, with exposed communication in both steps.
    speedup: f64,
    memory_bytes: u64,
    fits: bool,
    /// Settings for a trainer.
    trainer: String,
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
        settings.plan.schedule.get_or_insert(StepSchedule::Ranks(Synchronization::PerMicrobatch));
        Ok(())
    }
}

/// Describes ranks for people, such as `FSDP over 8 GPUs`, or `pipeline of 1 vision and 4 llm stages x 8
/// ranks`.
pub(super) fn layout(planner: &StepPlanner) -> String {
    let ranks = planner.dp_size();
    if let Some(synchronization) = planner.synchronization() {
        let count = |ranks: usize| u32::try_from(ranks).unwrap_or(u32::MAX);
        let shard_ranks = count(synchronization.shard_ranks(ranks).get());
        return RankLayout::replicated(count(ranks), 1)
            .sharded(Sharding::Parameters, shard_ranks)
            .to_string();
    }
    let stages = planner.pipeline().stages;
    let named = planner.model().modules().iter().zip(&stages);
    let mut parts: Vec<String> = named.map(|(module, count)| format!("{count} {module}")).collect();
    let last = parts.pop().unwrap_or_default();
    let parts = if parts.is_empty() { last } else { format!("{} and {last}", parts.join(", ")) };
    let word = if stages.last() == Some(&1) { "stage" } else { "stages" };
    format!("pipeline of {parts} {word} x {ranks} {}", if ranks == 1 { "rank" } else { "ranks" })
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
    let preset = if is_measured { None } else { Some(DevicePreset::named(&model.device())?) };
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
    let memory_gib = args.shapes.memory_gib(preset)?;
    let memory_max = (memory_gib * BYTES_PER_GIB) as u64;
    let by_layout = compare_layouts(planner, &layouts(planner, &training), 0..steps, &training)?;
    let Some(ours) = summaries.last() else {
        unreachable!("several ways are compared");
    };
    let blind_seconds = summaries.first().map_or(0.0, |blind| blind.steps.mean_seconds());
    let context = ContextReport::simulate(planner, steps, &training, blind_seconds, memory_max)?;
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
        context,
        communication: communication(planner, &training),
        memory: memories(&by_layout, memory_max),
        layouts: by_layout.iter().map(|layout| LayoutReport::new(layout, memory_max)).collect(),
    };
    if let Some(path) = args.report.path() {
        write_report(path, &run_report(args, planner, &report)?)?;
    }
    if args.json { write_json(out, &report) } else { print(out, &report, memory_gib) }
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
    let traffic = training.traffic(training.layout(planner)?)?;
    let microbatches = planner.microbatches() as u64;
    let sum = |bytes: &dyn Fn(&ModuleTraffic) -> u64| traffic.iter().map(bytes).fold(0, u64::saturating_add);
    Some(CommunicationReport {
        gathered_bytes: sum(&|module: &ModuleTraffic| module.step_gathered_bytes(microbatches)),
        scattered_bytes: sum(&|module: &ModuleTraffic| module.step_scattered_bytes(microbatches)),
        seconds: traffic.iter().map(|module| module.step_seconds(microbatches)).sum(),
    })
}

/// Lists the layouts to compare; shard groups have the size in the settings, or are nodes.
fn layouts(planner: &StepPlanner, training: &RankTraining<'_>) -> Vec<RankLayout> {
    let Some(given) = training.layout(planner) else { return Vec::new() };
    let group_ranks = if given.has_groups() { given.shard_ranks } else { training.gpus_per_node };
    RankLayout::all(given.ranks, training.gpus_per_node, group_ranks)
}

fn memories(layouts: &[LayoutSummary], memory_max: u64) -> Vec<LayoutMemory> {
    layouts.iter().map(|summary| LayoutMemory::new(summary.layout, &summary.memory, memory_max)).collect()
}

impl LayoutReport {
    fn new(summary: &LayoutSummary, memory_max: u64) -> Self {
        let memory_bytes = summary.memory.total();
        Self {
            layout: summary.layout.to_string(),
            step_seconds: summary.step_seconds,
            blind_step_seconds: summary.blind_seconds,
            exposed_communication_seconds: summary.exposed_seconds,
            speedup: summary.speedup,
            memory_bytes,
            fits: memory_bytes <= memory_max,
            trainer: trainer_settings(summary.layout),
        }
    }
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
        report.fact(&format!("Memory per GPU, {}", memory.layout()), gib(memory.total_bytes) + " GiB");
    }
    report.notes.push(about_communication(simulated) + ".");
    Ok(report)
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
    print_layouts(out, &report.layouts, memory_gib)?;
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
        let exposed = seconds(*exposed_communication_seconds);
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
    report.context.as_ref().map_or(Ok(()), |context| {
        context.print(out, blind, memory_gib)?;
        Ok(writeln!(out, "{}", context.about("GPUs of a node"))?)
    })
}

fn print_layouts(out: &mut impl Write, layouts: &[LayoutReport], memory_gib: f64) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<NAME_COLUMNS$} {:>12} {:>12} {:>9} {:>10} {:>8}",
        "layouts, balanced by dflop", "data-blind s", "step s", "speed-up", "exposed s", "GiB"
    )?;
    for report in layouts {
        let LayoutReport { layout, step_seconds, blind_step_seconds, speedup, memory_bytes, fits, .. } =
            report;
        writeln!(
            out,
            "{layout:<NAME_COLUMNS$} {blind_step_seconds:>12.5} {step_seconds:>12.5} {speedup:>8.2}x {:>10} {:>8}{}",
            seconds(report.exposed_communication_seconds),
            gib(*memory_bytes),
            excess(*fits, memory_gib)
        )?;
    }
    Ok(())
}
