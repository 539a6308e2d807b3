//! A tiny language model, with steps written by hand: on a single rank, or with one stage per rank.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_comm::{Comm, Payload, PayloadShape, StepContext};
use dflop_device::{Device, Dtype, Tensor};
use dflop_executor::Result;
use dflop_executor::optimizer::{
    AdamWSettings, Decay, JobOptimizer, JobOptimizerSettings, LearningRate, Precision, UpdateReport,
};
use dflop_models::weights::WeightSource;
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, MicrobatchContext, ModelConfig, ModuleKind, Stage,
    StageRange, TextBatch,
};
use serde_json::{Value, json};

pub(crate) const WIDTH: usize = 16;
pub(crate) const LAYERS: usize = 4;
/// Number of tokens in the microbatches of a step.
pub(crate) const LENGTHS: [usize; 2] = [5, 11];
const TIED: &str = "model.embed_tokens.weight";

pub(crate) fn document() -> Value {
    json!({"model_type": "qwen2", "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": true})
}

pub(crate) fn config() -> ModelConfig {
    ModelConfig::from_config(&document()).unwrap()
}

pub(crate) fn stage<D: Device>(
    device: &D,
    layers: std::ops::Range<usize>,
    source: &dyn WeightSource,
) -> BlockStage<D> {
    let range = StageRange { module: ModuleKind::Llm, layers };
    config().stage(device, &range, FrozenModules::default(), Activations::Stored, source).unwrap()
}

pub(crate) fn settings(precision: Precision) -> JobOptimizerSettings {
    let decay = Decay::Cosine { minimum: 1e-4, steps: 12 };
    JobOptimizerSettings {
        learning_rate: LearningRate { peak: 0.01, warmup_steps: 1, decay },
        adamw: AdamWSettings { precision, ..AdamWSettings::default() },
        gradient_norm_max: Some(0.5),
        skip_nonfinite: 0,
    }
}

/// Returns the number of target tokens in a step.
pub(crate) fn targets() -> u64 {
    LENGTHS.iter().map(|&length| length as u64 - 1).sum()
}

pub(crate) fn context<D: Device>(device: &D, step: u64, microbatch: usize) -> Arc<MicrobatchContext<D>> {
    let length = LENGTHS[microbatch];
    let id = |at: usize| (at * at + 7 * at / 3 + 5 * microbatch + 11 * step as usize) as i64 % 48;
    let input_ids: Vec<i64> = (0..length).map(id).collect();
    let positions: Vec<i64> = (0..length as i64).collect();
    let batch = TextBatch {
        input_ids: &input_ids,
        labels: &input_ids,
        positions: &positions,
        cu_seqlens: &[0, length as i32],
        media_places: &[],
        loss_scale: 1.0 / targets() as f64,
    };
    Arc::new(config().llm.context(device, &batch).unwrap())
}

/// Runs some microbatches in a step on a rank that has all layers; returns the loss sum.
pub(crate) fn run_whole<D: Device>(stage: &mut BlockStage<D>, step: u64, microbatches: &[usize]) -> f64 {
    let mut sum = 0.0;
    for &microbatch in microbatches {
        let context = context(stage.device(), step, microbatch);
        let BlockOutput::Loss(loss) = stage.forward(microbatch, context, None).unwrap() else {
            panic!("all layers")
        };
        sum += stage.read_loss(microbatch, &loss).unwrap();
        stage.backward(microbatch, None).unwrap();
    }
    sum
}

/// Runs a step with a stage per rank, microbatch by microbatch; sums the tied gradient.
pub(crate) fn run_staged<D: Device>(stage: &mut BlockStage<D>, comm: &dyn Comm, step: u64) -> Result<f64> {
    let (device, rank, last) = (stage.device().clone(), comm.rank(), comm.size() - 1);
    let mut sum = 0.0;
    for (microbatch, &length) in LENGTHS.iter().enumerate() {
        let at = StepContext::microbatch(step, microbatch as u32, "rows");
        let shape = PayloadShape::f32(length, WIDTH);
        let receive = |from: usize| -> Result<Tensor<D>> {
            Ok(device.upload(&comm.recv(from, 0, at, shape)?.into_f32().expect("rows are f32"))?)
        };
        let send = |to: usize, rows: &Tensor<D>| -> Result<()> {
            Ok(comm.send(to, 0, at, Payload::f32(shape.rows, shape.cols, device.download(rows)?)?)?)
        };
        let input = if rank > 0 { Some(receive(rank - 1)?) } else { None };
        match stage.forward(microbatch, context(&device, step, microbatch), input)? {
            BlockOutput::Rows(rows) => send(rank + 1, &rows)?,
            BlockOutput::Loss(loss) => sum += stage.read_loss(microbatch, &loss)?,
        }
        let gradient = if rank < last { Some(receive(rank + 1)?) } else { None };
        if let Some(gradient) = stage.backward(microbatch, gradient)?.filter(|_| rank > 0) {
            send(rank - 1, &gradient)?;
        }
    }
    if rank == 0 || rank == last {
        add_tied(stage, comm, if rank == 0 { last } else { 0 }, step)?;
    }
    Ok(sum)
}

fn add_tied<D: Device>(stage: &mut BlockStage<D>, comm: &dyn Comm, peer: usize, step: u64) -> Result<()> {
    if comm.size() == 1 {
        return Ok(());
    }
    let (device, at) = (stage.device().clone(), StepContext::step(step, "tied"));
    let mut all = stage.parameters_mut().trained_mut();
    let (_, _, gradient) = all.find(|(spec, ..)| spec.name == TIED).expect("first and last have it");
    let shape = PayloadShape::f32(1, gradient.len());
    comm.send(peer, 1, at, Payload::f32(1, shape.cols, device.download(gradient)?)?)?;
    let other = device
        .upload_as(Dtype::F32, &comm.recv(peer, 1, at, shape)?.into_f32().expect("gradients are f32"))?;
    Ok(device.add(&other, gradient)?)
}

/// Returns the mean loss in a step over the target tokens, from the sums on all ranks.
pub(crate) fn mean_loss(mut sum: f64, comm: &dyn Comm, step: u64) -> f64 {
    comm.all_reduce(StepContext::step(step, "loss"), std::slice::from_mut(&mut sum).into()).unwrap();
    sum / targets() as f64
}

/// Trains some steps on a rank that has all layers and all microbatches.
pub(crate) fn train_whole<D: Device>(
    stage: &mut BlockStage<D>,
    optimizer: &mut JobOptimizer<D>,
    comm: &dyn Comm,
    steps: usize,
) -> Vec<(f64, UpdateReport)> {
    let mut reports = Vec::new();
    for _ in 0..steps {
        let step = optimizer.steps();
        let loss = mean_loss(run_whole(stage, step, &[0, 1]), comm, step);
        reports.push((loss, optimizer.update([&mut *stage]).unwrap()));
    }
    reports
}

/// Returns weights by name, in bits.
pub(crate) fn weights<D: Device>(stage: &BlockStage<D>) -> BTreeMap<String, Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let of = |values| bits(stage.device().download(values).unwrap());
    stage.parameters().owned().map(|(spec, values)| (spec.name.clone(), of(values))).collect()
}
