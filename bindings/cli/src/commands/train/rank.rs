//! Runs one rank of the job, from joining the other ranks to the last step.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflop_executor::checkpoint::{CheckpointDirectory, SavedCheckpoint};
use dflop_executor::comm::launch::StopSignals;
use dflop_executor::comm::{Comm, StepContext, threads};
use dflop_executor::device::{Cpu, CpuBf16, Device};
use dflop_executor::inputs::InputReader;
use dflop_executor::models::Activations;
use dflop_executor::models::weights::{Checkpoint, Seed, WeightSource};
use dflop_executor::optimizer::{
    AdamWSettings, Decay, JobOptimizer, JobOptimizerSettings, LearningRate, Precision,
};
use dflop_executor::profile::gemm_peak_flops;
use dflop_executor::train::{
    StepReport, StopCheck, StopReason, TraceWriter, TrainingRank, TrainingRankOptions, join_job,
};
use dflop_loader::LoaderState;
use rustix::process::Signal;

use super::config::{OptimizerTable, PrecisionName, TrainConfig};
use super::setup::Setup;
use crate::failure::Failure;

/// Number of large matrix products that are timed; the best gives the peak FLOP rate.
const PEAK_RUNS: usize = 3;

/// Task of a rank in addition to the configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankTask {
    /// Whether to resume from the last saved state.
    pub(crate) is_resumed: bool,
    /// File for this rank's timeline.
    pub(crate) trace: Option<std::path::PathBuf>,
    /// Signals that stop the run.
    pub(crate) signals: Option<Arc<StopSignals>>,
}

/// End of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunEnd {
    /// Why it ended before its last step, if it did.
    pub(crate) stopped: Option<StopReason>,
    /// Number of steps taken, including those before a restored state.
    pub(crate) steps: u64,
    /// Directory of the last saved state.
    pub(crate) checkpoint: Option<PathBuf>,
}

/// Runs a rank; `on_step` is called for every step on every rank.
pub(crate) fn run(
    config: &TrainConfig,
    setup: &Setup,
    comm: Box<dyn Comm>,
    task: &RankTask,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<RunEnd, Failure> {
    let cpu = Cpu::new(config.parallel.threads)?;
    let peak = gemm_peak_flops(&cpu, PEAK_RUNS)?;
    let cpu = match config.parallel.memory_gib {
        Some(memory) => cpu.memory_limit((memory * f64::from(1 << 30)) as u64),
        None => cpu,
    };
    match config.optimizer.precision {
        PrecisionName::F32 => run_on(&cpu, peak, config, setup, comm, task, on_step),
        PrecisionName::Bf16 => run_on(&CpuBf16::on(cpu), peak, config, setup, comm, task, on_step),
    }
}

fn run_on<D: Device>(
    device: &D,
    peak_flops_per_second: f64,
    config: &TrainConfig,
    setup: &Setup,
    comm: Box<dyn Comm>,
    task: &RankTask,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<RunEnd, Failure> {
    let checkpoints = checkpoints(config, setup)?;
    // Held to the end of the run: a second job in the directory is refused.
    let _claim = checkpoints.as_ref().map(|checkpoints| checkpoints.claim(&*comm)).transpose()?;
    let saved = match (&checkpoints, task.is_resumed) {
        (Some(checkpoints), true) => checkpoints.latest(&*comm)?,
        _ => None,
    };
    let is_closed = Arc::new(AtomicBool::new(false));
    let stop = stop_check(task.signals.clone(), is_closed.clone());
    let saves = Saves { checkpoints: checkpoints.clone(), saved: saved.as_ref() };
    let mut rank = start(device, peak_flops_per_second, config, setup, comm, task, saves, stop)?;
    let earlier = match checkpoints.as_ref().filter(|_| !task.is_resumed) {
        Some(checkpoints) => checkpoints.set_aside(rank.comm())?,
        None => None,
    };
    if let Some(earlier) = &earlier {
        tracing::warn!(directory = %earlier.display(), "states of an earlier run are kept apart");
    }
    if rank.comm().rank() == 0
        && let Some(recorder) = setup.correction_recorder(config, rank.steps(), earlier.as_deref())?
    {
        rank.record_corrections(recorder);
    }
    let stopped = take_steps(&mut rank, config, &is_closed, on_step)?;
    rank.finish_save()?;
    // Ranks end together: one that left early would cut the connections that others still use.
    rank.comm()
        .barrier(StepContext::step(rank.steps(), "end the run"))
        .map_err(dflop_executor::Error::from)?;
    let steps = rank.steps();
    rank.finish()?;
    Ok(RunEnd { stopped, steps, checkpoint: checkpoints.map(|checkpoints| checkpoints.of_step(steps)) })
}

/// Takes the steps of the run, and starts to save its states, the last one in any case. Returns why it stopped
/// early, if it did.
fn take_steps<D: Device>(
    rank: &mut TrainingRank<D>,
    config: &TrainConfig,
    is_closed: &AtomicBool,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<Option<StopReason>, Failure> {
    // Without an interval only the last step is saved.
    let every = config.checkpoint.every.unwrap_or(u64::MAX);
    let mut saved_at = None;
    let until = config.until.unwrap_or(config.steps);
    let mut stopped = None;
    while rank.steps() < until && stopped.is_none() {
        let step = rank.steps();
        let Some(report) = rank.step().map_err(|error| Failure::from(error).in_step(step))? else { break };
        match on_step(&report) {
            // The other ranks learn of it at the end of the next step.
            Err(Failure::Closed) => is_closed.store(true, Ordering::Relaxed),
            printed => printed?,
        }
        stopped = rank.stop_reason().filter(|_| rank.steps() < until);
        if rank.steps().is_multiple_of(every) {
            rank.save()?;
            saved_at = Some(rank.steps());
        }
    }
    if saved_at != Some(rank.steps()) {
        rank.save()?;
    }
    Ok(stopped)
}

/// Returns the check whether this rank wants the run to stop: for a signal, or because its output is closed.
fn stop_check(signals: Option<Arc<StopSignals>>, is_closed: Arc<AtomicBool>) -> StopCheck {
    Box::new(move || match signals.as_ref().and_then(|signals| signals.received()) {
        Some(signal) if signal == Signal::INT => Some(StopReason::Interrupt),
        Some(_) => Some(StopReason::Terminate),
        None => is_closed.load(Ordering::Relaxed).then_some(StopReason::OutputClosed),
    })
}

/// Checkpoints of a run.
struct Saves<'a> {
    /// Directory to save in.
    checkpoints: Option<CheckpointDirectory>,
    /// State to resume from.
    saved: Option<&'a SavedCheckpoint>,
}

/// Builds all parts of a rank, together with the other ranks.
fn start<D: Device>(
    device: &D,
    peak_flops_per_second: f64,
    config: &TrainConfig,
    setup: &Setup,
    comm: Box<dyn Comm>,
    task: &RankTask,
    Saves { checkpoints, saved }: Saves<'_>,
    stop: StopCheck,
) -> Result<TrainingRank<D>, Failure> {
    let rank = comm.rank();
    let place = setup.job.placement(rank)?;
    let state = saved.map(|saved| serde_json::from_value::<LoaderState>(saved.run().loader.clone()));
    let state =
        state.transpose().map_err(|error| Failure::Failed(format!("state of the loader: {error}")))?;
    let planner = setup.planner(config, state)?;
    let correction = setup.corrections(config, &planner, saved)?;
    let feed = InputReader::new(
        device.clone(),
        setup.job.clone(),
        place,
        planner,
        setup.preparer(config)?,
        |loader| loader.workers(config.data.workers),
    )?;
    let pretrained = match (saved, config.model.pretrained) {
        (None, true) => Some(Checkpoint::open(&setup.model_directory)?),
        _ => None,
    };
    let seed = Seed(config.seed);
    // A saved state has precedence over pretrained weights.
    let source: &dyn WeightSource = match (saved, &pretrained) {
        (Some(saved), _) => saved.weights(),
        (None, Some(weights)) => weights,
        (None, None) => &seed,
    };
    let activations =
        if config.model.recompute_layers { Activations::Recomputed } else { Activations::Stored };
    let mut pipeline =
        join_job(comm, &setup.job, device, setup.frozen, activations, source)?.check_plans(true);
    let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
    let mut optimizer = JobOptimizer::new(optimizer_settings(config), pipeline.comm(), stages)?;
    if let Some(saved) = saved {
        optimizer.restore(pipeline.stages_mut(), saved)?;
    }
    let trace = task.trace.as_deref().map(open_trace).transpose()?;
    let options = TrainingRankOptions {
        correction,
        pass_predictor: setup.pass_predictor(config)?,
        peak_flops_per_second,
        trace,
        seed: config.seed,
        layout: setup.layout(),
        checkpoints,
        stop: Some(stop),
    };
    Ok(TrainingRank::new(pipeline, feed, optimizer, options)?)
}

type Trace = TraceWriter<Box<dyn Write + Send>>;

fn open_trace(path: &Path) -> Result<Trace, Failure> {
    let file = File::create(path).map_err(|error| Failure::from(error).in_file(path))?;
    Ok(TraceWriter::new(Box::new(BufWriter::new(file)) as Box<dyn Write + Send>)?)
}

fn checkpoints(config: &TrainConfig, setup: &Setup) -> Result<Option<CheckpointDirectory>, Failure> {
    let Some(directory) = &config.checkpoint.directory else { return Ok(None) };
    let mut checkpoints = CheckpointDirectory::new(directory).kept(config.checkpoint.kept.unwrap_or(2));
    if let Some(runs) = config.checkpoint.kept_earlier {
        checkpoints = checkpoints.kept_earlier(runs);
    }
    for name in ["config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = setup.model_directory.join(name);
        if path.is_file() {
            let bytes = std::fs::read(&path).map_err(|error| Failure::from(error).in_file(&path))?;
            checkpoints = checkpoints.companion(name, bytes);
        }
    }
    Ok(Some(checkpoints))
}

fn optimizer_settings(config: &TrainConfig) -> JobOptimizerSettings {
    let OptimizerTable { learning_rate, warmup_steps, learning_rate_min, betas, .. } = config.optimizer;
    let decay =
        learning_rate_min.map_or(Decay::Constant, |minimum| Decay::Cosine { minimum, steps: config.steps });
    let adamw = AdamWSettings {
        beta1: betas[0],
        beta2: betas[1],
        epsilon: config.optimizer.epsilon,
        weight_decay: config.optimizer.weight_decay,
        precision: match config.optimizer.precision {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Bf16 => Precision::Bf16,
        },
        ..AdamWSettings::default()
    };
    JobOptimizerSettings {
        adamw,
        gradient_norm_max: (config.optimizer.gradient_norm_max != 0.0)
            .then_some(config.optimizer.gradient_norm_max),
        ..JobOptimizerSettings::new(LearningRate { peak: learning_rate, warmup_steps, decay })
    }
}

/// Runs all ranks as threads of this process; `on_step` is called for the steps of rank 0, on this thread.
pub(crate) fn run_threads(
    config: &TrainConfig,
    setup: &Setup,
    task: &RankTask,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<RunEnd, Failure> {
    let world = threads::world(setup.job.world_size(), super::settings(config))
        .map_err(dflop_executor::Error::from)?;
    std::thread::scope(|scope| {
        let (sender, reports) = std::sync::mpsc::channel();
        let ranks: Vec<_> = world
            .into_iter()
            .map(|comm| {
                let sender = (comm.rank() == 0).then(|| sender.clone());
                let trace = task.trace.as_deref().map(|path| part(path, comm.rank()));
                let task = RankTask { trace, ..task.clone() };
                scope.spawn(move || {
                    run(config, setup, Box::new(comm), &task, &mut |report| match &sender {
                        // The receiver is gone only if printing failed, which is reported there.
                        Some(sender) => sender.send(report.clone()).map_err(|_| Failure::Closed),
                        None => Ok(()),
                    })
                })
            })
            .collect();
        // The loop below ends when the last sender is dropped.
        drop(sender);
        let printed = reports.iter().try_for_each(|report| on_step(&report));
        // After a failure to print, this fails the send of rank 0, which ends the run.
        drop(reports);
        let ended: Vec<_> = ranks.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        printed?;
        first_failure(
            ended
                .into_iter()
                .map(|done| done.unwrap_or_else(|_| Err(Failure::Failed("a rank panicked".to_owned())))),
        )
    })
}

/// Returns the end of the run, or the failure of the rank that caused it; other ranks only report that the job
/// is over.
fn first_failure(ended: impl Iterator<Item = Result<RunEnd, Failure>>) -> Result<RunEnd, Failure> {
    let (mut end, mut own, mut others) = (RunEnd::default(), None, None);
    for rank in ended {
        match rank {
            Ok(of_rank) => end = of_rank,
            Err(failure @ Failure::Secondary(_)) => others = others.or(Some(failure)),
            Err(failure) => own = own.or(Some(failure)),
        }
    }
    own.or(others).map_or(Ok(end), Err)
}

/// Returns the timeline file of one rank, next to the joined file.
pub(crate) fn part(path: &Path, rank: usize) -> std::path::PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{rank}"))
}
