//! `dflop simulate`: compares strategies on a dataset's global batches or on a table of shapes.
//!
//! A dataset is simulated on a pipeline, or on ranks that run the whole model. Rejects flags that have no
//! effect: dataset flags with `--shapes`, and shape flags without it.

mod context;
mod given;
mod ranks;
mod shapes;

use crate::args::ReportArgs;
use crate::args::set::{SetArgs, accepted};
use crate::args::step_plan::{PlannedStepsArgs, ResumeArgs, check_layout, check_plan_settings};
use crate::failure::Failure;
use crate::output::{Output, write_json};
use crate::report::{Basis, StrategyResult, write_report};
use clap::builder::ArgPredicate;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use context::{ContextReport, GROUP_RANKS_MAX};
use dflop_balancer::Strategy;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::ReplicaMemory;
use dflop_costmodel::{DevicePreset, LaunchLimit};
use dflop_loader::{RankTraining, StepPlanner, StrategySummary, compare_strategies};
use given::{HAS_MICROBATCHES, is_degrees};
use serde::Serialize;
use shapes::{OF_DATASET, OF_SHAPES, ShapesArgs, SimulatedSteps};
use std::io::Write;

pub(crate) use ranks::MICROBATCH_SAMPLES;
pub(crate) use shapes::{ABOUT_STATED_RATES, ABOUT_STRATEGIES};

/// Compared strategies and strategy names, the baseline first.
pub(crate) const COMPARED: [(Strategy, &str); 3] =
    [(Strategy::ROUND_ROBIN, "data-blind"), (Strategy::LPT, "lpt"), (Strategy::SEARCH, "dflop")];

/// `simulate` arguments, checked together.
#[derive(Debug)]
pub(crate) struct SimulateCommand(SimulateArgs);

/// Simulate the pipeline on the first steps of the dataset: data-blind, LPT and dflop; with `--gpus`, FSDP.
///
/// A pipeline schedule sums predicted times; no device is measured. With `--gpus` and a dataset, every GPU
/// runs the whole model: FSDP, DDP with `plan.schedule=step`, HSDP in groups of N with
/// `plan.schedule=microbatch:N`. A balance by tokens, a lower bound, memory per GPU, and communication are
/// added, and for FSDP and HSDP dflop's step if GPUs exchange media, so that each encodes an equal share;
/// parameters of a layer are gathered while the layer before computes, and a layer waits for what takes
/// longer. More rows split samples over GPUs of a node: each over 2, 4 or 8, and where dflop finds that
/// faster. A second table compares DDP, ZeRO-1, ZeRO-2, FSDP and HSDP.
///
/// With `--shapes` and `--gpus` instead of a dataset, whole methods are compared, planning and balancing:
/// data-blind with uniform parallelism, data-blind with our plan, LPT, the paper's, and ours; with `--plan`
/// also, the ways to fill that plan's microbatches. A profile in the reference's files names its model; with
/// other files, `--model` is required. Plans are made for `plan.schedule`, for `zb-h1` as for
/// 1F1B; `--shapes` accepts `gpipe`, `1f1b` and `1f1b-ahead:R`. Flags that have no effect on the requested
/// simulation are rejected.
#[derive(Debug, Args)]
struct SimulateArgs {
    #[command(flatten)]
    planned: PlannedStepsArgs,
    #[command(flatten)]
    shapes: shapes::ShapesArgs,
    /// Number of steps to simulate [default: an epoch, 50 at most; 50 with `--shapes`].
    #[arg(long, value_name = "K")]
    steps: Option<u64>,
    #[command(flatten)]
    set: SetArgs<SimulateAccepted>,
    #[command(flatten)]
    report: ReportArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(SimulateAccepted: "plan", "order.shuffle", "order.tail", "processor.length_buckets",
    "processor.layout", "processor.chat_template", "processor.caption_prompt", "cost", "space", "index", "store");

#[derive(Debug, Serialize)]
struct SimulateReport {
    steps: u64,
    /// Such as `pipeline of 1 vision and 4 llm stages x 8 ranks`.
    layout: String,
    schedule: String,
    model: String,
    device: String,
    /// Whether times come from a measured profile; otherwise from a stated rate.
    is_measured: bool,
    /// Microbatch sizes below which launches limit a module.
    launch_limits: Vec<LaunchLimit>,
    /// Lower bound on the step time for every cut, mean over the steps.
    lower_bound_seconds: f64,
    strategies: Vec<StrategyReport>,
    /// Steps in which pipelines share samples; `None` if the links are unknown, pipelines cannot share
    /// samples, or the schedule is `zb-h1`.
    context: Option<ContextReport>,
}

/// Simulated results for a strategy.
#[derive(Debug, Serialize)]
pub(crate) struct StrategyReport {
    pub(crate) name: &'static str,
    /// Mean over the steps.
    pub(crate) step_seconds: f64,
    pub(crate) step_seconds_p95: f64,
    pub(crate) bubble_fraction: f64,
    /// Data-blind seconds over this strategy's seconds.
    pub(crate) speedup: f64,
    /// Fraction of the microbatch time in which launches limit a module.
    pub(crate) launch_limited: f64,
    /// Lower bound on the step time for every cut, mean over the steps.
    #[serde(skip)]
    pub(crate) bound_seconds: f64,
}

impl StrategyReport {
    /// Reports a strategy.
    ///
    /// - `blind_seconds`: mean step of the data-blind strategy
    fn new(name: &'static str, summary: &StrategySummary, blind_seconds: f64) -> Self {
        let step_seconds = summary.mean_seconds();
        Self {
            name,
            step_seconds,
            step_seconds_p95: summary.p95_seconds(),
            bubble_fraction: summary.bubble_fraction,
            speedup: if step_seconds > 0.0 { blind_seconds / step_seconds } else { 1.0 },
            launch_limited: summary.launch_limited,
            bound_seconds: summary.bound_seconds,
        }
    }

    /// Converts to a study strategy.
    pub(crate) fn to_result(&self, steps: u64) -> StrategyResult {
        StrategyResult {
            name: self.name.to_owned(),
            basis: Basis::Simulated,
            step_seconds: self.step_seconds,
            step_seconds_p95: Some(self.step_seconds_p95),
            bubble_fraction: Some(self.bubble_fraction),
            bound_seconds: Some(self.bound_seconds),
            steps,
            plan: String::new(),
        }
    }
}

impl Args for SimulateCommand {
    /// Requires a dataset only if no shapes are given.
    fn augment_args(command: Command) -> Command {
        // The same arguments as `order`; shapes replace the dataset and the ranks, GPUs replace the ranks.
        SimulateArgs::augment_args(command)
            .mut_arg("shards", no_dataset)
            .mut_arg("dp_size", no_dp_size)
            .mut_arg("global_batch_size", no_global_batch)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SimulateCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        check(matches)?;
        let mut args = SimulateArgs::from_arg_matches(matches)?;
        args.shapes.is_model_given = is_given(matches, "model");
        args.use_gpus_as_ranks(is_given(matches, "global_batch_size"));
        Ok(Self(args))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// Replaces the required shards by shards or `--mix` or `--shapes`.
fn no_dataset(arg: Arg) -> Arg {
    arg.required(false).required_unless_present_any(["mix", "shapes"]).conflicts_with_all(["mix", "shapes"])
}

/// Turns the number of DP ranks into an optional argument with shapes, where the parallelism plan determines
/// it, and with GPUs, which are ranks.
fn no_dp_size(arg: Arg) -> Arg {
    let arg = arg.required(false).required_unless_present_any(["shapes", "gpus"]);
    arg.default_value_ifs([("shapes", ArgPredicate::IsPresent, "1"), ("gpus", ArgPredicate::IsPresent, "1")])
}

/// Turns the number of samples into an optional argument with GPUs.
fn no_global_batch(arg: Arg) -> Arg {
    arg.required(false)
        .required_unless_present("gpus")
        .default_value_if("gpus", ArgPredicate::IsPresent, "0")
        .help("Number of samples in a global batch [default: 8 per microbatch with `--gpus`]")
}

pub(crate) fn run(command: &SimulateCommand, out: &mut Output) -> Result<(), Failure> {
    let args = &command.0;
    if let Some(path) = args.shapes.path() {
        return shapes::run(args, path, out);
    }
    args.set.refuse(&["space"], shapes::OF_SHAPES)?;
    let mut settings = args.set.settings()?;
    check_plan_settings(&args.set, &settings)?;
    check_layout(&args.set, &settings)?;
    if settings.processor.layout.rows.is_some() {
        args.set.refuse(&["processor.layout"], "compares plans of whole samples; leave rows out")?;
    }
    if settings.plan.strategy.strategy != Strategy::SEARCH {
        let reason = "has no effect on a comparison of strategies; give `search:UNITS`, or leave it out";
        args.set.refuse(&["plan.strategy"], reason)?;
    }
    // The comparison plans for the schedule; a planner has none for `zb-h1`.
    let schedule = settings.plan.pipeline_schedule();
    if settings.plan.synchronization().is_none() {
        settings.plan.schedule = None;
    }
    args.synchronize_ranks(&mut settings)?;
    let planner = args.planned.planner(&settings, &ResumeArgs::default())?;
    let steps = args.steps.unwrap_or_else(|| planner.steps().per_epoch().min(50));
    // A run that ends may be shorter than the default.
    let steps = steps.min(planner.steps().len().unwrap_or(steps));
    if steps == 0 {
        return Err(Failure::Misuse("invalid `steps`: must be at least 1".into()));
    }
    if planner.is_lockstep() {
        // Ranks that run all modules have no other schedule.
        return ranks::run(args, &settings, &planner.schedule(schedule)?, steps, out);
    }
    let strategies = compare(&planner, steps, schedule)?;
    let context = share_samples(args, &planner, steps, schedule, &strategies)?;
    let report = SimulateReport {
        steps,
        layout: ranks::layout(&planner),
        schedule: schedule.to_string(),
        model: args.planned.plan.model.name(),
        device: args.planned.plan.model.device_name(),
        is_measured: args.planned.plan.model.profile.is_given(),
        launch_limits: planner.model().launch_limits(),
        lower_bound_seconds: strategies.last().map_or(0.0, |ours| ours.bound_seconds),
        strategies,
        context,
    };
    if let Some(path) = args.report.path() {
        let SimulateReport { layout, model, device, is_measured, launch_limits, .. } = &report;
        let results = report.strategies.iter().map(|strategy| strategy.to_result(steps)).collect();
        let (planner, is_measured) = (&planner, *is_measured);
        let simulated = SimulatedSteps {
            planner,
            schedule,
            steps,
            model,
            device,
            is_measured,
            launch_limits,
            layout,
            results,
        };
        write_report(path, &shapes::dataset_report(args, &simulated)?)?;
    }
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

/// Simulates steps in which pipelines share samples.
fn share_samples(
    args: &SimulateArgs,
    planner: &StepPlanner,
    steps: u64,
    schedule: ScheduleKind,
    strategies: &[StrategyReport],
) -> Result<Option<ContextReport>, Failure> {
    let model = &args.planned.plan.model;
    let config = planner.pipeline();
    let has_equal_ranks = config.module_dp_sizes.iter().all(|dp_size| *dp_size == config.dp_size);
    let has_slices = has_equal_ranks && config.has_parallel_encoders;
    if model.profile.is_given() || !has_slices || schedule == ScheduleKind::ZeroBubble {
        return Ok(None);
    }
    let links = DevicePreset::named(&model.device())?.links();
    let memory = ReplicaMemory::new(planner.model().spec());
    let training = RankTraining { memory, links, gpus_per_node: GROUP_RANKS_MAX as u32 };
    let blind_seconds = strategies.first().map_or(0.0, |blind| blind.step_seconds);
    ContextReport::simulate(&planner.clone().schedule(schedule)?, steps, &training, blind_seconds, u64::MAX)
}

/// Simulates the first `steps` steps with every strategy in [`COMPARED`].
pub(crate) fn compare(
    planner: &StepPlanner,
    steps: u64,
    schedule: ScheduleKind,
) -> Result<Vec<StrategyReport>, Failure> {
    let summaries = compare_strategies(planner, &COMPARED.map(|(strategy, _)| strategy), 0..steps, schedule)?;
    let blind_seconds = summaries[0].mean_seconds();
    let report = |(summary, (_, name)): (&StrategySummary, (Strategy, &'static str))| {
        StrategyReport::new(name, summary, blind_seconds)
    };
    let mut reports: Vec<StrategyReport> = summaries.iter().zip(COMPARED).map(report).collect();
    if schedule == ScheduleKind::ZeroBubble {
        // Plans are bounded for 1F1B, in which no weight gradient waits: what remains is the mean work of a
        // device.
        for own in &mut reports {
            own.bound_seconds = own.step_seconds * (1.0 - own.bubble_fraction);
        }
    }
    Ok(reports)
}

fn print(out: &mut impl Write, report: &SimulateReport) -> Result<(), Failure> {
    let SimulateReport { steps, layout, schedule, model, device, is_measured, .. } = report;
    let source = if *is_measured { "measured" } else { "a stated rate" };
    writeln!(out, "simulated: {layout}, {steps} {schedule} steps, {model} on {device} ({source})")?;
    print_strategies(out, &report.strategies)?;
    if let (Some(context), Some(blind)) = (&report.context, report.strategies.first()) {
        context.print(out, blind.step_seconds, 0.0)?;
        writeln!(out, "{}", context.about("pipelines, whose stages have NVLink between them"))?;
    }
    print_launch_limits(out, &report.launch_limits)?;
    let ours = report.strategies.last().filter(|ours| ours.launch_limited > 0.0);
    ours.map_or(Ok(()), |ours| {
        let share = 100.0 * ours.launch_limited;
        Ok(writeln!(
            out,
            "{share:.0} % of the time of its microbatches is that of launches: use fewer, larger ones"
        )?)
    })
}

/// Prints a line for each module that launches limit.
pub(crate) fn print_launch_limits(
    out: &mut (impl Write + ?Sized),
    limits: &[LaunchLimit],
) -> Result<(), Failure> {
    limits.iter().try_for_each(|limit| Ok(writeln!(out, "{limit}")?))
}

/// Prints strategies as a table.
pub(crate) fn print_strategies(
    out: &mut (impl Write + ?Sized),
    strategies: &[StrategyReport],
) -> Result<(), Failure> {
    writeln!(out, "{:<12} {:>12} {:>12} {:>8} {:>9}", "", "step s", "p95 s", "idle", "speed-up")?;
    for StrategyReport { name, step_seconds, step_seconds_p95, bubble_fraction, speedup, .. } in strategies {
        let idle = bubble_fraction * 100.0;
        writeln!(
            out,
            "{name:<12} {step_seconds:>12.5} {step_seconds_p95:>12.5} {idle:>6.1} % {speedup:>8.2}x"
        )?;
    }
    let (Some(blind), Some(ours)) = (strategies.first(), strategies.last()) else { return Ok(()) };
    let (bound, busy) = (ours.bound_seconds, ours.step_seconds * (1.0 - ours.bubble_fraction));
    if bound > 0.0 {
        let (idle, speedup) = ((1.0 - busy / bound).max(0.0) * 100.0, blind.step_seconds / bound);
        writeln!(out, "{:<12} {bound:>12.5} {:>12} {idle:>6.1} % {speedup:>8.2}x", "lower bound", "")?;
    }
    Ok(())
}

/// Arguments that both simulations accept.
const SHARED: [&str; 10] =
    ["model", "device", "profile", "global_batch_size", "seed", "steps", "json", "report", "pairs", "gpus"];
/// Arguments of shapes that a dataset accepts with GPUs as ranks.
const OF_GPUS: [&str; 2] = ["gpus_per_node", "memory_gib"];

fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// Checks that every flag on the command line has an effect.
///
/// # Errors
/// [`ErrorKind::ArgumentConflict`] that names the first flag without effect, and what the flag belongs to;
/// [`ErrorKind::MissingRequiredArgument`] without a number of samples for shapes.
fn check(matches: &ArgMatches) -> Result<(), clap::Error> {
    let (has_shapes, has_gpus) = (matches.contains_id("shapes"), matches.contains_id("gpus"));
    let of_shapes = ShapesArgs::augment_args(Command::default());
    let of_shapes: Vec<&str> = of_shapes.get_arguments().map(|arg| arg.get_id().as_str()).collect();
    let mut plan = matches.get_many::<String>("plan").into_iter().flatten().peekable();
    let has_plan = plan.peek().is_some();
    // A plan file has the number of microbatches; degrees do not.
    let needs_microbatches = has_shapes && plan.any(|value| is_degrees(value));
    let has_effect = |id: &str| {
        let is_of_gpus = has_gpus && OF_GPUS.contains(&id);
        SHARED.contains(&id)
            || is_of_gpus
            || of_shapes.contains(&id) == has_shapes
            || (id == "microbatches" && needs_microbatches)
    };
    let all = SimulateArgs::augment_args(Command::default());
    let mut given = all.get_arguments().filter(|arg| is_given(matches, arg.get_id().as_str()));
    let conflict = |problem: String| Err(clap::Error::raw(ErrorKind::ArgumentConflict, problem));
    if let Some(arg) = given.find(|arg| !has_effect(arg.get_id().as_str())) {
        let flag = arg.get_long().map_or_else(|| arg.get_id().to_string(), |long| format!("--{long}"));
        let reason = match (has_shapes, arg.get_id().as_str()) {
            (true, "microbatches") if has_plan => HAS_MICROBATCHES,
            (true, _) => OF_DATASET,
            (false, _) => OF_SHAPES,
        };
        return conflict(format!("`{flag}` {reason}"));
    }
    if has_shapes && !is_given(matches, "global_batch_size") {
        let problem = "`--shapes` needs `--global-batch-size`";
        return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, problem));
    }
    if !has_shapes && has_gpus && is_given(matches, "dp_size") {
        let problem =
            "`--dp-size` has no effect with `--gpus`, whose GPUs are the ranks; leave out one of both";
        return conflict(problem.to_owned());
    }
    Ok(())
}
