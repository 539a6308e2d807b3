//! `dflop train`: trains a model through the executor, configured in TOML.
//!
//! Without the environment of a launcher, the command launches the ranks of the job as processes of this
//! machine; under `torchrun`, Slurm or Open MPI it is one rank.

mod check;
pub(crate) mod config;
mod corrections;
mod demo;
mod inline;
mod kept;
mod plan_file;
mod print;
mod rank;
mod record;
mod report;
mod run_files;
mod run_threads;
mod setup;
mod start;
mod synthetic;

use std::fs::File;
use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use dflop_balancer::Strategy;
use dflop_executor::comm::launch::{
    Launcher, RankStatus, StopSignals, end_with_launcher, has_launcher, identity_from_environment,
};
use dflop_executor::comm::{RankIdentity, Settings, tcp};
use dflop_executor::train::{StepReport, StopReason, join_traces};

pub(crate) use config::TrainConfig;
use corrections::CorrectionSource;
pub(crate) use demo::{CpuTimes, Trained, train as train_demo};
use plan_file::PlanFile;
use print::Printer;
pub(crate) use rank::RankTask;
use rank::RunEnd;
use report::{StepLog, show_step};
pub(crate) use run_threads::run_threads;
pub(crate) use setup::Setup;

use crate::args::compute_device::TransportName;
use crate::args::report::SampleReportArgs;
use crate::args::step_plan::parse_strategy;
use crate::cuda;
use crate::failure::Failure;
use crate::output::{Output, replace_file};
use crate::reexec::Invocation;
use crate::report::write_report;

/// Train a model: encoder and LLM stages on this machine's CPUs, fed by the balanced loader.
///
/// Prints a line per step. Starts the ranks of the job as processes of this machine, unless a launcher
/// (torchrun, Slurm, Open MPI) started this process as one of them.
///
/// `SIGINT` and `SIGTERM` end the run after the current step, with a checkpoint if there is a directory for
/// them, and exit status 130 or 143; a second one ends it at once. A closed standard output ends it likewise,
/// with status 0.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Configuration of the run, TOML.
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// Seed of initial weights and of the global order [default: the configuration's].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// End after this step; the learning rate follows the steps of the configuration [default: these].
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Plan to run, as `dflop plan --json` printed it: its placement, stages, degrees, schedule and
    /// microbatches replace those of the configuration.
    #[arg(long, value_name = "FILE.json", conflicts_with = "pipeline_stages")]
    plan: Option<PathBuf>,
    /// Pipeline stages of all modules together; encoders keep theirs. With 1, encoder and LLM take turns in
    /// one process [default: the configuration's].
    #[arg(long, value_name = "N")]
    pipeline_stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = parse_strategy)]
    #[arg(help = format!("Strategy of the step plans: {} [default: the configuration's]", Strategy::describe(Strategy::of_any_size())))]
    strategy: Option<Strategy>,
    /// Number of ranks to start on this machine; must equal the ranks of the job [default: the ranks of the
    /// job].
    #[arg(long, value_name = "N")]
    local_ranks: Option<usize>,
    /// Directory of saved states [default: the configuration's].
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,
    /// Resume from the last complete state in the directory of saved states; start from step 0 if there is
    /// none.
    #[arg(long)]
    resume: bool,
    /// Corrections of the cost model that plans use: `measured` learns them from the times of this run, so
    /// that plans, and the last digits of losses, depend on the load of the machine; FILE replays those that
    /// a run recorded in its `corrections.jsonl`, bit for bit [default: none, measured times are recorded and
    /// reported].
    #[arg(long, value_name = "measured|FILE")]
    corrections: Option<CorrectionSource>,
    /// Record every step as a line of JSON in this file, which `dflop top` shows while the run goes on
    /// [default: `steps.jsonl` in the directory of saved states].
    #[arg(long, value_name = "FILE.jsonl")]
    record: Option<PathBuf>,
    /// Write the timeline of every action, measured and predicted, for Perfetto or `chrome://tracing`.
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    report: SampleReportArgs,
    /// Check what the run needs and train nothing: configuration, files, ranks, GPUs, memory, shards, index,
    /// rendezvous, checkpoints. Under a launcher every rank checks its own machine.
    #[arg(long)]
    check: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TrainArgs, invocation: &Invocation, out: &mut Output) -> Result<(), Failure> {
    if args.check {
        return check::run(args, out);
    }
    let config = args.config()?;
    let mut missing = cuda::missing_variables(config.parallel.transport).peekable();
    if missing.peek().is_some() {
        // The driver reads them when a process first uses it, so this one starts again.
        return Err(Command::new(invocation.path()?).args(invocation.args()).envs(missing).exec().into());
    }
    let identity = identity_from_environment().map_err(dflop_executor::Error::from)?;
    if identity.rendezvous.is_some() {
        return run_rank(args, &config, &identity, out);
    }
    let setup = Setup::new(&config)?;
    let ranks = setup.job.world_size();
    if let Some(asked) = args.local_ranks.filter(|asked| *asked != ranks) {
        return Err(Failure::Misuse(format!(
            "`--local-ranks {asked}`: expected {ranks}, the ranks of the job"
        )));
    }
    // Checked here once, before every rank would report the same.
    setup.recorded_corrections(&config)?;
    // Builds the index once, before several ranks would do so at the same time.
    drop(setup.planner(&config, None)?);
    let done = if ranks == 1 || args.pipeline_stages == Some(1) {
        train_in_threads(args, &config, &setup, out)
    } else {
        launch(&config, ranks, invocation)
    };
    // The timeline of a failed run is joined and shown too: it shows where the run failed.
    let parts = args.trace_parts(0..ranks);
    let reported = args.write_report(&config, &setup, &parts);
    let joined = join_parts(args.trace.as_deref(), &parts);
    done.and(reported).and(joined)
}

/// Trains with all ranks as threads of this process.
fn train_in_threads(
    args: &TrainArgs,
    config: &TrainConfig,
    setup: &Setup,
    out: &mut Output,
) -> Result<(), Failure> {
    let mut printer = Printer::new(out, args.json);
    let mut log = args.report.path().map(StepLog::create).transpose()?;
    let mut tell = |step: &StepReport| show_step(step, &mut printer, log.as_mut());
    let signals = StopSignals::register().and_then(StopSignals::second_ends_process);
    let signals = Some(Arc::new(signals.map_err(dflop_executor::Error::from)?));
    let task = RankTask { is_resumed: args.resume, trace: args.trace_base(), signals, local_rank: None };
    let ended = run_threads(config, setup, &task, &mut tell)?;
    printer.end(&ended)?;
    stopped(&ended)
}

/// Returns the failure of a run that a signal has stopped in order.
fn stopped(end: &RunEnd) -> Result<(), Failure> {
    match end.stopped.and_then(StopReason::signal) {
        Some(signal) => Err(Failure::Stopped { signal }),
        None => Ok(()),
    }
}

/// Runs one rank under a launcher.
fn run_rank(
    args: &TrainArgs,
    config: &TrainConfig,
    identity: &RankIdentity,
    out: &mut Output,
) -> Result<(), Failure> {
    end_with_launcher().map_err(dflop_executor::Error::from)?;
    let signals = StopSignals::register();
    // The launcher kills a rank that does not end; under another one, a second signal has to.
    let signals = if has_launcher() { signals } else { signals.and_then(StopSignals::second_ends_process) };
    let signals = Some(Arc::new(signals.map_err(dflop_executor::Error::from)?));
    let setup = Setup::new(config)?;
    let connect = match config.parallel.transport {
        TransportName::Tcp => tcp::connect,
        // tensors go over NCCL, and the tree of the job serves any number of ranks
        TransportName::Nccl => tcp::connect_tree,
    };
    let mut session = connect(identity, settings(config)).map_err(dflop_executor::Error::from)?;
    // Nothing is distributed through the store any more: its host keeps no connection per rank.
    session.store = None;
    // A foreign launcher joins nothing: rank 0 reports on itself.
    let is_traced = args.trace.is_some() || has_launcher() || identity.rank == 0;
    let trace = args.trace_base().filter(|_| is_traced).map(|trace| rank::part(&trace, identity.rank));
    let local_rank = Some(identity.local_rank);
    let task = RankTask { is_resumed: args.resume, trace, signals, local_rank };
    if identity.rank > 0 {
        let ended = rank::run(config, &setup, Box::new(session.comm), &task, &mut |_| Ok(()))?;
        return stopped(&ended);
    }
    let mut printer = Printer::new(out, args.json);
    let mut log = args.report.path().map(StepLog::create).transpose()?;
    let mut tell = |step: &StepReport| show_step(step, &mut printer, log.as_mut());
    let ended = rank::run(config, &setup, Box::new(session.comm), &task, &mut tell);
    let reported = if has_launcher() {
        Ok(())
    } else {
        let parts = args.trace_parts(0..1);
        args.write_report(config, &setup, &parts).and_then(|()| match &args.trace {
            Some(_) => Ok(()),
            None => join_parts(None, &parts),
        })
    };
    let ended = ended?;
    printer.end(&ended)?;
    reported?;
    stopped(&ended)
}

/// Starts the ranks and waits for them.
fn launch(config: &TrainConfig, ranks: usize, invocation: &Invocation) -> Result<(), Failure> {
    let launcher = Launcher::new(invocation.path()?, ranks).map_err(dflop_executor::Error::from)?;
    // One thread pool per rank, of the configured size: by default each would take all cores.
    let launcher = launcher
        .args(invocation.args())
        .first_rank_prints_plainly()
        .variable("RAYON_NUM_THREADS", config.parallel.threads.to_string());
    let outcome = launcher.run().map_err(dflop_executor::Error::from)?;
    if let Some(failed) = outcome.failed {
        let reason = format!("rank {} ended the run: {}", failed.rank, failed.status);
        // Some arguments are only checked on the ranks; their misuse is the misuse of this command.
        return Err(match failed.status.code() {
            Some(2) => Failure::Misuse(reason),
            _ => Failure::Failed(reason),
        });
    }
    match outcome.interrupted {
        Some(signal) if outcome.ranks.iter().any(RankStatus::is_failed) => {
            Err(Failure::Failed(format!("interrupted by signal {signal}, before the ranks had stopped")))
        }
        // Rank 0 has reported it, unless the run had come to its end.
        Some(signal) if outcome.ranks.iter().any(|rank| rank.stopped_by().is_some()) => {
            Err(Failure::Stopped { signal })
        }
        _ => Ok(()),
    }
}

/// Joins the timelines of all ranks into one file, if one is wanted, and removes them.
fn join_parts(trace: Option<&Path>, parts: &[PathBuf]) -> Result<(), Failure> {
    let parts: Vec<&PathBuf> = parts.iter().filter(|part| part.is_file()).collect();
    if let Some(trace) = trace.filter(|_| !parts.is_empty()) {
        let files =
            parts.iter().map(|part| File::open(part).map(BufReader::new)).collect::<Result<Vec<_>, _>>()?;
        replace_file(trace, |output| Ok(join_traces(files, output).map(drop)?))?;
    }
    for part in parts {
        std::fs::remove_file(part)?;
    }
    Ok(())
}

/// Returns the settings of the communicator.
fn settings(config: &TrainConfig) -> Settings {
    let [timeout, slow] = [config.parallel.timeout_seconds, config.parallel.slow_seconds];
    Settings::default().wait(Duration::from_secs_f64(timeout)).slow(Duration::from_secs_f64(slow))
}

impl TrainArgs {
    /// Returns the name from which those of the timelines of ranks are made: that of the trace, or else of
    /// the report.
    fn trace_base(&self) -> Option<PathBuf> {
        self.trace.clone().or_else(|| self.report.path().map(Path::to_owned))
    }

    /// Returns the timelines of ranks.
    fn trace_parts(&self, ranks: std::ops::Range<usize>) -> Vec<PathBuf> {
        let base = self.trace_base();
        base.iter().flat_map(|base| ranks.clone().map(|rank| rank::part(base, rank))).collect()
    }

    /// Writes the report, if one is wanted and the run took a step.
    fn write_report(&self, config: &TrainConfig, setup: &Setup, parts: &[PathBuf]) -> Result<(), Failure> {
        let Some(path) = self.report.path() else { return Ok(()) };
        match report::report(path, config, setup, parts, self.report.previews())? {
            Some(report) => write_report(path, &report),
            None => Ok(()),
        }
    }

    /// Reads the configuration and applies the arguments to it.
    fn config(&self) -> Result<TrainConfig, Failure> {
        let mut config = TrainConfig::read(&self.config)?;
        if let Some(plan) = &self.plan {
            PlanFile::read(plan)?.apply(&mut config)?;
        }
        config.seed = self.seed.unwrap_or(config.seed);
        config.until = self.steps;
        config.parallel.strategy = self.strategy.unwrap_or(config.parallel.strategy);
        if let Some(directory) = &self.checkpoints {
            config.checkpoint.directory = Some(directory.clone());
        }
        config.correction.source.clone_from(&self.corrections);
        config.record.clone_from(&self.record);
        if self.resume && config.checkpoint.directory.is_none() {
            return Err(Failure::Misuse(
                "`--resume` needs a directory of saved states: `--checkpoints DIR`".into(),
            ));
        }
        match self.pipeline_stages {
            Some(1) => config.one_stage_each(),
            Some(stages) => config.pipeline_stages(stages)?,
            None => {}
        }
        Ok(config)
    }
}
