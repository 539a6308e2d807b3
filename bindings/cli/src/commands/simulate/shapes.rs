//! `dflop simulate --shapes`: compares whole methods, planning and balancing, on a table of shapes; with
//! `--plan`, balancing on one plan.
//!
//! Fills the `dflop simulate` report.

use super::given::GivenPlan;
use super::{COMPARED, SimulateArgs};
use crate::args::PREVIEWS;
use crate::args::model::{TrainerArgs, profile_and_spec};
use crate::args::step_plan::check_pipeline;
use crate::commands::plan::{
    DegreesJson, ModuleMemoryJson, check_space, cluster, costs, encoder_split, memory_gib, search_space,
    shapes,
};
use crate::failure::Failure;
use crate::output::{Output, write_json};
use crate::report::collect::{PlannedSteps, timelines_of_methods};
use crate::report::{Basis, Origin, RunReport, StrategyResult, Study, compare_steps, write_report};
use clap::Args;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::{DevicePreset, LaunchLimit};
use dflop_loader::StepPlanner;
use dflop_planner::{
    IdleBreakdown, MethodComparison, MethodScore, ParallelismPlan, PlanProblem, Workload, compare,
    compare_plan, method_step, plan,
};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

const BATCHES: u64 = 50;
/// Why a flag or a setting is refused: of a dataset, and of `--shapes`.
pub(super) const OF_DATASET: &str =
    "belongs to the simulation of a dataset and has no effect with `--shapes`; leave it out";
pub(super) const OF_SHAPES: &str =
    "belongs to `--shapes` and has no effect on a dataset; leave it out, or give `--shapes`";
/// Settings that have an effect on a dataset only.
const OF_DATASET_ONLY: [&str; 10] = [
    "plan.stages",
    "plan.strategy",
    "plan.tokens_max",
    "plan.bytes_max",
    "order",
    "processor",
    "cost.profile_tp",
    "cost.recompute",
    "index",
    "store",
];
/// Maximum number of printed waits per method, and the fraction of GPU time below which a wait is not
/// printed.
const PRINTED_WAITS: usize = 3;
const PRINTED_FRACTION_MIN: f64 = 0.0005;

/// Shape table and cluster.
#[derive(Debug, Args)]
pub(super) struct ShapesArgs {
    /// Dataset shapes that replace shards: CSV with columns `tiles,seq_len`; for models that see images in
    /// native resolution `patches,seq_len`, and optionally `patch_squares,window_squares`; for models with
    /// several encoders such as `vision_tiles,audio_tiles,seq_len`. `media` is the number of media in a
    /// sample, optional.
    #[arg(long, value_name = "FILE", requires = "gpus", conflicts_with = "mix", help_heading = "Shapes")]
    shapes: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Shapes")]
    trainer: TrainerArgs,
    /// Number of GPUs in the cluster; with a dataset, ranks that each run the whole model.
    #[arg(long, value_name = "N", help_heading = "Shapes")]
    gpus: Option<u32>,
    /// GPUs per node.
    #[arg(long, value_name = "G", default_value_t = 8, help_heading = "Shapes")]
    gpus_per_node: u32,
    /// Memory per GPU in GiB [default: from the device preset; 80 with a profile].
    #[arg(long, value_name = "M", help_heading = "Shapes")]
    memory_gib: Option<f64>,
    /// Bandwidth and latency for NVLink and InfiniBand, JSON or CSV [default: from the device preset; free
    /// with a profile or in the basic space].
    #[arg(long, value_name = "FILE", help_heading = "Shapes")]
    links: Option<PathBuf>,
    /// Plan to simulate instead of a search: a file that `dflop plan --json` printed, or degrees for each
    /// module, such as `llm=tp4,pp2,dp8 vision=tp1,dp16`, with `--microbatches`.
    ///
    /// Modules are `llm`, `vision` and `audio`, or `encoder` for a single encoder. A missing degree is 1;
    /// `epN` divides the LLM's experts, and `recompute` recomputes a module's layers. Layers are split
    /// evenly; with joint placement the first stage has the encoders. The placement is `space.placement`
    /// [default: joint if all encoders have the LLM's degrees, else disaggregated].
    #[arg(long, value_name = "FILE|DEGREES", num_args = 1.., help_heading = "Shapes")]
    plan: Vec<String>,
    /// Whether `--model` is on the command line.
    #[arg(skip)]
    pub(super) is_model_given: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct MethodsReport {
    pub(super) steps: usize,
    pub(super) model: String,
    pub(super) device: String,
    /// Whether times come from a measured profile; otherwise from a stated rate.
    pub(super) is_measured: bool,
    pub(super) gpus: u32,
    pub(super) global_batch: u32,
    /// Memory per GPU, GiB.
    pub(super) memory_gib: f64,
    /// Factor from counted to allocated memory.
    pub(super) memory_margin: f64,
    /// Lower bound on the step time for every plan in [`MethodsReport::searched`], or for the given plan, and
    /// every balance, mean over the steps.
    pub(super) ideal_seconds: f64,
    /// Plans that were searched, for people; missing for a given plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) searched: Option<String>,
    /// Given plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) plan: Option<GivenPlanJson>,
    pub(super) strategies: Vec<MethodReport>,
}

#[derive(Debug, Serialize)]
pub(super) struct GivenPlanJson {
    #[serde(flatten)]
    pub(super) degrees: DegreesJson,
    pub(super) gpus_used: u32,
}

#[derive(Debug, Serialize)]
pub(super) struct MethodReport {
    pub(super) name: &'static str,
    pub(super) step_seconds: f64,
    pub(super) step_seconds_p95: f64,
    /// Fraction of GPU time spent waiting.
    pub(super) bubble_fraction: f64,
    /// Fraction of GPU time by the cause of the wait.
    pub(super) waits: IdleBreakdown,
    /// Mean time per step in which GPUs wait for messages, gradient sums and weight gathers that no pass
    /// hides.
    pub(super) exposed_communication_seconds: f64,
    /// The first method's seconds over this method's seconds.
    pub(super) speedup: f64,
    /// Memory on each module's fullest GPU, encoders first.
    pub(super) memory: Vec<NamedMemoryJson>,
    /// Whether every step fits into memory.
    pub(super) fits: bool,
    pub(super) plan: DegreesJson,
}

#[derive(Debug, Serialize)]
pub(super) struct NamedMemoryJson {
    pub(super) name: &'static str,
    #[serde(flatten)]
    pub(super) memory: ModuleMemoryJson,
}

impl ShapesArgs {
    pub(super) fn path(&self) -> Option<&Path> {
        self.shapes.as_deref()
    }

    pub(super) const fn gpus(&self) -> Option<u32> {
        self.gpus
    }

    pub(super) const fn gpus_per_node(&self) -> u32 {
        self.gpus_per_node
    }

    /// Memory per GPU in GiB: as given, or the device's.
    pub(super) fn memory_gib(&self, device: Option<DevicePreset>) -> Result<f64, Failure> {
        memory_gib(self.memory_gib, device)
    }
}

pub(super) fn run(args: &SimulateArgs, path: &Path, out: &mut Output) -> Result<(), Failure> {
    let (planned, model) = (&args.planned.plan, &args.planned.plan.model);
    args.set.refuse(&OF_DATASET_ONLY, OF_DATASET)?;
    let settings = args.set.settings()?;
    check_pipeline(&args.set, &settings)?;
    let ShapesArgs { gpus, gpus_per_node, links, is_model_given, trainer, .. } = &args.shapes;
    trainer.check(&args.set, &settings)?;
    let trainer = trainer.trainer();
    let is_named_by_profile = model.profile.is_given() && !is_model_given;
    let names: &[String] = if is_named_by_profile { &[] } else { model.names() };
    let (profile, spec) = profile_and_spec(names, model.profile.path(), &settings)?;
    let is_full = settings.space.is_full(profile.is_some());
    let given = GivenPlan::read(&args.shapes.plan)?;
    match &given {
        Some(given) => given.refuse_settings(&args.set)?,
        None => check_space(&args.set, is_full, settings.plan.pipeline_schedule())?,
    }
    let device = profile.is_none().then(|| DevicePreset::named(&model.device())).transpose()?;
    let preset = device.filter(|_| is_full);
    let memory_gib = args.shapes.memory_gib(device)?;
    let cluster = cluster([gpus.unwrap_or(0), *gpus_per_node], memory_gib, links.as_deref(), preset)?;
    let costs = costs(&spec, &settings, &cluster, (profile.as_ref(), device), trainer)?;
    let too_large = |setting: &str| Failure::Misuse(format!("invalid `{setting}`: too large"));
    let global_batch =
        u32::try_from(planned.global_batch_size).map_err(|_| too_large("global-batch-size"))?;
    let batches = usize::try_from(args.steps.unwrap_or(BATCHES)).map_err(|_| too_large("steps"))?;
    let workload = Workload::draw(&shapes::read(path, &spec)?, global_batch, batches, planned.seed)?;
    let problem = PlanProblem {
        encoders: costs.encoder_costs(),
        llm: &costs.llm,
        workload: &workload,
        cluster,
        options: search_space(&args.set, &settings, is_full, (trainer, profile.as_ref())),
        encoder_split: encoder_split(&settings.space, &spec)?,
        memory_margin: settings.space.memory_margin,
    };
    let given = given.map(|given| given.to_plan(&problem, &spec, planned.microbatches, &settings));
    let given = given.transpose()?;
    let compared = match &given {
        Some(given) => compare_plan(&problem, given)?,
        None => compare(&problem, &plan(&problem)?)?,
    };
    let report = MethodsReport {
        steps: batches,
        model: if is_named_by_profile { spec.name.clone() } else { model.name() },
        device: model.device_name(),
        is_measured: profile.is_some(),
        gpus: cluster.gpus,
        global_batch,
        memory_gib,
        memory_margin: problem.memory_margin,
        ideal_seconds: compared.ideal_seconds,
        searched: given.is_none().then(|| problem.searched()),
        plan: given.map(|plan| GivenPlanJson::new(&plan, &problem)),
        strategies: reports(&compared, &problem.encoder_names()),
    };
    if let Some(path) = args.report.path() {
        write_report(path, &shapes_report(&report, &problem, &compared)?)?;
    }
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

impl GivenPlanJson {
    fn new(plan: &ParallelismPlan, problem: &PlanProblem<'_>) -> Self {
        Self { degrees: DegreesJson::new(plan, &problem.encoder_names()), gpus_used: plan.gpus() }
    }
}

fn reports(compared: &MethodComparison, encoders: &[&'static str]) -> Vec<MethodReport> {
    let first = compared.methods.first().map_or(0.0, |method| method.step_seconds);
    let memory = |score: &MethodScore| {
        let names = encoders.iter().copied().chain(["llm"]);
        let named = names.zip(&score.memory);
        named.map(|(name, memory)| NamedMemoryJson { name, memory: (*memory).into() }).collect()
    };
    let report = |score: &MethodScore| MethodReport {
        name: score.method.name(),
        step_seconds: score.step_seconds,
        step_seconds_p95: score.step_seconds_p95,
        bubble_fraction: score.idle_fraction,
        waits: score.waits,
        exposed_communication_seconds: score.waits.messages_fraction * score.step_seconds,
        speedup: if score.step_seconds > 0.0 { first / score.step_seconds } else { 1.0 },
        memory: memory(score),
        fits: score.fits,
        plan: DegreesJson::new(&score.plan, encoders),
    };
    compared.methods.iter().map(report).collect()
}

fn print(out: &mut impl Write, report: &MethodsReport) -> Result<(), Failure> {
    let MethodsReport { steps, model, device, is_measured, gpus, global_batch, .. } = report;
    let source = if *is_measured { "measured" } else { "a stated rate" };
    writeln!(
        out,
        "simulated: {steps} steps of {global_batch} samples, {model} on {gpus} x {device} ({source})"
    )?;
    if let Some(plan) = &report.plan {
        writeln!(out, "{}", plan.text(*gpus))?;
    }
    let last = if report.plan.is_some() { "GiB per GPU, headroom in parentheses" } else { "plan" };
    writeln!(out, "{:<20} {:>9} {:>9} {:>8} {:>9}  {last}", "", "step s", "p95 s", "idle", "speed-up")?;
    for method in &report.strategies {
        let MethodReport { name, step_seconds, step_seconds_p95, bubble_fraction, speedup, .. } = method;
        let idle = bubble_fraction * 100.0;
        write!(
            out,
            "{name:<20} {step_seconds:>9.4} {step_seconds_p95:>9.4} {idle:>6.1} % {speedup:>8.2}x  {}",
            if report.plan.is_some() { memory_text(&method.memory) } else { method.plan.to_string() }
        )?;
        writeln!(out, "{}", if method.fits { "" } else { "; does not fit into memory" })?;
        let exposed = method.exposed_communication_seconds;
        let waits = waits_text(&method.waits);
        writeln!(out, "    waits for: {waits}; exposed communication {exposed:.4} s")?;
    }
    let bounded = report
        .searched
        .as_ref()
        .map_or_else(|| "this plan".to_owned(), |plans| format!("plans with {plans}"));
    writeln!(out, "{:<20} {:>9.4} of {bounded}", "lower bound", report.ideal_seconds)?;
    if report.plan.is_some() {
        writeln!(out, "{}", report.limit_text())?;
    }
    Ok(())
}

impl GivenPlanJson {
    /// Describes the plan on a cluster with this many GPUs.
    fn text(&self, gpus: u32) -> String {
        let Self { degrees, gpus_used } = self;
        let schedule = degrees.unusual_schedule().map_or("1f1b, ", |_| "");
        format!("plan: {degrees}, {schedule}{gpus_used} of {gpus} GPUs")
    }
}

impl MethodsReport {
    /// Describes the memory limit.
    fn limit_text(&self) -> String {
        let Self { memory_gib, memory_margin, .. } = self;
        let most = memory_gib / memory_margin;
        format!(
            "memory per GPU: {memory_gib:.1} GiB; a plan fits up to {most:.1} GiB (margin {memory_margin})"
        )
    }
}

/// Lists each module's memory with the headroom.
fn memory_text(memory: &[NamedMemoryJson]) -> String {
    let module = |NamedMemoryJson { name, memory }: &NamedMemoryJson| {
        format!("{name} {:.1} ({:.1})", memory.gib, memory.headroom_gib)
    };
    memory.iter().map(module).collect::<Vec<_>>().join(", ")
}

/// Names the largest waits with the fraction of GPU time.
fn waits_text(waits: &IdleBreakdown) -> String {
    let largest = waits.largest_first().into_iter().take(PRINTED_WAITS);
    let printed = largest.filter(|(_, fraction)| *fraction >= PRINTED_FRACTION_MIN);
    let parts: Vec<String> =
        printed.map(|(name, fraction)| format!("{name} {:.1} %", fraction * 100.0)).collect();
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}

/// Explanation for people: data-blind plans.
pub(crate) const ABOUT_STRATEGIES: &str = "Data-blind deals the global order round robin over ranks and microbatches; \
    LPT deals the most expensive sample first; dflop is the balanced cut. All hold the same samples, and every \
    microbatch carries its number of target tokens, so the gradient is the same.";

/// Explanation for people: times from a stated rate.
pub(crate) const ABOUT_STATED_RATES: &str = "Simulated times are FLOPs over a stated rate of the device, summed by the \
    schedule. They weigh samples against each other; absolute times need a measured profile.";

/// Explanation for people: timelines of methods.
const ABOUT_TIMELINES: &str = "Timelines show the first step. An encoder that all LLM ranks share is in the \
    rows of rank 0, where each pass takes as long as on the busiest encoder GPU.";

/// Simulated steps of a dataset.
#[derive(Debug)]
pub(super) struct SimulatedSteps<'a> {
    pub(super) planner: &'a StepPlanner,
    pub(super) schedule: ScheduleKind,
    pub(super) steps: u64,
    pub(super) model: &'a str,
    pub(super) device: &'a str,
    pub(super) is_measured: bool,
    pub(super) launch_limits: &'a [LaunchLimit],
    pub(super) layout: &'a str,
    /// Results of the strategies in [`COMPARED`].
    pub(super) results: Vec<StrategyResult>,
}

/// Returns the report on a simulated dataset.
pub(super) fn dataset_report(
    args: &SimulateArgs,
    simulated: &SimulatedSteps<'_>,
) -> Result<RunReport, Failure> {
    let &SimulatedSteps { planner, schedule, steps, model, device, is_measured, .. } = simulated;
    let results = simulated.results.iter().cloned();
    let first = planner.first_step();
    let planned = PlannedSteps {
        planner,
        strategies: COMPARED.iter().map(|(strategy, _)| *strategy).zip(results).collect(),
        schedule,
        steps: first..first + steps,
        previews: PREVIEWS,
    };
    let name = format!("{model} on {device}");
    let (study, note) = planned.study(&name, ABOUT_STRATEGIES)?;
    let mut report =
        RunReport::new("simulate", format!("Simulated steps of {name}"), Origin::for_this_process());
    report.verdict = compare_steps(&study);
    report.fact("Model", model);
    let source = if is_measured { "a measured profile" } else { "a stated rate" };
    report.fact("Device", format!("{device}, {source}"));
    report.fact("Cluster", simulated.layout);
    let microbatches = format!("{} microbatches per rank", planner.microbatches());
    if planner.is_lockstep() {
        report.fact("Schedule", microbatches);
    } else {
        report.fact("Schedule", format!("{schedule}, {microbatches}"));
    }
    report.fact("Global batch", format!("{} samples", args.planned.plan.global_batch_size));
    report.fact("Steps", steps.to_string());
    if !is_measured {
        report.notes.push(ABOUT_STATED_RATES.to_owned());
    }
    report.notes.extend(simulated.launch_limits.iter().map(|limit| format!("{limit}.")));
    report.notes.extend(note);
    report.studies.push(study);
    Ok(report)
}

/// Returns the report on methods compared with a shape table, with timelines of the first step.
fn shapes_report(
    methods: &MethodsReport,
    problem: &PlanProblem<'_>,
    compared: &MethodComparison,
) -> Result<RunReport, Failure> {
    let MethodsReport { steps, model, device, is_measured, gpus, global_batch, .. } = methods;
    let result = |method: &MethodReport| StrategyResult {
        name: method.name.to_owned(),
        basis: Basis::Simulated,
        step_seconds: method.step_seconds,
        step_seconds_p95: Some(method.step_seconds_p95),
        bubble_fraction: Some(method.bubble_fraction),
        // Of other plans, the bound is over all of them.
        bound_seconds: methods.plan.as_ref().map(|_| methods.ideal_seconds),
        steps: *steps as u64,
        plan: method.plan.to_string(),
    };
    let bound = methods.ideal_seconds;
    let about = match &methods.plan {
        Some(_) => {
            format!("Ways to fill the microbatches of one plan. No balance has a step below {bound:.4} s.")
        }
        None => format!(
            "Whole methods: parallelism and balance. No plan of those searched and no balance has a step below {bound:.4} \
             s."
        ),
    };
    let first = compared.methods.iter().map(|score| method_step(problem, score, 0));
    let first = first.collect::<dflop_balancer::Result<Vec<_>>>()?;
    let names = problem.encoder_names().into_iter().chain(["llm"]);
    let modules: Vec<String> = names.map(str::to_owned).collect();
    let study = Study {
        name: format!("{model} on {gpus} GPUs"),
        about,
        steps: vec![timelines_of_methods(0, &first, &modules)],
        modules,
        strategies: methods.strategies.iter().map(result).collect(),
        samples: Vec::new(),
    };
    let title = format!("Simulated methods for {model}");
    let mut report = RunReport::new("simulate", title, Origin::for_this_process());
    report.verdict = compare_steps(&study);
    report.fact("Model", model);
    let source = if *is_measured { "a measured profile" } else { "a stated rate" };
    report.fact("Device", format!("{device}, {source}"));
    report.fact("Cluster", format!("{gpus} GPUs"));
    report.fact("Global batch", format!("{global_batch} samples"));
    report.fact("Steps", steps.to_string());
    if let Some(plan) = &methods.plan {
        report.fact("Plan", plan.degrees.to_string());
        report.fact("GPUs used", plan.gpus_used.to_string());
        for method in &methods.strategies {
            report.fact(&format!("GiB per GPU, {}", method.name), memory_text(&method.memory));
        }
        report.notes.push(format!("The headroom is in parentheses; {}.", methods.limit_text()));
    }
    report.notes.extend(methods.searched.as_ref().map(|plans| format!("Plans searched: {plans}.")));
    report.notes.push(ABOUT_TIMELINES.to_owned());
    report.studies.push(study);
    Ok(report)
}
