//! `dflop balance`: solves a partition or pipeline instance.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use dflop_balancer::{
    Assignment, Budget, Instance, LowerBound, PipelineAssignment, PipelineConfig, PipelineObjective,
    Strategy, balance, balance_pipeline,
};
use serde::Serialize;

use crate::args::step_plan::{CapArgs, is_search, parse_strategy};
use crate::failure::Failure;
use crate::output::{Output, write_json};
use dflop_loader::store::file;

/// Partition the items in an instance file into groups, or into ordered microbatches for pipeline ranks.
#[derive(Debug, Args)]
pub(crate) struct BalanceArgs {
    /// Instance file: JSON with `n`, `m`, `c`, `d` in ns, optionally `tok` and `bytes`; may be gzipped.
    #[arg(long, value_name = "FILE")]
    instance: PathBuf,
    /// Quantity to minimize.
    #[arg(long, value_enum, default_value_t = Objective::Partition)]
    objective: Objective,
    /// Number of data-parallel ranks; required by `pipeline` and `min-max`.
    #[arg(long, value_name = "D", required_if_eq_any(PIPELINES))]
    dp: Option<usize>,
    /// Number of pipeline stages per module, such as `1,3`; required by `pipeline` and `min-max`.
    #[arg(long, value_name = "E,L", value_delimiter = ',', required_if_eq_any(PIPELINES))]
    stages: Option<Vec<usize>>,
    /// Number of data-parallel encoder ranks, if not `--dp`: one number for all modules but the last, or one
    /// per module. These ranks share the encoder items at a microbatch position over all pipelines.
    #[arg(long, value_name = "D", value_delimiter = ',')]
    encoder_dp: Option<Vec<usize>>,
    #[arg(long, value_name = "NAME", default_value = "search", value_parser = parse_strategy)]
    #[arg(help = format!("Strategy: {}", Strategy::describe(Strategy::ALL.iter().copied())))]
    strategy: Strategy,
    /// Search effort in work units, the same answer on every machine [default: 20000; 4000000 if exact].
    #[arg(long, value_name = "N", conflicts_with = "deadline_ms")]
    search_effort: Option<u64>,
    /// Time limit of the search in milliseconds, for offline use; an answer cut short depends on the machine
    /// and is reported as such.
    #[arg(long, value_name = "T")]
    deadline_ms: Option<u64>,
    #[command(flatten)]
    caps: CapArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Objective {
    /// The largest module sum in a group.
    Partition,
    /// The 1F1B makespan on the slowest rank.
    Pipeline,
    /// The 1F1B makespan of the slowest rank, after the largest group sum is minimized: a baseline.
    MinMax,
}

/// Objectives that need a pipeline, by argument and value.
const PIPELINES: [(&str, &str); 2] = [("objective", "pipeline"), ("objective", "min-max")];
/// Work units of the pipeline search per millisecond, roughly; converts a deadline to work units.
const PIPELINE_WORK_PER_MS: u64 = 14_000;

#[derive(Debug, Serialize)]
struct BalanceReport {
    name: String,
    strategy: String,
    /// Items by group.
    #[serde(skip_serializing_if = "Option::is_none")]
    groups: Option<Vec<Vec<u32>>>,
    /// Items by rank and microbatch.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<Vec<Vec<Vec<u32>>>>,
    makespan_ns: u64,
    lower_bound_ns: u64,
    bound: String,
    gap: f64,
    is_optimal: bool,
    work_spent: u64,
    is_reproducible: bool,
    solve_ms: f64,
}

pub(crate) fn run(args: &BalanceArgs, out: &mut Output) -> Result<(), Failure> {
    let has_pipeline = args.dp.is_some() || args.stages.is_some() || args.encoder_dp.is_some();
    if args.objective == Objective::Partition && has_pipeline {
        let message = "`--dp`, `--stages` and `--encoder-dp` need `--objective pipeline`";
        return Err(Failure::Misuse(message.into()));
    }
    if !is_search(args.strategy) {
        let limits = [
            ("--search-effort", args.search_effort.is_some()),
            ("--deadline-ms", args.deadline_ms.is_some()),
        ];
        if let Some((flag, _)) = limits.into_iter().find(|(_, is_given)| *is_given) {
            let message = format!("`{flag}` has no effect with `--strategy {}`; leave it out", args.strategy);
            return Err(Failure::Misuse(message));
        }
    }
    let in_file = |error| Failure::from(error).in_file(&args.instance);
    let instance = Instance::from_json(&read_text(&args.instance)?).map_err(in_file)?;
    let caps = args.caps.caps();
    let mut budget = budget(args);
    let started = Instant::now();
    let report = match (args.dp, &args.stages) {
        (Some(dp_size), Some(stages)) => {
            let config = pipeline_config(args, &instance, dp_size, stages)?;
            let found = balance_pipeline(&instance, &config, args.strategy, &caps, &mut budget);
            pipeline_report(found.map_err(in_file)?)
        }
        _ => partition_report(balance(&instance, args.strategy, &caps, &mut budget).map_err(in_file)?),
    };
    let report = BalanceReport {
        name: instance.name().to_owned(),
        strategy: args.strategy.to_string(),
        solve_ms: started.elapsed().as_secs_f64() * 1e3,
        ..report
    };
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

/// Returns the pipeline that the arguments describe; the last module is the LLM.
fn pipeline_config(
    args: &BalanceArgs,
    instance: &Instance,
    dp_size: usize,
    stages: &[usize],
) -> Result<PipelineConfig, Failure> {
    let objective = match args.objective {
        Objective::MinMax => PipelineObjective::MinMax,
        Objective::Partition | Objective::Pipeline => PipelineObjective::Makespan,
    };
    let config = PipelineConfig::new(dp_size, stages.to_vec()).objective(objective);
    let encoders = instance.modules() - 1;
    let mut dp_sizes = match args.encoder_dp.as_deref() {
        None => return Ok(config),
        Some(&[size]) => vec![size; encoders],
        Some(sizes) if sizes.len() == encoders => sizes.to_vec(),
        Some(sizes) => {
            let message = format!("`--encoder-dp` has {} numbers for {encoders} encoders", sizes.len());
            return Err(Failure::Misuse(message));
        }
    };
    dp_sizes.push(dp_size);
    Ok(config.module_dp_sizes(dp_sizes))
}

fn read_text(path: &Path) -> Result<String, Failure> {
    let cannot =
        |error: std::io::Error| Failure::Failed(format!("could not read `{}`: {error}", path.display()));
    let bytes = file::read_named(path).map_err(cannot)?;
    let mut text = String::new();
    // The magic number of gzip; instance files often have no telling extension.
    if bytes.starts_with(&[0x1f, 0x8b]) {
        flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text).map_err(cannot)?;
    } else {
        (&bytes[..]).read_to_string(&mut text).map_err(cannot)?;
    }
    Ok(text)
}

fn budget(args: &BalanceArgs) -> Budget {
    match args.deadline_ms {
        Some(milliseconds) => {
            let end = Instant::now() + Duration::from_millis(milliseconds);
            let work = match args.objective {
                Objective::Partition => u64::MAX,
                // The search anneals: its cooling schedule needs the total effort in advance.
                Objective::Pipeline | Objective::MinMax => milliseconds.saturating_mul(PIPELINE_WORK_PER_MS),
            };
            Budget::work(work).deadline(move || Instant::now() >= end)
        }
        None => Budget::work(args.search_effort.unwrap_or_else(|| args.strategy.work_default())),
    }
}

fn partition_report(assignment: Assignment) -> BalanceReport {
    let gap = assignment.gap();
    let Assignment { groups, makespan_ns, bound, work_spent, is_reproducible } = assignment;
    let groups = Some(groups);
    BalanceReport { groups, ..report(makespan_ns, bound, gap, work_spent, is_reproducible) }
}

fn pipeline_report(assignment: PipelineAssignment) -> BalanceReport {
    let gap = assignment.gap();
    let PipelineAssignment { ranks, makespan_ns, bound, work_spent, is_reproducible, .. } = assignment;
    let ranks = Some(ranks);
    BalanceReport { ranks, ..report(makespan_ns, bound, gap, work_spent, is_reproducible) }
}

fn report(
    makespan_ns: u64,
    bound: LowerBound,
    gap: f64,
    work_spent: u64,
    is_reproducible: bool,
) -> BalanceReport {
    BalanceReport {
        name: String::new(),
        strategy: String::new(),
        groups: None,
        ranks: None,
        makespan_ns,
        lower_bound_ns: bound.ns,
        bound: bound.kind.to_string(),
        gap,
        is_optimal: makespan_ns == bound.ns,
        work_spent,
        is_reproducible,
        solve_ms: 0.0,
    }
}

fn print(out: &mut impl Write, report: &BalanceReport) -> Result<(), Failure> {
    let BalanceReport { name, strategy, makespan_ns, lower_bound_ns, bound, gap, work_spent, .. } = report;
    writeln!(out, "{name}: {strategy}, makespan {:.3} ms", *makespan_ns as f64 / 1e6)?;
    let optimal = if report.is_optimal { ", optimal" } else { "" };
    let lower_bound_ms = *lower_bound_ns as f64 / 1e6;
    writeln!(out, "lower bound {lower_bound_ms:.3} ms ({bound}), gap {:.4} %{optimal}", gap * 100.0)?;
    writeln!(out, "{work_spent} work units, {:.3} ms", report.solve_ms)?;
    if !report.is_reproducible {
        writeln!(out, "cut short by the deadline: another run may find another answer")?;
    }
    for (group, items) in report.groups.iter().flatten().enumerate() {
        writeln!(out, "group {group}: {}", format_items(items))?;
    }
    for (rank, microbatches) in report.ranks.iter().flatten().enumerate() {
        let shown: Vec<String> = microbatches.iter().map(|items| format_items(items)).collect();
        writeln!(out, "rank {rank}: {}", shown.join(" | "))?;
    }
    Ok(())
}

fn format_items(items: &[u32]) -> String {
    items.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}
