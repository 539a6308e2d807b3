//! Runs one rank of the job, from joining the other ranks to the last step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflop_executor::comm::launch::StopSignals;
use dflop_executor::comm::{Comm, StepContext};
use dflop_executor::device::{Cpu, Device, DeviceComm, Dtype, Staged};
use dflop_executor::inputs::{Settings, check_agreement};
use dflop_executor::profile::gemm_peak_flops;
use dflop_executor::train::{StepReport, StopCheck, StopReason, TrainingRank};
use rustix::process::Signal;

use super::config::{PrecisionName, TrainConfig};
use super::record::end_record;
use super::setup::Setup;
use super::start::{Origin, checkpoints, start};
use crate::args::compute_device::ComputeDevice;
use crate::cuda;
use crate::failure::Failure;

/// Number of large matrix products that are timed; the best gives the peak FLOP rate.
const PEAK_RUNS: usize = 3;

/// Task of a rank in addition to the configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankTask {
    /// Whether to resume from the last saved state.
    pub(crate) is_resumed: bool,
    /// File for this rank's timeline.
    pub(crate) trace: Option<PathBuf>,
    /// Signals that stop the run.
    pub(crate) signals: Option<Arc<StopSignals>>,
    /// Number of this rank on its machine; `None` if all ranks are threads of one process.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "it chooses the CUDA device"))]
    pub(crate) local_rank: Option<usize>,
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
    let comm: Arc<dyn Comm> = Arc::from(comm);
    check_agreement(&*comm, &agreed(config, setup, task))?;
    let memory_bytes = config.parallel.memory_gib.map(|memory| (memory * f64::from(1 << 30)) as u64);
    let storage = match config.optimizer.precision {
        PrecisionName::F32 => Dtype::F32,
        PrecisionName::Bf16 => Dtype::Bf16,
    };
    match config.parallel.compute_device {
        ComputeDevice::Cpu => {
            let cpu = Cpu::new(config.parallel.threads)?;
            let peak = gemm_peak_flops(&cpu, PEAK_RUNS)?;
            let cpu = memory_bytes.into_iter().fold(cpu, Cpu::memory_limit).store(storage)?;
            let comm = Arc::new(Staged::new(cpu.clone(), comm));
            run_on(&cpu, peak, config, setup, comm, task, on_step)
        }
        #[cfg(feature = "cuda")]
        ComputeDevice::Cuda(ordinal) => {
            let local_rank = task.local_rank.unwrap_or_else(|| comm.rank());
            let device = cuda::open(ordinal, local_rank, storage, memory_bytes, config.parallel.attention)?;
            let peak = gemm_peak_flops(&device, PEAK_RUNS)?;
            let comm = cuda::connect(&device, comm, config.parallel.transport)?;
            run_on(&device, peak, config, setup, comm, task, on_step)
        }
        #[cfg(not(feature = "cuda"))]
        ComputeDevice::Cuda(_) => Err(cuda::refuse()),
    }
}

/// Returns the settings that all ranks must share, with digests of the files that each of them reads.
fn agreed(config: &TrainConfig, setup: &Setup, task: &RankTask) -> Settings {
    let mut settings = config.agreed();
    settings.insert("--resume".to_owned(), task.is_resumed.to_string());
    settings.extend(setup.file_digests(config));
    settings
}

fn run_on<D: Device>(
    device: &D,
    peak_flops_per_second: f64,
    config: &TrainConfig,
    setup: &Setup,
    comm: Arc<dyn DeviceComm<D>>,
    task: &RankTask,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<RunEnd, Failure> {
    let checkpoints = checkpoints(config, setup)?;
    // Held to the end of the run: a second job in the directory is refused.
    let _claim = checkpoints.as_ref().map(|checkpoints| checkpoints.claim(comm.host())).transpose()?;
    let saved = match (&checkpoints, task.is_resumed) {
        (Some(checkpoints), true) => checkpoints.latest(comm.host())?,
        _ => None,
    };
    let is_closed = Arc::new(AtomicBool::new(false));
    let stop = stop_check(task.signals.clone(), is_closed.clone());
    let origin =
        Origin { peak_flops_per_second, checkpoints: checkpoints.clone(), saved: saved.as_ref(), stop };
    let mut rank = start(device, config, setup, comm, task, origin)?;
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
    let mut record = match rank.comm().rank() {
        0 => setup.step_recorder(config, rank.steps(), earlier.as_deref())?,
        _ => None,
    };
    let mut on_step = |report: &StepReport| {
        if let Some(record) = &mut record {
            record.step(report);
        }
        on_step(report)
    };
    let ended = take_steps(&mut rank, config, &is_closed, &mut on_step).and_then(|stopped| {
        let steps = rank.steps();
        end_run(rank)?;
        let checkpoint = checkpoints.map(|checkpoints| checkpoints.of_step(steps));
        Ok(RunEnd { stopped, steps, checkpoint })
    });
    if let Some(mut record) = record {
        end_record(&mut record, &ended);
    }
    ended
}

/// Ends a rank after its last step, together with the others: one that left early would cut the connections
/// that others still use.
fn end_run<D: Device>(mut rank: TrainingRank<D>) -> Result<(), Failure> {
    rank.end_inputs();
    rank.finish_save()?;
    rank.comm()
        .barrier(StepContext::step(rank.steps(), "end the run"))
        .map_err(dflop_executor::Error::from)?;
    Ok(rank.finish()?)
}

/// Takes the steps of the run, and starts to save its states, the last one in any case. Returns why it
/// stopped early, if it did.
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

/// Returns the timeline file of one rank, next to the joined file.
pub(crate) fn part(path: &Path, rank: usize) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{rank}"))
}
