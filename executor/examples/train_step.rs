//! Times training steps for a small language model: forward, backward, optimizer.
//!
//! ```sh
//! cargo run --release -p dflop-executor --example train_step -- THREADS STEPS
//! ```
//!
//! 2 layers, width 128, 4 heads, MLP 512, vocabulary 256; 8 samples with 128 tokens, packed. Prints the
//! losses in the first and the last step, and steps per second: the best of five runs.
#![allow(clippy::print_stdout, reason = "this is a program")]

use std::sync::Arc;
use std::time::Instant;

use dflop_comm::{Settings, threads};
use dflop_device::Cpu;
use dflop_device::prelude::*;
use dflop_executor::Result;
use dflop_executor::optimizer::{
    AdamWSettings, DecayedParameters, JobOptimizer, JobOptimizerSettings, LearningRate,
};
use dflop_models::weights::Seed;
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange,
    TextBatch,
};

const SAMPLES: usize = 8;
const TOKENS: usize = 128;
const VOCABULARY: i64 = 256;
const REPEATS: usize = 5;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (threads, steps) = (number(2), number(40));
    let config = ModelConfig::from_config(&serde_json::json!({
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    }))?;
    let device = Cpu::new(threads)?;
    let (mut best, mut parameters) = (f64::INFINITY, 0);
    for _ in 0..REPEATS {
        let range = StageRange { module: ModuleKind::Llm, layers: 0..config.layers(ModuleKind::Llm) };
        let mut stage =
            config.stage(&device, &range, FrozenModules::default(), Activations::Stored, &Seed(1))?;
        let (first, last, seconds) = device.run(|| run(&config, &device, &mut stage, steps))?;
        best = best.min(seconds / steps as f64);
        parameters = stage.parameters().owned().map(|(spec, _)| spec.elements()).sum();
        println!("loss {first:.5} to {last:.5}, {:.1} steps/s", steps as f64 / seconds);
    }
    println!("{threads} threads, {parameters} parameters: {:.1} steps/s at best", 1.0 / best);
    Ok(())
}

/// Returns the losses in the first and the last step, and the time in seconds; the first step is not timed.
fn run(
    config: &ModelConfig,
    device: &Cpu,
    stage: &mut BlockStage<Cpu>,
    steps: usize,
) -> Result<(f64, f64, f64)> {
    let settings = AdamWSettings {
        beta2: 0.999,
        weight_decay: 0.01,
        decayed: DecayedParameters::All,
        ..AdamWSettings::default()
    };
    let settings = JobOptimizerSettings {
        learning_rate: LearningRate::constant(3e-3),
        adamw: settings,
        gradient_norm_max: None,
        skip_nonfinite: 0,
    };
    let comm = threads::world(1, Settings::default())?.remove(0);
    let mut optimizer = JobOptimizer::new(settings, &comm, [&*stage])?;
    let (mut first, mut last) = (f64::NAN, f64::NAN);
    let mut start = Instant::now();
    for step in 0..=steps {
        if step == 1 {
            start = Instant::now();
        }
        last = train_step(config, device, stage)?;
        if step == 0 {
            first = last;
        }
        optimizer.update([&mut *stage])?;
    }
    Ok((first, last, start.elapsed().as_secs_f64()))
}

fn train_step(config: &ModelConfig, device: &Cpu, stage: &mut BlockStage<Cpu>) -> Result<f64> {
    let tokens = SAMPLES * TOKENS;
    let input_ids: Vec<i64> =
        (0..tokens as i64).map(|token| (token * token + 7 * token / 3) % VOCABULARY).collect();
    let positions: Vec<i64> = (0..SAMPLES).flat_map(|_| 0..TOKENS as i64).collect();
    let cu_seqlens: Vec<i32> = (0..=SAMPLES).map(|sample| (sample * TOKENS) as i32).collect();
    let scale = 1.0 / (tokens - SAMPLES) as f64;
    let batch = TextBatch {
        input_ids: &input_ids,
        labels: &input_ids,
        positions: &positions,
        cu_seqlens: &cu_seqlens,
        media_places: &[],
        loss_scale: scale,
    };
    let context = Arc::new(config.llm.context(device, &batch)?);
    let BlockOutput::Loss(loss) = stage.forward(0, context, None)? else {
        unreachable!("the last stage has the loss")
    };
    stage.backward(0, None)?;
    Ok(stage.read_loss(0, &loss)? * scale)
}
