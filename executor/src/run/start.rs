//! Builds the rank parts: inputs, stages, optimizer, checkpoints, trace.

use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use dflop_loader::LoaderState;
use dflop_loader::files::open_own;
use dflop_loader::store::file;

use super::config::{OptimizerTable, PrecisionName, RunConfig};
use super::setup::Setup;
use crate::checkpoint::{CheckpointDirectory, SavedCheckpoint, open_weights};
use crate::device::{Device, DeviceComm};
use crate::inputs::InputReader;
use crate::models::weights::{Seed, WeightSource};
use crate::models::{Activations, Stage};
use crate::optimizer::{AdamWSettings, Decay, JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use crate::pipeline::PipelineRank;
use crate::train::{
    Evaluation, StartPart, StartTimes, StopCheck, TraceWriter, TrainingRank, TrainingRankOptions,
    build_stages_to_join,
};
use crate::{Error, Result};

/// What a rank starts from, in addition to configuration and task.
pub(super) struct Origin<'a> {
    /// FLOP/s for large matrix products on this rank.
    pub(super) peak_flops_per_second: f64,
    /// Directory to save in.
    pub(super) checkpoints: Option<CheckpointDirectory>,
    /// State to resume from.
    pub(super) saved: Option<&'a SavedCheckpoint>,
    /// Check whether the run should stop.
    pub(super) stop: StopCheck,
    /// Times of the start up to now.
    pub(super) times: StartTimes,
}

/// Builds all parts on a rank, together with the other ranks.
pub(super) fn start<D: Device>(
    device: &D,
    setup: &Setup,
    comm: Arc<dyn DeviceComm<D>>,
    trace: Option<&Path>,
    Origin { peak_flops_per_second, checkpoints, saved, stop, mut times }: Origin<'_>,
) -> Result<TrainingRank<D>> {
    let config = &setup.config;
    let rank = comm.host().rank();
    let roles = setup.job.roles(rank)?;
    let state = saved.map(|saved| serde_json::from_value::<LoaderState>(saved.run().loader.clone()));
    let state = state.transpose().map_err(|error| Error::Start(format!("state of the loader: {error}")))?;
    let planner = setup.planner(state)?;
    let correction = setup.corrections(&planner, saved)?;
    times.end(StartPart::Index);
    let shared = setup.loader_settings()?;
    let preparer = setup.preparer()?;
    let feed = InputReader::new(device.clone(), setup.job.clone(), roles, planner, &preparer, |loader| {
        config.read.apply_to_steps(loader.settings(shared.clone()))
    })?;
    times.end(StartPart::Inputs);
    let pretrained = match (saved, config.model.pretrained) {
        (None, true) => Some(open_weights(setup.model_directory())?),
        _ => None,
    };
    let seed = Seed(config.seed);
    // A saved state has precedence over pretrained weights.
    let source: &dyn WeightSource = match (saved, &pretrained) {
        (Some(saved), _) => saved.weights(),
        (None, Some(weights)) => weights,
        (None, None) => &seed,
    };
    let activations = |module| {
        let every = config.recomputed(module).and_then(|every| NonZeroUsize::try_from(every).ok());
        every.map_or(Activations::Stored, Activations::RecomputedEvery)
    };
    let stages = build_stages_to_join(&*comm, &setup.job, device, setup.frozen, &activations, source)?;
    times.end_on(StartPart::Weights, device, &*comm);
    let (pipeline, optimizer) = join(comm, setup, stages, saved, &mut times)?;
    let trace = trace.map(open_trace).transpose()?;
    let options = TrainingRankOptions {
        correction,
        pass_predictor: setup.pass_predictor()?,
        peak_flops_per_second,
        trace,
        seed: config.seed,
        layout: setup.layout(),
        checkpoints,
        stop: Some(stop),
        until: Some(setup.end_step()),
    };
    let mut rank = TrainingRank::new(pipeline, feed, optimizer, options)?;
    if let Some(evaluation) = evaluation(device, setup, rank.comm().rank())? {
        rank.evaluate(evaluation);
    }
    rank.record_start(times);
    Ok(rank)
}

/// Prepares the evaluations on a rank; `None` if the run has none.
fn evaluation<D: Device>(device: &D, setup: &Setup, rank: usize) -> Result<Option<Evaluation<D>>> {
    let (Some(table), Some(planner)) = (&setup.config.evaluation, setup.evaluation_planner()?) else {
        return Ok(None);
    };
    let (device, job, roles) = (device.clone(), setup.job.clone(), setup.job.roles(rank)?);
    let (read, shared) = (setup.config.read.clone(), setup.loader_settings()?);
    // A last, short step may have no target token.
    let preparer = setup.preparer()?.require_targets(false);
    let inputs = move || {
        let (job, roles, planner) = (job.clone(), roles.clone(), planner.clone());
        InputReader::new(device.clone(), job, roles, planner, &preparer, |loader| {
            read.apply_to_steps(loader.settings(shared.clone()))
        })
    };
    Ok(Some(Evaluation { every: table.every, batches: table.batches, inputs: Box::new(inputs) }))
}

/// Joins the pipeline of the job, and creates or restores the optimizer.
fn join<D: Device>(
    comm: Arc<dyn DeviceComm<D>>,
    setup: &Setup,
    stages: Vec<Box<dyn Stage<D>>>,
    saved: Option<&SavedCheckpoint>,
    times: &mut StartTimes,
) -> Result<(PipelineRank<D>, JobOptimizer<D>)> {
    let config = &setup.config;
    let mut pipeline = PipelineRank::over(comm, setup.job.clone(), stages)?.check_plans(true);
    let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
    let mut optimizer = JobOptimizer::new(optimizer_settings(config), pipeline.comm(), stages)?;
    optimizer = optimizer.parameter_rates(setup.groups.rates.clone()).exchange_over(pipeline.tensors());
    if config.optimizer.zero_stage == 1 {
        optimizer = optimizer.shard_states(pipeline.replicas());
        pipeline = pipeline.shard_gradients();
    }
    times.end_on(StartPart::Ranks, pipeline.device(), &*pipeline.tensors());
    if let Some(saved) = saved {
        optimizer.restore(pipeline.stages_mut(), saved)?;
        times.end(StartPart::Weights);
    }
    Ok((pipeline, optimizer))
}

type Trace = TraceWriter<Box<dyn Write + Send>>;

fn open_trace(path: &Path) -> Result<Trace> {
    let file = open_own(path).and_then(|file| file.set_len(0).map(|()| file));
    let file = file.map_err(|error| Error::from(error).in_file(path))?;
    TraceWriter::new(Box::new(BufWriter::new(file)) as Box<dyn Write + Send>)
}

/// Returns the checkpoint directory, with the model files that are copied into each checkpoint.
pub(super) fn checkpoints(setup: &Setup) -> Result<Option<CheckpointDirectory>> {
    let config = &setup.config;
    let Some(directory) = &config.checkpoint.directory else { return Ok(None) };
    let mut checkpoints = CheckpointDirectory::new(directory).kept(config.checkpoint.kept.unwrap_or(2));
    if let Some(runs) = config.checkpoint.kept_earlier {
        checkpoints = checkpoints.kept_earlier(runs);
    }
    for name in ["config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = setup.model_directory().join(name);
        if path.is_file() {
            let bytes = file::read(&path).map_err(|error| Error::from(error).in_file(&path))?;
            checkpoints = checkpoints.companion(name, bytes);
        }
    }
    Ok(Some(checkpoints))
}

/// Returns the optimizer settings.
pub(super) fn optimizer_settings(config: &RunConfig) -> JobOptimizerSettings {
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
        skip_nonfinite: config.optimizer.skip_nonfinite,
        ..JobOptimizerSettings::new(LearningRate { peak: learning_rate, warmup_steps, decay })
    }
}
