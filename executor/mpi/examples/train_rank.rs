//! Rank in a training job over MPI: `mpirun -n 4 train_rank` trains a tiny language model in two stages with
//! two replicas and prints the loss of every step. Without `mpirun`, `train_rank threads` does the same with
//! a thread per rank.

use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::{Comm, Settings, threads};
use dflop_device::Cpu;
use dflop_executor::Result;
use dflop_executor::optimizer::{JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{
    Job, MicrobatchPlan, ModuleParallelism, PipelineRank, PipelineStepPlan, RankStep,
};
use dflop_models::weights::Seed;
use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind, Stage, TextBatch};

const STAGES: usize = 2;
const REPLICAS: usize = 2;
const MICROBATCHES: usize = 8;
const TOKENS: usize = 16;
const STEPS: u64 = 4;

fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() != Some("threads") {
        let comm = dflop_mpi::world(Settings::default())?;
        let is_first = comm.rank() == 0;
        let losses = train(Box::new(comm))?;
        if is_first {
            report(&losses);
        }
        return Ok(());
    }
    let ranks = threads::world(STAGES * REPLICAS, Settings::default())?;
    let losses = std::thread::scope(|scope| {
        let start = |comm| scope.spawn(move || train(Box::new(comm)));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank ran")).collect::<Result<Vec<_>>>()
    })?;
    report(&losses[0]);
    Ok(())
}

/// Trains on one rank and returns the losses.
fn train(comm: Box<dyn Comm>) -> Result<Vec<f64>> {
    let config = serde_json::json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
        "tie_word_embeddings": true});
    let (model, frozen, device) =
        (ModelConfig::from_config(&config)?, FrozenModules::default(), Cpu::new(1)?);
    let layout = ModuleParallelism::even(ModuleKind::Llm, 4, STAGES).dp_size(REPLICAS);
    let job = Arc::new(Job::new(model, frozen, vec![layout], ScheduleKind::OneForwardOneBackward)?);
    let role = job.roles(comm.rank())?.remove(0);
    let stage =
        |range| job.model().stage(&device, range, frozen, Activations::Stored, &Seed(1)).map(Stage::boxed);
    let stages = job.ranges(&role).iter().map(stage).collect::<Result<Vec<_>, _>>()?;
    let mut pipeline = PipelineRank::new(comm, Arc::clone(&job), stages)?.check_plans(true);
    let settings = JobOptimizerSettings::new(LearningRate::constant(1e-2));
    let mut optimizer =
        JobOptimizer::new(settings, pipeline.comm(), pipeline.stages().map(|(_, stage)| stage))?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let microbatches = vec![MicrobatchPlan { tokens: TOKENS, media: Vec::new() }; MICROBATCHES];
        let targets = (MICROBATCHES * (TOKENS - 1)) as u64;
        let plan = Arc::new(PipelineStepPlan::new(&job, step, targets, microbatches)?);
        let own = plan.replica_microbatches(&job, role.module, role.replica);
        let contexts = own.map(|microbatch| {
            let ids: Vec<i64> =
                (0..TOKENS as i64).map(|token| (7 * token + i64::from(microbatch)) % 40).collect();
            let positions: Vec<i64> = (0..TOKENS as i64).collect();
            let batch = TextBatch {
                input_ids: &ids,
                labels: &ids,
                positions: &positions,
                cu_seqlens: &[0, TOKENS as i32],
                media_places: &[],
                loss_scale: plan.loss_scale(),
            };
            let context = Arc::new(job.model().llm.context(&device, &batch)?);
            Ok(((ModuleKind::Llm, microbatch), context))
        });
        let contexts = contexts.collect::<Result<_>>()?;
        losses.push(pipeline.step(&RankStep { plan: Arc::clone(&plan), contexts })?.loss);
        optimizer.update(pipeline.stages_mut())?;
    }
    Ok(losses)
}

#[expect(clippy::print_stdout, reason = "the losses are the output")]
fn report(losses: &[f64]) {
    for (step, loss) in losses.iter().enumerate() {
        println!("step {step}: loss {loss:.12}");
    }
}
