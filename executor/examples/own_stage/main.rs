//! Trains a user-defined stage in a pipeline with two ranks.
//!
//! ```sh
//! cargo run --release -p dflop-executor --example own_stage
//! ```
//!
//! Rank 0 has a built-in stage: the embedding and two layers of a small language model. Rank 1 has an
//! [`adapter::Adapter`], which implements [`Stage`] in one file: a low-rank adapter before two frozen layers
//! and the LM head. The program trains under 1F1B and ZB-H1, compares the losses bit by bit, and compares
//! gradients in both stages with finite differences of the loss.
#![allow(clippy::print_stdout, reason = "this is a program")]

mod adapter;

use std::sync::Arc;

use adapter::Adapter;
use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::{Comm, Settings, threads};
use dflop_device::prelude::*;
use dflop_device::{Cpu, Tensor};
use dflop_executor::Result;
use dflop_executor::optimizer::{JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{
    Job, MicrobatchPlan, ModuleParallelism, PipelineRank, PipelineStepPlan, RankStep,
};
use dflop_models::weights::{ParameterSpec, Seed, WeightSource};
use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind, Stage, TextBatch};

const MICROBATCHES: usize = 4;
const TOKENS: usize = 12;
const STEPS: u64 = 20;
const ADAPTER_RANK: usize = 4;
/// Weights whose gradients are checked: rank, tensor, element.
const CHECKED: [(usize, &str, usize); 5] = [
    (1, "adapter.2.down.weight", 7),
    (1, "adapter.2.up.weight", 0),
    (1, "adapter.2.up.weight", 45),
    (0, "model.layers.1.mlp.down_proj.weight", 100),
    (0, "model.layers.0.input_layernorm.weight", 3),
];
/// Change of a checked weight.
const STEP_SIZE: f32 = 1.0 / 64.0;
/// Maximum relative gradient error; the forward pass is in `f32`.
const TOLERANCE: f64 = 0.02;

/// Random weights, with an LM head as large as after training: it is frozen, and limits how far the loss
/// falls.
struct Weights;

impl WeightSource for Weights {
    fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
        let factor = if spec.name == "lm_head.weight" { 25.0 } else { 1.0 };
        Ok(Seed(1).values(spec)?.into_iter().map(|value| factor * value).collect())
    }
}

/// Results from a rank.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    /// Gradient and finite difference for every checked weight, if this rank has it.
    checked: Vec<Option<[f64; 2]>>,
}

fn main() -> Result<()> {
    let document = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48});
    let mut all = Vec::new();
    for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble] {
        let model = ModelConfig::from_config(&document)?;
        let layout = ModuleParallelism::even(ModuleKind::Llm, 4, 2);
        let job = Arc::new(Job::new(model, FrozenModules::default(), vec![layout], schedule)?);
        let ranks = threads::world(2, Settings::default())?;
        let ranks: Vec<Trained> = std::thread::scope(|scope| {
            let train = |comm| scope.spawn(|| train(comm, &job));
            let ranks: Vec<_> = ranks.into_iter().map(train).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<_>>()
        })?;
        let losses = &ranks[0].losses;
        println!("{schedule}: loss {:.4} to {:.4} in {} steps", losses[0], losses[STEPS as usize - 1], STEPS);
        all.push(ranks);
    }
    let losses = &all[0][0].losses;
    assert!(losses[STEPS as usize - 1] < 0.5 * losses[0], "the loss falls: {losses:?}");
    assert_eq!(all[0], all[1], "both schedules give the same bits");
    for (index, (rank, tensor, element)) in CHECKED.into_iter().enumerate() {
        let [gradient, difference] = all[0][rank].checked[index].expect("the rank has the weight");
        println!("{tensor}[{element}]: gradient {gradient:+.6}, finite difference {difference:+.6}");
        assert!((gradient - difference).abs() < TOLERANCE * difference.abs(), "{tensor}[{element}]");
    }
    Ok(())
}

/// Trains one rank, then checks gradients.
fn train(comm: threads::ThreadComm, job: &Arc<Job>) -> Result<Trained> {
    let (device, model, rank) = (Cpu::new(1)?, job.model(), comm.rank());
    let stage = |range| -> Result<Box<dyn Stage<Cpu>>> {
        Ok(if rank == 0 {
            model.stage(&device, range, FrozenModules::default(), Activations::Stored, &Weights)?.boxed()
        } else {
            Adapter::new(&device, model, range, ADAPTER_RANK, &Weights)?.boxed()
        })
    };
    let stages = job.ranges(&job.roles(rank)?[0]).iter().map(stage).collect::<Result<_>>()?;
    let mut pipeline = PipelineRank::new(Box::new(comm), Arc::clone(job), stages)?;
    let settings = JobOptimizerSettings::new(LearningRate::constant(0.02));
    let stages = pipeline.stages().map(|(_, stage)| stage);
    let mut optimizer = JobOptimizer::new(settings, pipeline.comm(), stages)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let pending = pipeline.start(&rank_step(job, &device, step)?)?;
        losses.push(optimizer.update_step(&pending, pipeline.stages_mut())?.0.loss);
    }
    let mut checked = Vec::new();
    for (owner, tensor, element) in CHECKED {
        let own = (rank == owner).then_some((tensor, element));
        checked.push(check(&mut pipeline, &device, &rank_step(job, &device, STEPS)?, own)?);
    }
    Ok(Trained { losses, checked })
}

/// Prepares a step: the same short texts every time, one text per microbatch.
fn rank_step(job: &Job, device: &Cpu, step: u64) -> Result<RankStep<Cpu>> {
    let microbatches = vec![MicrobatchPlan { tokens: TOKENS, media: Vec::new() }; MICROBATCHES];
    let targets = (MICROBATCHES * (TOKENS - 1)) as u64;
    let plan = Arc::new(PipelineStepPlan::new(job, step, targets, microbatches)?);
    let context = |microbatch: u32| {
        let ids: Vec<i64> =
            (0..TOKENS as i64).map(|token| (token * token + 7 * i64::from(microbatch)) % 48).collect();
        let positions: Vec<i64> = (0..TOKENS as i64).collect();
        let batch = TextBatch {
            input_ids: &ids,
            labels: &ids,
            positions: &positions,
            cu_seqlens: &[0, TOKENS as i32],
            media_places: &[],
            loss_scale: plan.loss_scale(),
        };
        Ok(((ModuleKind::Llm, microbatch), Arc::new(job.model().llm.context(device, &batch)?)))
    };
    let contexts = (0..MICROBATCHES as u32).map(context).collect::<Result<_>>()?;
    Ok(RankStep { plan, contexts })
}

/// Computes the gradient and the finite difference of a weight, if this rank has it; both ranks call it,
/// because every loss is computed by both.
fn check(
    pipeline: &mut PipelineRank<Cpu>,
    device: &Cpu,
    step: &RankStep<Cpu>,
    own: Option<(&str, usize)>,
) -> Result<Option<[f64; 2]>> {
    pipeline.step(step)?;
    let gradient = match own {
        Some((tensor, element)) => {
            let [_, gradient] = weight_and_gradient(pipeline, tensor);
            f64::from(device.download(gradient)?[element])
        }
        None => 0.0,
    };
    let mut losses = [0.0; 2];
    for (loss, change) in losses.iter_mut().zip([STEP_SIZE, -STEP_SIZE]) {
        add(pipeline, device, own, change)?;
        *loss = pipeline.step(step)?.loss;
        add(pipeline, device, own, -change)?;
    }
    Ok(own.map(|_| [gradient, (losses[0] - losses[1]) / f64::from(2.0 * STEP_SIZE)]))
}

/// Adds a number to a weight that this rank has.
fn add(
    pipeline: &mut PipelineRank<Cpu>,
    device: &Cpu,
    own: Option<(&str, usize)>,
    change: f32,
) -> Result<()> {
    let Some((tensor, element)) = own else { return Ok(()) };
    let [weights, _] = weight_and_gradient(pipeline, tensor);
    let mut values = device.download(weights)?;
    values[element] += change;
    Ok(device.write(&values, weights)?)
}

fn weight_and_gradient<'a>(pipeline: &'a mut PipelineRank<Cpu>, tensor: &str) -> [&'a mut Tensor<Cpu>; 2] {
    let mut trained = pipeline.stages_mut().flat_map(|stage| stage.parameters_mut().trained_mut());
    let (_, weights, gradient) =
        trained.find(|(spec, ..)| spec.name == tensor).expect("the rank has the tensor");
    [weights, gradient]
}
