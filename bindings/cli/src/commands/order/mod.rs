//! `dflop order`: prints which samples every rank and microbatch gets, step by step.
//!
//! Fills the `dflop order` report.
//!
//! `dflop order --shuffle-quality`: measures how well an epoch is shuffled.

use crate::args::set::{SetArgs, accepted};
use crate::args::step_plan::{PlannedStepsArgs, ResumeArgs, StepPlanArgs, check_layout, check_plan_settings};
use crate::args::{PREVIEWS, ReportArgs};
use crate::failure::Failure;
use crate::output::{Output, write_file, write_json};
use crate::report::collect::PlannedSteps;
use crate::report::{Basis, Origin, RunReport, StrategyResult, compare_steps, verdict, write_report};
use clap::Args;
use dflop_balancer::Strategy;
use dflop_loader::settings::{OrderSettings, Settings};
use dflop_loader::{ShuffleQuality, StepContext, StepPlan, StepPlanner, StrategySummary, compare_strategies};
use serde::Serialize;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;

/// Print which samples every rank and microbatch gets, a line per step.
///
/// The samples in a step do not depend on the number of ranks. With `plan.context`, `key/4` is a sample that
/// 4 ranks share, in the line of each.
#[derive(Debug, Args)]
pub(crate) struct OrderArgs {
    #[command(flatten)]
    planned: PlannedStepsArgs,
    /// First step [default: 0, or the step in the resumed state].
    #[arg(long, value_name = "T", conflicts_with = "resume")]
    from_step: Option<u64>,
    /// Number of steps [default: to the end of the first step's epoch, or to the end of a finite run].
    #[arg(long, value_name = "K")]
    steps: Option<u64>,
    #[command(flatten)]
    resume: ResumeArgs,
    /// Save the state after the last printed step.
    #[arg(long, value_name = "FILE")]
    state_out: Option<PathBuf>,
    /// Instead of steps, print how well the first epoch is shuffled, compared with a uniform permutation.
    #[arg(long, conflicts_with_all = ["steps", "from_step", "resume", "state_out", "report"])]
    shuffle_quality: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    set: SetArgs<OrderAccepted>,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
}

accepted!(OrderAccepted: "order", "plan", "processor.length_buckets", "processor.layout",
    "processor.chat_template", "processor.caption_prompt", "cost", "index", "store");

#[derive(Debug, Serialize)]
struct OrderLine<'a> {
    step: u64,
    /// Keys by rank and microbatch.
    keys: Vec<Vec<Vec<&'a str>>>,
    /// Sample numbers in the index, which tell equal keys apart.
    samples: Vec<Vec<Vec<u64>>>,
    /// Number of ranks that share each sample, with `plan.context`.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample_ranks: Option<Vec<Vec<Vec<usize>>>>,
    /// Dataset number for each sample, if there is more than one dataset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "data_sets")]
    datasets: Option<Vec<Vec<Vec<usize>>>>,
    digest: String,
    makespan_ns: u64,
    lower_bound_ns: u64,
    target_tokens: u64,
    /// Whether token counts may be far from their mean, because no closer partition satisfied the byte cap.
    /// Omitted if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    near_mean_cap_dropped: bool,
}

pub(crate) fn run(args: &OrderArgs, out: &mut Output) -> Result<(), Failure> {
    let settings = args.set.settings()?;
    if args.shuffle_quality {
        let reason = "has no effect with `--shuffle-quality`; leave it out";
        args.set.refuse(&["plan", "cost", "processor"], reason)?;
    }
    check_plan_settings(&args.set, &settings)?;
    check_layout(&args.set, &settings)?;
    let planner = args.planned.planner(&settings, &args.resume)?;
    if args.shuffle_quality {
        return print_shuffle_quality(&planner, &args.planned.plan, &settings.order, args.json, out);
    }
    let steps = steps(args, &planner)?;
    let end = steps.end;
    if let Some(path) = args.report.path() {
        write_report(path, &report(args, &settings, &planner, steps.clone())?)?;
    }
    for step in steps {
        let plan = planner.plan(step)?;
        let line = line(&planner, &plan);
        if args.json { write_json(out, &line)? } else { print(out, &line)? }
    }
    if let Some(path) = &args.state_out {
        write_file(path, planner.state(end)?.to_json() + "\n")?;
    }
    Ok(())
}

/// Returns the steps to print; without `--steps`, to the run's end, or to the epoch's end if the run has no
/// end.
fn steps(args: &OrderArgs, planner: &StepPlanner) -> Result<Range<u64>, Failure> {
    let from = args.from_step.unwrap_or(planner.first_step());
    let overflow = || Failure::Misuse("invalid `--from-step`: step numbers overflow".into());
    let until = match (args.steps, planner.end_step()) {
        (Some(steps), run_end) => {
            let until = from.checked_add(steps).ok_or_else(overflow)?;
            // A run that ends within the range is printed to the run's end; the planner rejects a range after
            // the end.
            run_end.filter(|&end| from < end).map_or(until, |end| until.min(end))
        }
        (None, Some(run_end)) if from <= run_end => run_end,
        (None, _) => {
            let per_epoch = planner.steps_per_epoch();
            // No check of the range here: planning rejects a step that the run does not have, or that is too
            // large.
            let next = from.checked_add(1).ok_or_else(overflow)?;
            (from / per_epoch.max(1) + 1).saturating_mul(per_epoch).max(next)
        }
    };
    Ok(from..until.max(from))
}

fn line<'a>(planner: &'a StepPlanner, plan: &StepPlan) -> OrderLine<'a> {
    let key = |place: &u32| planner.row(plan.samples[*place as usize]).key();
    let number = |place: &u32| plan.samples[*place as usize].sample;
    let dataset = |place: &u32| plan.samples[*place as usize].dataset;
    let context = plan.context.as_ref();
    OrderLine {
        sample_ranks: context
            .map(|context| by_rank(plan, |place| context.places[*place as usize].ranks.len())),
        step: plan.step,
        keys: by_rank(plan, key),
        samples: by_rank(plan, number),
        datasets: (planner.datasets().len() > 1).then(|| by_rank(plan, dataset)),
        digest: plan.digest.to_string(),
        makespan_ns: plan.makespan_ns,
        lower_bound_ns: plan.bound.ns,
        target_tokens: plan.target_tokens,
        near_mean_cap_dropped: plan.is_near_mean_cap_dropped,
    }
}

/// Maps the samples in a plan, given by plan index, by rank and microbatch.
fn by_rank<T>(plan: &StepPlan, of: impl Fn(&u32) -> T) -> Vec<Vec<Vec<T>>> {
    let microbatch = |places: &Vec<u32>| places.iter().map(&of).collect();
    let rank = |microbatches: &Vec<Vec<u32>>| microbatches.iter().map(microbatch).collect();
    plan.ranks.iter().map(rank).collect()
}

fn print(out: &mut impl std::io::Write, line: &OrderLine<'_>) -> Result<(), Failure> {
    let milliseconds = line.makespan_ns as f64 / 1e6;
    writeln!(out, "step {} digest {} predicted {milliseconds:.1} ms", line.step, line.digest)?;
    for (rank, microbatches) in line.keys.iter().enumerate() {
        let sharing = |slot: usize, at: usize| line.sample_ranks.as_ref().map_or(1, |of| of[rank][slot][at]);
        let key = |slot: usize, (at, key): (usize, &&str)| match sharing(slot, at) {
            1 => (*key).to_owned(),
            ranks => format!("{key}/{ranks}"),
        };
        let microbatch = |(slot, keys): (usize, &Vec<&str>)| {
            keys.iter().enumerate().map(|one| key(slot, one)).collect::<Vec<_>>().join(" ")
        };
        let shown: Vec<String> = microbatches.iter().enumerate().map(microbatch).collect();
        writeln!(out, "  rank {rank}: {}", shown.join(" | "))?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct QualityReport {
    epoch: u64,
    /// Order quality for each dataset, by dataset number.
    #[serde(rename = "data_sets")]
    datasets: Vec<ShuffleQuality>,
}

/// Measures an epoch's order in every dataset and prints the results.
pub(crate) fn print_shuffle_quality(
    planner: &StepPlanner,
    plan: &StepPlanArgs,
    order: &OrderSettings,
    is_json: bool,
    out: &mut Output,
) -> Result<(), Failure> {
    let OrderSettings { shuffle, first_epoch: epoch, .. } = *order;
    let batch = plan.global_batch_size;
    let quality = |dataset| ShuffleQuality::of(dataset, shuffle, plan.seed, epoch, batch);
    let datasets: Vec<ShuffleQuality> = planner.datasets().iter().map(quality).collect::<Result<_, _>>()?;
    if is_json {
        return write_json(out, &QualityReport { epoch, datasets });
    }
    for (number, quality) in datasets.iter().enumerate() {
        let ShuffleQuality { samples, batch, displacement, .. } = quality;
        let ShuffleQuality { batch_shards, batch_shards_uniform, index_neighbors, .. } = quality;
        writeln!(out, "dataset {number}, epoch {epoch}: {samples} samples in batches of {batch}")?;
        writeln!(out, "{:<38} {:>10} {:>14}", "", "this order", "uniform random")?;
        let uniform_neighbors = 2.0 / *samples as f64;
        let rows = [
            ("mean displacement, relative to 1/3", *displacement, 1.0),
            ("distinct shards in a batch", *batch_shards, *batch_shards_uniform),
            ("neighbors that are adjacent in the index", *index_neighbors, uniform_neighbors),
        ];
        for (name, value, uniform) in rows {
            writeln!(out, "{name:<38} {value:>10.4} {uniform:>14.4}")?;
        }
    }
    Ok(())
}

/// Maximum number of steps in the simulated mean.
const STEPS_MAX: u64 = 50;

/// Returns the report on planned steps: the chosen strategy compared with data-blind.
fn report(
    args: &OrderArgs,
    settings: &Settings,
    planner: &StepPlanner,
    steps: Range<u64>,
) -> Result<RunReport, Failure> {
    let plan = &args.planned.plan;
    let (strategy, schedule) = (settings.plan.strategy.strategy, settings.plan.pipeline_schedule());
    let shown = steps.start..steps.end.min(steps.start.saturating_add(STEPS_MAX));
    let mut strategies = vec![Strategy::ROUND_ROBIN];
    if strategy != Strategy::ROUND_ROBIN {
        strategies.push(strategy);
    }
    let summaries = compare_strategies(planner, &strategies, shown.clone(), schedule)?;
    let result = |summary: &StrategySummary| StrategyResult {
        name: if summary.strategy == Strategy::ROUND_ROBIN {
            "data-blind".to_owned()
        } else {
            summary.strategy.to_string()
        },
        basis: Basis::Simulated,
        step_seconds: summary.mean_seconds(),
        step_seconds_p95: Some(summary.p95_seconds()),
        bubble_fraction: Some(summary.bubble_fraction),
        bound_seconds: Some(summary.bound_seconds),
        steps: shown.end - shown.start,
        plan: String::new(),
    };
    let planned = PlannedSteps {
        planner,
        strategies: strategies.iter().copied().zip(summaries.iter().map(result)).collect(),
        schedule,
        steps: shown.clone(),
        previews: PREVIEWS,
    };
    let (study, note) = planned.study(
        "Planned steps",
        "Samples of every rank and microbatch, in the order of execution. Data-blind deals the same samples round robin.",
    )?;
    let title = format!("Order of steps {} to {}", steps.start, steps.end.saturating_sub(1).max(steps.start));
    let mut report = RunReport::new("order", title, Origin::for_this_process());
    if shown.is_empty() {
        report.verdict.push(verdict(Basis::Counted, "There is no step to show."));
    } else {
        report.verdict = compare_steps(&study);
    }
    report.fact("Steps", (steps.end - steps.start).to_string());
    report.fact("Global batch", format!("{} samples", plan.global_batch_size));
    report.fact("Cluster", format!("{} DP ranks, {} microbatches each", plan.dp_size, plan.microbatches));
    if planner.context().is_some() {
        let mut counts = [0; 2];
        for step in shown.clone() {
            let plan = planner.plan(step)?;
            counts[0] += plan.context.as_ref().map_or(0, StepContext::split_samples);
            counts[1] += plan.samples.len();
        }
        report.fact("Split samples", format!("{} of {}", counts[0], counts[1]));
    }
    report.fact("Strategy", strategy.to_string());
    report.fact("Costs", format!("{} on {}", plan.model.name(), plan.model.times_from(settings)));
    report.fact("Seed", plan.seed.to_string());
    report.notes.extend(note);
    report.studies.push(study);
    Ok(report)
}
