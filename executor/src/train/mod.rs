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
//! [`Evaluation`] runs forward passes over held-out samples after some steps.
//!
//! The first report also divides the time from the start of the run ([`StartReport`]).
//!
//! [`TraceWriter`] writes measured next to predicted times of every action, [`utilization`] is the MFU of a
//! step.
//!
//! # Source
//! Model FLOPs utilization in [`StepReport`]:
//! Chowdhery et al.: "`PaLM`: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B:
//! FLOPs of forward and backward, with full attention and without recomputation, over time and peak.

mod correction_record;
mod evaluation;
mod pass_predictor;
mod start_times;
mod step_end;
mod step_times;
mod trace;
mod training_rank;

use crate::error::{Error, Result};
use crate::pipeline::{Job, PipelineRank};
use dflop_comm::{Comm, StepContext};
use dflop_costmodel::flops::{Attention, Recomputation};
use dflop_costmodel::{CostModel, SampleShape};
use dflop_device::{Device, DeviceComm, Staged};
use dflop_models::weights::WeightSource;
use dflop_models::{Activations, FrozenModules, ModuleKind, Stage, StageSettings, TensorParallel};
use serde::Serialize;
use std::sync::Arc;

pub use correction_record::{CorrectionRecorder, CorrectionSubject, RecordedCorrections};
pub use evaluation::{Evaluation, EvaluationInputs, EvaluationReport};
pub use pass_predictor::{Forecast, PassPredictor, RecomputedLayers};
pub(crate) use start_times::START_VARIABLE;
pub use start_times::{StartPart, StartPartTime, StartReport, StartTimes};
pub use step_end::StopReason;
pub use step_times::{CorrectionReport, CorrectionSettings, IdleTimes, MeasuredTimes};
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
    build(comm, job, device, frozen, (settings, &|_| settings.activations), source, |at, color, key| {
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
    build_over(comm, job, device, frozen, (settings, &|_| settings.activations), source)
}

/// Settings for all stages, and the activations that the stages of a module keep.
type Settings<'a, D> = (&'a StageSettings<D>, &'a dyn Fn(ModuleKind) -> Activations);

fn build_over<D: Device>(
    comm: &dyn DeviceComm<D>,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    settings: Settings<'_, D>,
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
    (settings, activations): Settings<'_, D>,
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
            let (tensor_parallel, activations) = (tensor_parallel.clone(), activations(module.module));
            let settings = StageSettings { tensor_parallel, activations, ..settings.clone() };
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
    let stages = build_stages_to_join(&*comm, job, device, frozen, &|_| activations, source)?;
    PipelineRank::over(comm, job.clone(), stages)
}

/// Builds this rank's stages for [`PipelineRank::over`]; a failure ends the job on all ranks.
pub(crate) fn build_stages_to_join<D: Device>(
    comm: &dyn DeviceComm<D>,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    activations: &dyn Fn(ModuleKind) -> Activations,
    source: &dyn WeightSource,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    let built = build_over(comm, job, device, frozen, (&StageSettings::default(), activations), source);
    built.inspect_err(|error| {
        // The caller gets the error itself; the failure message is for the other ranks.
        drop(comm.host().abort(StepContext::step(0, "build stages"), &error.to_string()));
    })
}

/// Step measurements; equal on all ranks, except for times and values computed from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Step number, from 0.
    pub step: u64,
    /// Mean loss over the step's target tokens, before the update.
    pub loss: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Learning rate for the update.
    pub learning_rate: f64,
    /// Whether the step updated nothing, because a loss or a gradient is not finite
    /// ([`JobOptimizerSettings::skip_nonfinite`](crate::optimizer::JobOptimizerSettings::skip_nonfinite)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_skipped: bool,
    /// Number of trained samples.
    pub samples: u64,
    /// Number of samples skipped by all ranks.
    #[serde(rename = "dropped_samples")]
    pub skipped_samples: u64,
    /// Number of tokens in trained samples, media included.
    pub tokens: u64,
    /// Time from the previous step's end to this step's end, in seconds.
    pub seconds: f64,
    /// Tokens per second, summed over all ranks.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization: sample model FLOPs divided by `seconds` and the peak FLOP/s summed over all
    /// ranks.
    pub mfu: f64,
    /// Mean device time for passes per rank, in seconds.
    pub pass_seconds: f64,
    /// Fraction of a step that a pipeline stage waits between passes: for messages, or for passes in
    /// different stages. `None` without a pipeline (every rank has all stages).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bubble_fraction: Option<f64>,
    /// Mean time per rank without a pass, by cause.
    #[serde(flatten)]
    pub idle: IdleTimes,
    /// Simulated makespan with predicted pass times, in seconds.
    pub predicted_seconds: f64,
    /// Tokens per microbatch below which launches limit a module, if launches dominate the predicted time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_limit_tokens: Option<u64>,
    /// Simulated makespan with the measured CPU time for each pass, in seconds: the step time if every rank
    /// had a dedicated core and messages were free.
    pub replayed_seconds: f64,
    /// Measured makespan, in seconds: from start to end in the slowest rank's action list.
    pub pipeline_seconds: f64,
    /// Mean time per rank for sends and for gradient and weight collectives, in seconds.
    pub communication_seconds: f64,
    /// Mean time per rank that operations waited for communication and for message-producing passes, in
    /// seconds.
    pub exposed_communication_seconds: f64,
    /// Correction learned from measured times in a step interval, reported at the interval's last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correction: Option<CorrectionReport>,
    /// Evaluation after this step, if it is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<EvaluationReport>,
    /// Time from the start of the run to the end of this step, by part: in the first report of a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartReport>,
}

/// Returns the model training FLOPs for the samples in a microbatch or step, summed over modules.
///
/// # Errors
/// [`Error::Model`] if the model cannot take a medium.
pub fn model_flops(model: &CostModel, samples: &[SampleShape]) -> Result<u128> {
    let modules = model.training_flops(samples, Attention::Full, Recomputation::None)?;
    Ok(modules.into_iter().map(|(_, flops)| flops.total()).fold(0, u128::saturating_add))
}

/// Returns the fraction of peak FLOP/s that was reached.
///
/// - `peak_flops_per_second`: sum over all ranks. For a CPU use the measured rate of large matrix products on
///   the same threads, as no data sheet lists the clock rate under load.
///
/// # Errors
/// [`Error::InvalidSetting`] if time or peak is not above 0.
pub fn utilization(flops: u128, seconds: f64, peak_flops_per_second: f64) -> Result<f64> {
    let rows = [("seconds", seconds), ("peak_flops_per_second", peak_flops_per_second)];
    for (setting, value) in rows {
        if !(value > 0.0 && value.is_finite()) {
            return Err(Error::InvalidSetting { setting, reason: format!("{value} is not above 0") });
        }
    }
    Ok(flops as f64 / (seconds * peak_flops_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::{DeviceRate, ModelSpec};

    fn model() -> CostModel {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        CostModel::new(spec, DeviceRate::preset("a100").unwrap())
    }

    /// The layers take 13,251,280,896,000 FLOPs with causal attention over one sample of 1000 tokens, the LM
    /// head 1,089,994,752,000, as the cost model's tests have them from Python; attention once more: 2 * 28 *
    /// 28 * 128 * 1000².
    #[test]
    fn model_flops_are_three_forwards_with_all_of_attention() {
        let samples = [SampleShape { text_tokens: 1000, target_tokens: 1000, ..SampleShape::default() }];
        let causal = 13_251_280_896_000_u128 + 1_089_994_752_000;
        let pairs = 2 * 28 * 28 * 128 * 1_000_000_u128;
        assert_eq!(model_flops(&model(), &samples).unwrap(), 3 * (causal + pairs));
    }

    #[test]
    fn utilization_is_a_share_of_the_peak() {
        assert_eq!(utilization(50, 2.0, 100.0).unwrap(), 0.25);
        let error = utilization(50, 0.0, 100.0).unwrap_err().to_string();
        assert_eq!(error, "invalid `seconds`: 0 is not above 0");
        assert!(utilization(50, 1.0, f64::NAN).is_err());
    }
}
