//! Runs a rank in a job, from joining other ranks to the last step.
//!
//! Cost model corrections in a run: the source for plans, and the run's record.
//!
//! Step records for a run.

use super::cache_directory::digest;
use super::compute_device;
use super::compute_device::ComputeDevice;
use super::config::{PrecisionName, strategy_name};
use super::options::{CorrectionSource, RunEnd, StopRequest};
use super::setup::Setup;
use super::start::{Origin, checkpoints, start};
use crate::checkpoint::{CheckpointDirectory, SavedCheckpoint};
use crate::comm::{Comm, StepContext};
use crate::device::{Cpu, Device, DeviceComm, Dtype, Staged};
use crate::inputs::{Settings, check_agreement};
use crate::profile::gemm_peak_flops;
use crate::step_record::{FILE_NAME, Heading, Outcome, StepRecorder};
use crate::train::{
    CorrectionRecorder, CorrectionSettings, CorrectionSubject, RecordedCorrections, StartPart, StartTimes,
    StepReport, StopCheck, StopReason, TrainingRank,
};
use crate::{Error, Result};
use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable};
use dflop_costmodel::{FrozenParts, Module};
use dflop_loader::StepPlanner;
use dflop_loader::model::read_profile;
use dflop_loader::store::redact;
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of large matrix products that are timed; the best product determines the peak FLOP rate.
const PEAK_RUNS: usize = 3;

/// Receives a step report; `Break` ends the run after the next step, with the state saved.
pub(super) type OnStep<'a> = dyn FnMut(&StepReport) -> ControlFlow<()> + 'a;

/// Rank task in addition to the setup.
#[derive(Clone)]
pub(super) struct RankTask {
    /// File for this rank's timeline.
    pub(super) trace: Option<PathBuf>,
    /// Requests to stop.
    pub(super) stop: StopRequest,
    /// Times of the start up to now.
    pub(super) start: StartTimes,
    /// Number of this rank on its machine; `None` if all ranks are threads in the same process.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "it chooses the CUDA device"))]
    pub(super) local_rank: Option<usize>,
}

/// Runs a rank; `on_step` is called for every step.
pub(super) fn run(
    setup: &Setup,
    comm: Box<dyn Comm>,
    task: &RankTask,
    on_step: &mut OnStep<'_>,
) -> Result<RunEnd> {
    let comm: Arc<dyn Comm> = Arc::from(comm);
    check_agreement(&*comm, &agreed(setup))?;
    let mut times = task.start.clone();
    times.end(StartPart::Ranks);
    let config = &setup.config;
    let memory_bytes = config.parallel.memory_gib.map(|memory| (memory * f64::from(1 << 30)) as u64);
    let storage = match config.optimizer.precision {
        PrecisionName::F32 => Dtype::F32,
        PrecisionName::Bf16 => Dtype::Bf16,
    };
    match config.parallel.compute_device {
        ComputeDevice::Cpu => {
            let cpu = Cpu::new(config.parallel.threads)?;
            times.end(StartPart::Device);
            let peak = gemm_peak_flops(&cpu, PEAK_RUNS)?;
            times.end(StartPart::Peak);
            let cpu = memory_bytes.into_iter().fold(cpu, Cpu::memory_limit).store(storage)?;
            let comm = Arc::new(Staged::new(cpu.clone(), comm));
            run_on(&cpu, (peak, times), setup, comm, task, on_step)
        }
        #[cfg(feature = "cuda")]
        ComputeDevice::Cuda(ordinal) => {
            let local_rank = task.local_rank.unwrap_or_else(|| comm.rank());
            let device =
                compute_device::open(ordinal, local_rank, storage, memory_bytes, config.parallel.attention)?;
            times.end(StartPart::Device);
            let peak = gemm_peak_flops(&device, PEAK_RUNS)?;
            times.end(StartPart::Peak);
            let comm = compute_device::connect(&device, comm, config.parallel.transport)?;
            run_on(&device, (peak, times), setup, comm, task, on_step)
        }
        #[cfg(not(feature = "cuda"))]
        ComputeDevice::Cuda(_) => Err(compute_device::unsupported()),
    }
}

/// Returns the settings that all ranks must share, with digests for the files that each rank reads.
fn agreed(setup: &Setup) -> Settings {
    let mut settings = setup.config.agreed();
    setup.options.add_agreed(&mut settings);
    settings.extend(setup.file_digests());
    settings
}

fn run_on<D: Device>(
    device: &D,
    (peak_flops_per_second, mut times): (f64, StartTimes),
    setup: &Setup,
    comm: Arc<dyn DeviceComm<D>>,
    task: &RankTask,
    on_step: &mut OnStep<'_>,
) -> Result<RunEnd> {
    times.end_on(StartPart::Communicators, device, &*comm);
    let checkpoints = checkpoints(setup)?;
    // Held to the end of the run: a second job in the directory is rejected.
    let _claim = checkpoints.as_ref().map(|checkpoints| checkpoints.claim(comm.host())).transpose()?;
    let saved = match (&checkpoints, setup.options.resume) {
        (Some(checkpoints), true) => checkpoints.latest(comm.host())?,
        _ => None,
    };
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = stop_check(Arc::clone(&task.stop), is_stopped.clone());
    times.end(StartPart::Other);
    let saved = saved.as_ref();
    let origin = Origin { peak_flops_per_second, checkpoints: checkpoints.clone(), saved, stop, times };
    let mut rank = start(device, setup, comm, task.trace.as_deref(), origin)?;
    let mut record = open_records(&mut rank, setup, checkpoints.as_ref())?;
    let mut on_step = |report: &StepReport| {
        if let Some(record) = &mut record {
            record.step(report);
        }
        on_step(report)
    };
    let ended = take_steps(&mut rank, setup, &is_stopped, &mut on_step).and_then(|stopped| {
        let (steps, has_first_rank) = (rank.steps(), rank.comm().rank() == 0);
        end_run(rank)?;
        let checkpoint = checkpoints.map(|checkpoints| checkpoints.for_step(steps));
        Ok(RunEnd { stopped, steps, checkpoint, has_first_rank })
    });
    if let Some(mut record) = record {
        end_record(&mut record, &ended);
    }
    ended
}

/// Moves the states from an earlier run aside, unless this run resumes them, and opens the records on rank 0.
fn open_records<D: Device>(
    rank: &mut TrainingRank<D>,
    setup: &Setup,
    checkpoints: Option<&CheckpointDirectory>,
) -> Result<Option<crate::step_record::StepRecorder>> {
    let earlier = match checkpoints.filter(|_| !setup.options.resume) {
        Some(checkpoints) => checkpoints.set_aside(rank.comm())?,
        None => None,
    };
    if let Some(earlier) = &earlier {
        tracing::warn!(directory = %earlier.display(), "states of an earlier run are kept apart");
    }
    if rank.comm().rank() > 0 {
        return Ok(None);
    }
    if let Some(recorder) = setup.correction_recorder(rank.steps(), earlier.as_deref())? {
        rank.record_corrections(recorder);
    }
    setup.step_recorder(rank.steps(), earlier.as_deref())
}

/// Ends a rank after its last step, together with the other ranks: a rank that left early would cut
/// connections that are still in use.
fn end_run<D: Device>(mut rank: TrainingRank<D>) -> Result<()> {
    rank.end_inputs();
    rank.finish_save()?;
    rank.comm().barrier(StepContext::step(rank.steps(), "end the run"))?;
    rank.finish()
}

/// Runs the steps and starts state saves, for the last state in any case. Returns why the run stopped early,
/// if it did.
fn take_steps<D: Device>(
    rank: &mut TrainingRank<D>,
    setup: &Setup,
    is_stopped: &AtomicBool,
    on_step: &mut OnStep<'_>,
) -> Result<Option<StopReason>> {
    // Without an interval only the last step is saved.
    let every = setup.config.checkpoint.every.unwrap_or(u64::MAX);
    let mut saved_at = None;
    let mut stopped = None;
    while rank.steps() < setup.end_step() && stopped.is_none() {
        let step = rank.steps();
        let Some(report) = rank.step().map_err(|error| error.in_step(step))? else { break };
        if on_step(&report).is_break() {
            // The other ranks learn about it at the end of the next step.
            is_stopped.store(true, Ordering::Relaxed);
        }
        stopped = rank.stop_reason().filter(|_| rank.steps() < setup.end_step());
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

/// Returns the check whether this rank requests a stop: for a stop request, or because nobody receives step
/// reports any more.
fn stop_check(stop: StopRequest, is_stopped: Arc<AtomicBool>) -> StopCheck {
    Box::new(move || {
        stop().or_else(|| is_stopped.load(Ordering::Relaxed).then_some(StopReason::OutputClosed))
    })
}

/// Returns a rank's timeline file, `.NAME.RANK` next to the joined file.
#[must_use]
pub fn rank_trace(path: &Path, rank: usize) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{rank}"))
}

impl Setup {
    /// Opens the file that rank 0 records steps in, from a step on; `None` if there is none.
    ///
    /// - `earlier`: directory that the earlier run's states were moved into; the record follows them
    pub(super) fn step_recorder(&self, step: u64, earlier: Option<&Path>) -> Result<Option<StepRecorder>> {
        let (config, named) = (&self.config, &self.options.record);
        let default = config.checkpoint.directory.as_ref().map(|directory| directory.join(FILE_NAME));
        let Some(path) = named.as_ref().or(default.as_ref()) else { return Ok(None) };
        if let (Some(earlier), None) = (earlier.filter(|_| path.exists()), named) {
            std::fs::rename(path, earlier.join(FILE_NAME))?;
        }
        let ranks = self.job.world_size();
        let about = vec![
            format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" }),
            self.job.schedule().to_string(),
            format!("{} microbatches", config.parallel.microbatches),
            strategy_name(config.parallel.strategy).to_owned(),
            format!("{} samples a step", config.data.global_batch_size),
        ];
        let end = self.end_step();
        // A model that the configuration contains is in a directory whose name does not identify the model.
        let inline = config.model.config.as_ref().and_then(|config| config["model_type"].as_str());
        let title = inline.unwrap_or(&self.spec.name).to_owned();
        let heading = Heading::new(title, step, Some(end), about);
        let opened = match named {
            Some(_) => StepRecorder::open(path, &heading),
            None => StepRecorder::open_own(path, &heading),
        };
        Ok(Some(opened.map_err(|error| Error::from(error).in_file(path))?))
    }
}

/// Records how the run ended.
pub(super) fn end_record(record: &mut StepRecorder, ended: &Result<RunEnd>) {
    match ended {
        Ok(RunEnd { stopped: None, .. }) => record.end(Outcome::Completed, ""),
        Ok(RunEnd { stopped: Some(reason), .. }) => record.end(Outcome::Stopped, &reason.to_string()),
        Err(error) => record.end(Outcome::Failed, &redact(&error.message())),
    }
}

/// Record name in the saved-state directory.
const RECORD_FILE: &str = "corrections.jsonl";

impl Setup {
    /// Reads the tables to replay; none if plans do not use a record.
    ///
    /// # Errors
    /// [`Error::CorrectionRecord`](crate::Error::CorrectionRecord) if the record cannot be read, is
    /// malformed, belongs to another run or is too short.
    pub(super) fn recorded_corrections(&self) -> Result<Vec<CorrectionTable>> {
        let Some(CorrectionSource::Record(path)) = &self.options.corrections else { return Ok(Vec::new()) };
        let record = RecordedCorrections::read(path)?;
        record.check(&self.correction_subject()?, self.end_step())?;
        Ok(record.tables().to_vec())
    }

    /// Prepares the planner for the corrections that plans use, and returns the settings for learning
    /// corrections in this run; `None` if the run learns none.
    pub(super) fn corrections(
        &self,
        planner: &StepPlanner,
        saved: Option<&SavedCheckpoint>,
    ) -> Result<Option<CorrectionSettings>> {
        let table = &self.config.correction;
        if let Some(CorrectionSource::Record(_)) = self.options.corrections {
            for table in self.recorded_corrections()? {
                planner.correct(table)?;
            }
            return Ok(None);
        }
        if !table.enabled {
            return Ok(None);
        }
        let restored = saved.map_or_else(Vec::new, |saved| saved.run().corrections.clone());
        let is_applied = self.options.corrections == Some(CorrectionSource::Measured);
        for table in restored.iter().filter(|_| is_applied) {
            planner.correct(table.clone())?;
        }
        let options = CorrectionOptions {
            interval_steps: table.interval_steps,
            tracking_cost: 0.0,
            ..CorrectionOptions::default()
        };
        Ok(Some(CorrectionSettings { options, is_applied, restored }))
    }

    /// Opens the file that rank 0 records learned tables in, from a step on; `None` if there is none.
    ///
    /// - `earlier`: directory that the earlier run's states were moved into; the record follows them
    pub(super) fn correction_recorder(
        &self,
        step: u64,
        earlier: Option<&Path>,
    ) -> Result<Option<CorrectionRecorder>> {
        if !self.config.correction.enabled
            || matches!(self.options.corrections, Some(CorrectionSource::Record(_)))
        {
            return Ok(None);
        }
        let default =
            || self.config.checkpoint.directory.as_ref().map(|directory| directory.join(RECORD_FILE));
        let is_default = self.config.correction.record.is_none();
        // What the user names may be a link.
        let named = self.config.correction.record.clone();
        let named = named.map(|path| std::fs::canonicalize(&path).unwrap_or(path));
        let Some(path) = named.or_else(default) else { return Ok(None) };
        if let Some(earlier) = earlier.filter(|_| is_default && path.exists()) {
            std::fs::rename(&path, earlier.join(RECORD_FILE))?;
        }
        let subject = self.correction_subject()?;
        let recorder = match step {
            0 => CorrectionRecorder::create(&path, &subject, 0)?,
            _ => CorrectionRecorder::resume(&path, &subject, step)?,
        };
        Ok(Some(recorder))
    }

    /// Describes the setup that this run's correction tables belong to.
    fn correction_subject(&self) -> Result<CorrectionSubject> {
        Ok(CorrectionSubject {
            model: self.model_digest(),
            layout: self.layout(),
            predictor: self.predictor_name()?,
        })
    }
}

impl Setup {
    /// Names the predictor for module times: a device preset, or a profile by digest; then the configuration
    /// parts that change the prediction.
    fn predictor_name(&self) -> Result<String> {
        let (config, frozen) = (&self.config, self.groups.parts);
        let rates = match &config.parallel.profile {
            Some(path) => format!("profile {}", digest(format!("{:?}", read_profile(path)?).as_bytes())),
            None => config.parallel.device_preset().to_owned(),
        };
        let recomputed = self.recomputed_layers();
        let is_everywhere = recomputed.len() == self.job.modules().len();
        let recomputed = match recomputed.as_slice() {
            [] => String::new(),
            all if is_everywhere && all.iter().all(|(_, every)| every.get() == 1) => {
                ", layers recomputed".to_owned()
            }
            some => {
                let module = |(module, every): &(Module, NonZeroU32)| format!("{module}:{every}");
                format!(", layers recomputed in {}", some.iter().map(module).collect::<Vec<_>>().join(","))
            }
        };
        let is_frozen = frozen != FrozenParts::default();
        let frozen = if is_frozen { format!(", {frozen} frozen") } else { String::new() };
        Ok(format!("{rates}{recomputed}{frozen}"))
    }
}
