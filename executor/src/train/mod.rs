//! Trains on a rank, step by step: inputs, pipeline, optimizer, plan corrections, report, trace.
//!
//! Builds a rank's stages and joins the job.
//!
//! [`TrainingRank::step`] is called by all ranks together, as are all methods documented so. Reports are
//! equal on all ranks except for times from local clocks; print rank 0's report.
//!
//! Measured times of modules are summed over ranks, and every rank learns the same correction tables from
//! them ([`dflop_costmodel::correction`]), without further messages. The tables are recorded and reported;
//! plans change by them only if [`CorrectionSettings::is_applied`], because they depend on the load of the
//! machine. A [`CorrectionRecorder`] keeps them for a later run, which plans with the same tables at the same
//! steps ([`RecordedCorrections`]) and so has the same plans and bits.
//!
//! At the end of a step the ranks also agree whether to stop, for a signal or a closed output
//! ([`StopReason`]), and how far a checkpoint is that is written meanwhile; it takes no message of its own.
//!
//! The time of a step is divided into passes, the update, and what a device waits for between two steps
//! ([`IdleTimes`]), as far as that is known on the device's own clock.
//!
//! The first report also divides the time from the start of the run ([`StartReport`]).
//!
//! [`TraceWriter`] writes measured next to predicted times of every action, [`utilization`] is the MFU of a
//! step.

mod correction_record;
mod measured_times;
mod pass_predictor;
mod skip_warnings;
mod start_times;
mod step_end;
mod step_report;
mod step_times;
mod trace;
mod training_rank;

use super::error::{Error, Result};
use super::pipeline::{Job, PipelineRank};
use dflop_comm::{Comm, StepContext};
use dflop_device::{Device, DeviceComm, Staged};
use dflop_models::weights::WeightSource;
use dflop_models::{Activations, FrozenModules, Stage, StageSettings, TensorParallel};
use std::sync::Arc;

pub use correction_record::{CorrectionRecorder, CorrectionSubject, RecordedCorrections};
pub use measured_times::{CorrectionReport, CorrectionSettings, MeasuredTimes};
pub use pass_predictor::{Forecast, PassPredictor};
pub(crate) use start_times::START_VARIABLE;
pub use start_times::{StartPart, StartPartTime, StartReport, StartTimes};
pub use step_end::StopReason;
pub use step_report::{StepReport, model_flops, utilization};
pub use step_times::IdleTimes;
pub use trace::{TraceWriter, TracedAction, join_traces};
pub use training_rank::{StopCheck, TrainingRank, TrainingRankOptions};

/// Configuration of a small run on CPU for `dflop train`, TOML.
pub const EXAMPLE_CONFIG: &str = include_str!("../../examples/train-cpu.toml");

/// Builds this rank's stages. Collective: every rank must call it. Tensor-parallel ranks exchange tensors
/// through the host; [`build_stages_over`] accepts any tensor communicator.
///
/// - `settings`: settings for all stages; the ranks that share a stage's layers are set here
///
/// # Errors
/// [`Error::InvalidSetting`] if the number of ranks is not the job's; weight errors; [`Error::Comm`].
pub fn build_stages<D: Device>(
    comm: &dyn Comm,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    settings: &StageSettings<D>,
    source: &dyn WeightSource,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    build(comm, job, device, frozen, settings, source, |at, color, key| {
        let group = comm.split(at, color, key)?;
        Ok(group.map(|group| TensorParallel::new(device.clone(), Arc::from(group))))
    })
}

/// Builds this rank's stages as [`build_stages`] does, over a tensor communicator.
///
/// # Errors
/// As [`build_stages`].
pub fn build_stages_over<D: Device>(
    comm: &dyn DeviceComm<D>,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    settings: &StageSettings<D>,
    source: &dyn WeightSource,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    build(comm.host(), job, device, frozen, settings, source, |at, color, key| {
        Ok(comm.split(at, color, key)?.map(TensorParallel::over))
    })
}

/// Builds this rank's stages, with a function that splits off tensor-parallel groups.
fn build<D: Device>(
    comm: &dyn Comm,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    settings: &StageSettings<D>,
    source: &dyn WeightSource,
    split: impl Fn(StepContext, Option<u64>, u64) -> Result<Option<TensorParallel<D>>>,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    if comm.size() != job.world_size() {
        let problem = format!("expected {} ranks, found {}", job.world_size(), comm.size());
        return Err(Error::InvalidSetting { setting: "world size", reason: problem });
    }
    let (roles, mut stages) = (job.roles(comm.rank())?, Vec::new());
    for module in job.modules() {
        let role = roles.iter().find(|role| role.module == module.module);
        // A split is collective: ranks without the module take part, too, without a color.
        let group = if module.tp_size > 1 {
            let color = role.map(|role| role.pipeline_rank as u64);
            let tp_rank = role.map_or(0, |role| role.tp_rank as u64);
            split(StepContext::step(0, "split for layers"), color, tp_rank)?
        } else {
            None
        };
        let tensor_parallel = group.map(Arc::new);
        for range in role.into_iter().flat_map(|role| job.ranges(role)) {
            let settings = StageSettings { tensor_parallel: tensor_parallel.clone(), ..settings.clone() };
            let stage = job.model().stage_with(device, &range, frozen, settings, source)?;
            stages.push(stage.boxed());
        }
    }
    Ok(stages)
}

/// Builds this rank's stages and joins the job, with tensors moved through the host. Collective: every rank
/// must call it. A failure on any rank ends the job on all ranks.
///
/// # Errors
/// Errors from [`build_stages`] and [`PipelineRank::new`].
pub fn join_job<D: Device>(
    comm: Box<dyn Comm>,
    job: &Arc<Job>,
    device: &D,
    frozen: FrozenModules,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<PipelineRank<D>> {
    let comm = Arc::new(Staged::new(device.clone(), Arc::from(comm)));
    join_job_over(comm, job, device, frozen, activations, source)
}

/// Builds this rank's stages and joins the job as [`join_job`] does, over a tensor communicator.
///
/// # Errors
/// As [`join_job`].
pub fn join_job_over<D: Device>(
    comm: Arc<dyn DeviceComm<D>>,
    job: &Arc<Job>,
    device: &D,
    frozen: FrozenModules,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<PipelineRank<D>> {
    let stages = build_stages_to_join(&*comm, job, device, frozen, activations, source)?;
    PipelineRank::over(comm, job.clone(), stages)
}

/// Builds this rank's stages for [`PipelineRank::over`]; a failure ends the job on all ranks.
pub(crate) fn build_stages_to_join<D: Device>(
    comm: &dyn DeviceComm<D>,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    let settings = StageSettings { activations, ..StageSettings::default() };
    let built = build_stages_over(comm, job, device, frozen, &settings, source);
    built.inspect_err(|error| {
        // The caller gets the error itself; the failure message is for the other ranks.
        drop(comm.host().abort(StepContext::step(0, "build stages"), &error.to_string()));
    })
}
