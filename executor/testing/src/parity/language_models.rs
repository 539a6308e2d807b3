//! Separate decoders: Llama 3 with scaled rotation, Qwen2 with biases and a tied head, Qwen3 with
//! normalized heads, Gemma 3 with windows and norms on both sides, mixtures of experts.

use std::sync::Arc;

use dflop_device::Runtime;
use dflop_models::{Activations, LlmConfig, Stage, StageOptions};

use super::fixture::{Fixture, TOLERANCE, Text, difference, gradients, llm_stage, norm, train};
use crate::claim::{claims, report};
use crate::device::TestBackend;

claims! {
    logits_loss_and_gradients_match_transformers,
    any_split_into_stages_any_threads_and_recomputation_give_the_same_bits,
    packed_samples_give_the_results_of_single_samples,
}

const MODELS: [&str; 12] = [
    "qwen2",
    "llama",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
];

fn options() -> StageOptions {
    StageOptions { is_input_trained: false, ..StageOptions::new("llm") }
}

fn logits_loss_and_gradients_match_transformers<B: TestBackend>() {
    for name in MODELS {
        let (fixture, device) = (Fixture::open(name), B::open(2));
        let config = LlmConfig::from_config(&fixture.config).unwrap();
        let text = Text::of(&fixture, &[]);
        let mut stages = [llm_stage(&config, 0..config.layers(), &device, options(), &fixture.weights)];
        let context = Arc::new(text.context(&config, &device));
        let logits = device.download(&stages[0].logits(&context, None).unwrap().unwrap()).unwrap();
        let truth = fixture.floats("logits");
        let of_logits = difference(&logits, &truth) / norm(&truth);
        assert!(of_logits < TOLERANCE, "{name}: {of_logits}");
        let loss = train(&mut stages, 0, &context) * text.loss_scale();
        let of_loss = (loss - fixture.loss()).abs() / fixture.loss();
        assert!(of_loss < TOLERANCE, "{name}: {loss}");
        stages[0].parameters_mut().fold_shared_gradients(&device).unwrap();
        let of_gradients = fixture.compare_gradients(&gradients(&stages));
        report!("{name}: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
    }
}

/// With two microbatches, whose gradients add up.
fn run<B: TestBackend>(
    name: &'static str,
    cuts: &[usize],
    threads: usize,
    activations: Activations,
) -> (Vec<f64>, Vec<Vec<f32>>) {
    let (fixture, device) = (Fixture::open(name), B::open(threads));
    let config = LlmConfig::from_config(&fixture.config).unwrap();
    let text = Text::of(&fixture, &[]);
    let options = |first: usize| StageOptions {
        is_input_trained: first > 0,
        activations,
        ..StageOptions::new(format!("llm {first}"))
    };
    let stages = cuts
        .windows(2)
        .map(|cut| llm_stage(&config, cut[0]..cut[1], &device, options(cut[0]), &fixture.weights));
    let mut stages: Vec<_> = stages.collect();
    let losses = (0..text.samples()).map(|sample| {
        train(&mut stages, sample, &Arc::new(text.context_of_sample(sample, &config, &device)))
    });
    let losses = losses.collect();
    for stage in &mut stages {
        stage.parameters_mut().fold_shared_gradients(&device).unwrap();
    }
    (losses, gradients(&stages).into_values().collect())
}

fn any_split_into_stages_any_threads_and_recomputation_give_the_same_bits<B: TestBackend>() {
    for name in MODELS {
        let whole = run::<B>(name, &[0, 2], 1, Activations::Stored);
        for (cuts, threads, activations) in [
            (&[0, 2][..], 3, Activations::Stored),
            (&[0, 1, 2], 1, Activations::Stored),
            (&[0, 1, 2], 2, Activations::Stored),
            (&[0, 2], 2, Activations::Recomputed),
            (&[0, 1, 2], 2, Activations::Recomputed),
        ] {
            assert_eq!(run::<B>(name, cuts, threads, activations), whole, "{name} {cuts:?}");
        }
    }
}

fn packed_samples_give_the_results_of_single_samples<B: TestBackend>() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let (losses, _) = run::<B>(name, &[0, 2], 2, Activations::Stored);
        let text = Text::of(&fixture, &[]);
        let loss = losses.iter().sum::<f64>() * text.loss_scale();
        assert!((loss - fixture.loss()).abs() < 1e-5 * loss);
        let device = B::open(2);
        let config = LlmConfig::from_config(&fixture.config).unwrap();
        let mut stages = [llm_stage(&config, 0..2, &device, options(), &fixture.weights)];
        train(&mut stages, 0, &Arc::new(text.context(&config, &device)));
        let packed = gradients(&stages);
        let mut apart = [llm_stage(&config, 0..2, &device, options(), &fixture.weights)];
        for sample in 0..text.samples() {
            train(&mut apart, sample, &Arc::new(text.context_of_sample(sample, &config, &device)));
        }
        let apart = gradients(&apart);
        let largest = packed.values().map(|values| norm(values)).fold(0.0, f64::max);
        for (name, values) in &packed {
            assert!(difference(values, &apart[name]) < 1e-6 * largest, "{name}");
        }
    }
}
