//! Builds the stages of a rank and joins the job.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pipeline::{Job, PipelineRank};
use dflop_comm::{Comm, StepContext};
use dflop_device::Device;
use dflop_models::weights::WeightSource;
use dflop_models::{Activations, FrozenModules, Stage, StageSettings, TensorParallel};

/// Builds the stages of this rank; all ranks of the job call it together.
///
/// # Errors
/// [`Error::InvalidSetting`] if the number of ranks is not the job's; errors of weights; [`Error::Comm`].
pub fn build_stages<D: Device>(
    comm: &dyn Comm,
    job: &Job,
    device: &D,
    frozen: FrozenModules,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<Vec<Box<dyn Stage<D>>>> {
    if comm.size() != job.world_size() {
        let problem = format!("expected {} ranks, found {}", job.world_size(), comm.size());
        return Err(Error::InvalidSetting { setting: "world size", reason: problem });
    }
    let place = job.placement(comm.rank())?;
    let color = place.pipeline_rank as u64;
    let group = comm.split(StepContext::step(0, "split for layers"), Some(color), place.tp_rank as u64)?;
    // The split above is collective, so it comes first even if the module is not shared.
    let is_shared = job.modules().iter().any(|own| own.module == place.module && own.tp_size > 1);
    let tensor_parallel = group
        .filter(|_| is_shared)
        .map(|group| Arc::new(TensorParallel::new(device.clone(), Arc::from(group))));
    let stage = |range| {
        let settings = StageSettings {
            activations,
            tensor_parallel: tensor_parallel.clone(),
            ..StageSettings::default()
        };
        job.model().stage_with(device, &range, frozen, settings, source).map(Stage::boxed)
    };
    Ok(job.ranges(&place).into_iter().map(stage).collect::<Result<_, _>>()?)
}

/// Builds the stages of this rank and joins the others; all ranks of the job call it together. A failure on
/// one rank ends the job on all.
///
/// # Errors
/// Errors of [`build_stages`] and [`PipelineRank::new`].
pub fn join_job<D: Device>(
    comm: Box<dyn Comm>,
    job: &Arc<Job>,
    device: &D,
    frozen: FrozenModules,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<PipelineRank<D>> {
    match build_stages(&*comm, job, device, frozen, activations, source) {
        Ok(stages) => PipelineRank::new(comm, job.clone(), stages),
        Err(error) => {
            // The caller gets the error itself; the failure message is for the other ranks.
            drop(comm.abort(StepContext::step(0, "build stages"), &error.to_string()));
            Err(error)
        }
    }
}
