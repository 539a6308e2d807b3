//! `dflop train`: trains a model through the executor, configured in TOML or JSON.
//!
//! Arguments become the configuration and the options for a [`Run`], which does everything else: without a
//! launcher environment the run starts the job's ranks as processes with this command line; under `torchrun`,
//! Slurm or Open MPI this process is a rank.

mod print;
mod report;

use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use dflop_balancer::Strategy;
use dflop_executor::Error;
use dflop_executor::run::{
    CorrectionSource, Findings, RankProgram, Run, RunConfig, RunEnd, RunOptions, StopRequests,
    missing_variables,
};
use dflop_executor::train::{StepReport, StopReason};

pub(crate) use print::{CpuTimes, Trained, train as train_demo};
use print::{Printer, print_findings};
use report::ReportFiles;

use crate::args::ReportArgs;
use crate::args::step_plan::parse_strategy;
use crate::commands::Invocation;
use crate::failure::Failure;
use crate::output::Output;

/// Train a model: encoder and LLM stages on this machine's CPUs, fed by the balanced loader.
///
/// Prints a line per step. Starts the job's ranks as processes on this machine, unless a launcher (torchrun,
/// Slurm, Open MPI) started this process as a rank.
///
/// `SIGINT` and `SIGTERM` end the run after the current step, with a checkpoint if there is a directory for
/// them, and exit status 130 or 143; a second one ends it at once. A closed standard output ends it likewise,
/// with status 0.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Run configuration, TOML, or JSON if the name ends in `.json`.
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// Seed for initial weights and for the global order [default: the configuration's].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// End after this step; the learning rate follows the steps of the configuration [default: these].
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Plan to run, as `dflop plan --json` printed it: placement, stages, degrees, schedule and microbatches
    /// replace the configured values.
    #[arg(long, value_name = "FILE.json", conflicts_with = "stages")]
    plan: Option<PathBuf>,
    /// Number of pipeline stages for all modules together; encoders keep their own stages. With 1, encoder
    /// and LLM take turns in one process [default: the configuration's].
    #[arg(long, value_name = "N")]
    stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = parse_strategy)]
    #[arg(help = format!("Strategy of the step plans: {} [default: the configuration's]", Strategy::describe(Strategy::for_any_size())))]
    strategy: Option<Strategy>,
    /// Number of ranks to start on this machine; must equal the job's ranks [default: the job's ranks].
    #[arg(long, value_name = "N")]
    local_ranks: Option<usize>,
    /// Directory for saved states [default: the configuration's].
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,
    /// Resume from the last complete state in the directory of saved states; start from step 0 if there is
    /// none.
    #[arg(long)]
    resume: bool,
    /// Cost model corrections that plans use: `measured` learns corrections from the times in this run, so
    /// that plans, and the last digits in losses, depend on the machine load; FILE replays corrections that a
    /// run recorded in its `corrections.jsonl`, bit for bit [default: none, measured times are recorded and
    /// reported].
    #[arg(long, value_name = "measured|FILE")]
    corrections: Option<CorrectionSource>,
    /// Record every step as a JSON line in this file, which `dflop top` shows while the run goes on [default:
    /// `steps.jsonl` in the directory for saved states].
    #[arg(long, value_name = "FILE.jsonl")]
    record: Option<PathBuf>,
    /// Write the timeline with every action, measured and predicted, for Perfetto or `chrome://tracing`.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    report: ReportArgs,
    /// Check what the run needs and train nothing: configuration, files, ranks, GPUs, memory, shards, index,
    /// rendezvous, checkpoints. Under a launcher every rank checks its own machine.
    #[arg(long)]
    check: bool,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TrainArgs, invocation: &Invocation, out: &mut Output) -> Result<(), Failure> {
    let config = match args.config() {
        Err(error) if args.check => return print_findings(Findings::for_unreadable(error), args.json, out),
        config => config?,
    };
    if args.check {
        let run = Run::new(config, args.options(None, invocation)?);
        return print_findings(run.check(), args.json, out);
    }
    let mut files = ReportFiles::new(&args.report, args.trace.as_deref())?;
    let run = Run::new(config, args.options(files.trace(), invocation)?);
    let mut missing = missing_variables(run.config().parallel.transport).peekable();
    if missing.peek().is_some() {
        // The driver reads them when a process first uses it, so this one starts again.
        return Err(Command::new(invocation.path()?).args(invocation.args()).envs(missing).exec().into());
    }
    let ended = take_steps(&run, Printer::new(out, args.json), &mut files);
    // The report of a failed run shows where it failed.
    let reported = files.write(&run);
    ended.and(reported)
}

/// Runs all steps, prints the steps on rank 0, and keeps them for the report.
fn take_steps(run: &Run, mut printer: Printer<'_>, files: &mut ReportFiles) -> Result<(), Failure> {
    let mut failed = None;
    let mut on_step = |step: &StepReport| {
        let kept = files.keep(step);
        match printer.step(step).and(kept) {
            Ok(()) => ControlFlow::Continue(()),
            Err(failure) => {
                failed = Some(failure);
                ControlFlow::Break(())
            }
        }
    };
    let end = run.start(&mut on_step)?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    if end.has_first_rank {
        printer.end(&end)?;
    }
    stopped(&end)
}

/// Returns the failure for a run that a signal stopped in order.
fn stopped(end: &RunEnd) -> Result<(), Failure> {
    match end.stopped.and_then(StopReason::signal) {
        Some(signal) => Err(Failure::Stopped { signal }),
        None => Ok(()),
    }
}

impl TrainArgs {
    /// Reads the configuration and applies the arguments to it.
    fn config(&self) -> Result<RunConfig, Error> {
        let mut config = RunConfig::read(&self.config)?;
        if let Some(plan) = &self.plan {
            config.read_plan(plan)?;
        }
        config.seed = self.seed.unwrap_or(config.seed);
        config.parallel.strategy = self.strategy.unwrap_or(config.parallel.strategy);
        if let Some(directory) = &self.checkpoints {
            config.checkpoint.directory = Some(directory.clone());
        }
        if self.resume && config.checkpoint.directory.is_none() {
            return Err(Error::Config(
                "`--resume` needs a directory of saved states: `--checkpoints DIR`".into(),
            ));
        }
        match self.stages {
            Some(1) => config.one_stage_each(),
            Some(stages) => config.pipeline_stages(stages)?,
            None => {}
        }
        Ok(config)
    }

    /// Returns the run options.
    ///
    /// - `trace`: file for the timeline
    fn options(&self, trace: Option<PathBuf>, invocation: &Invocation) -> Result<RunOptions, Failure> {
        // With one stage each, encoder and LLM take turns in this process.
        let processes = match self.stages {
            Some(1) => None,
            _ => Some(RankProgram { path: invocation.path()?, args: invocation.args().cloned().collect() }),
        };
        Ok(RunOptions {
            until: self.steps,
            resume: self.resume,
            corrections: self.corrections.clone(),
            record: self.record.clone(),
            trace,
            local_ranks: self.local_ranks,
            processes,
            stop: StopRequests::Signals,
        })
    }
}
