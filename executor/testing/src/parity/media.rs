//! Multimodal models: encoder, projector, scatter into packed text, decoder, loss, and the complete backward.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_device::ops::elementwise::Elementwise;
use dflop_device::{Device, Runtime, Tensor};
use dflop_models::encoder::{EncoderConfig, FrozenEncoder};
use dflop_models::{Activations, BlockOutput, BlockStage, LlmConfig, Stage, StageBlocks, StageOptions};

use super::fixture::{Fixture, TOLERANCE, Text, difference, gradients, llm_stage, norm};
use super::{PLACEHOLDERS, encoder_context, fixture_encoder};
use crate::claim::{claims, report};
use crate::device::TestBackend;

claims! {
    logits_loss_and_gradients_match_transformers,
    any_split_any_threads_and_recomputation_give_the_same_bits,
    frozen_parts_have_no_gradient_and_change_no_other_gradient,
    separate_encoders_match_transformers,
    a_microbatch_without_media_needs_no_encoder,
}

const MODELS: [&str; 9] = [
    "llava_onevision",
    "internvl",
    "internvl_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_audio",
    "gemma3",
];

/// Stage cuts and frozen parts of a model.
#[derive(Clone, Copy)]
struct Setting {
    threads: usize,
    /// Number of encoder layers before the first cut.
    encoder_cut: Option<usize>,
    activations: Activations,
    frozen: FrozenEncoder,
    is_llm_frozen: bool,
}

const WHOLE: Setting = Setting {
    threads: 2,
    encoder_cut: None,
    activations: Activations::Stored,
    frozen: FrozenEncoder { encoder: false, projector: false },
    is_llm_frozen: false,
};

fn encoder_stages<D: Device>(
    fixture: &Fixture,
    config: &EncoderConfig,
    device: &D,
    setting: Setting,
) -> Vec<BlockStage<D>> {
    let cuts = match setting.encoder_cut {
        None => vec![0, config.layers()],
        Some(cut) => vec![0, cut, config.layers()],
    };
    let stage = |cut: &[usize]| {
        let mut parts = StageBlocks::default();
        config.add_to(cut[0]..cut[1], setting.frozen, &mut parts).unwrap();
        let options = StageOptions {
            is_input_trained: cut[0] > 0 && !setting.frozen.encoder,
            activations: setting.activations,
            ..StageOptions::new("encoder")
        };
        BlockStage::new(device.clone(), options, parts, &fixture.weights).unwrap()
    };
    cuts.windows(2).map(stage).collect()
}

fn rows<D: Device>(output: BlockOutput<D>) -> Tensor<D> {
    match output {
        BlockOutput::Rows(rows) => rows,
        BlockOutput::Loss(_) => unreachable!("an encoder has no loss"),
    }
}

struct Run {
    logits: Vec<f32>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f32>>,
    kept_bytes: u64,
}

fn run<B: TestBackend>(name: &'static str, setting: Setting) -> Run {
    let (fixture, device) = (Fixture::open(name), B::open(setting.threads));
    let (encoder, llm) = (fixture_encoder(&fixture), LlmConfig::from_config(&fixture.config).unwrap());
    let mut encoders = encoder_stages(&fixture, &encoder, &device, setting);
    let is_media_trained = encoders.last().unwrap().has_backward();
    let mut parts = StageBlocks::default();
    parts.add(setting.is_llm_frozen, |declaration| llm.blocks(0..llm.layers(), declaration)).unwrap();
    let options = StageOptions {
        is_input_trained: is_media_trained,
        activations: setting.activations,
        ..StageOptions::new("llm")
    };
    let mut decoder = BlockStage::new(device.clone(), options, parts, &fixture.weights).unwrap();

    let text = Text::of(&fixture, &PLACEHOLDERS);
    let context = Arc::new(text.context(&llm, &device));
    let medium = Arc::new(encoder_context(&fixture, &encoder, &device));
    let mut media = None;
    for stage in &mut encoders {
        media = Some(rows(stage.forward(0, Arc::clone(&medium), media).unwrap()));
    }
    let again = device.copy(media.as_ref().unwrap()).unwrap();
    let logits = device.download(&decoder.logits(&context, Some(again)).unwrap().unwrap()).unwrap();
    let BlockOutput::Loss(loss) = decoder.forward(0, context, media).unwrap() else {
        panic!("the LLM has a loss")
    };
    let loss = decoder.read_loss(0, &loss).unwrap();
    let kept_bytes = decoder.kept_bytes() + encoders.iter().map(BlockStage::kept_bytes).sum::<u64>();
    let mut gradient = decoder.backward(0, None).unwrap();
    for stage in encoders.iter_mut().rev() {
        gradient = stage.backward(0, gradient).unwrap();
    }
    assert!(gradient.is_none(), "a medium has no gradient");
    decoder.parameters_mut().fold_shared_gradients(&device).unwrap();
    encoders.push(decoder);
    Run { logits, loss: loss * text.loss_scale(), gradients: gradients(&encoders), kept_bytes }
}

fn logits_loss_and_gradients_match_transformers<B: TestBackend>() {
    for name in MODELS {
        let (fixture, found) = (Fixture::open(name), run::<B>(name, WHOLE));
        let truth = fixture.floats("logits");
        let of_logits = difference(&found.logits, &truth) / norm(&truth);
        assert!(of_logits < TOLERANCE, "{name}: logits are off by {of_logits}");
        let of_loss = (found.loss - fixture.loss()).abs() / fixture.loss();
        assert!(of_loss < TOLERANCE, "{name}: {}", found.loss);
        let of_gradients = fixture.compare_gradients(&found.gradients);
        report!("{name}: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
    }
}

fn any_split_any_threads_and_recomputation_give_the_same_bits<B: TestBackend>() {
    for name in MODELS {
        let whole = run::<B>(name, WHOLE);
        for setting in [
            Setting { threads: 1, ..WHOLE },
            Setting { threads: 3, encoder_cut: Some(1), ..WHOLE },
            Setting { activations: Activations::Recomputed, encoder_cut: Some(1), ..WHOLE },
        ] {
            let found = run::<B>(name, setting);
            assert_eq!(found.loss, whole.loss, "{name}");
            assert_eq!(found.gradients, whole.gradients, "{name}");
            let is_smaller = found.kept_bytes < whole.kept_bytes;
            assert_eq!(is_smaller, setting.activations == Activations::Recomputed, "{name}");
        }
    }
}

/// Trained parts have the same gradients as when everything is trained; frozen parts have none, and save
/// nothing.
fn frozen_parts_have_no_gradient_and_change_no_other_gradient<B: TestBackend>() {
    for name in MODELS {
        let whole = run::<B>(name, WHOLE);
        for (encoder, projector, is_llm_frozen) in
            [(true, false, false), (true, true, false), (true, false, true), (false, false, true)]
        {
            let frozen = FrozenEncoder { encoder, projector };
            let found = run::<B>(name, Setting { frozen, is_llm_frozen, encoder_cut: Some(1), ..WHOLE });
            let is_projector = |name: &str| {
                ["multi_modal_projector", "visual.merger", "visual.deepstack_merger_list", "image_newline"]
                    .iter()
                    .any(|part| name.trim_start_matches("model.").starts_with(part))
            };
            let is_llm = |name: &str| {
                let is_encoder = name.starts_with("model.visual.");
                !is_encoder
                    && ["language_model", "model.", "lm_head"].iter().any(|part| name.starts_with(part))
            };
            let is_trained = |name: &str| match (is_llm(name), is_projector(name)) {
                (true, _) => !is_llm_frozen,
                (false, true) => !projector,
                (false, false) => !encoder,
            };
            for (tensor, gradient) in &whole.gradients {
                let expected = is_trained(tensor).then_some(gradient);
                assert_eq!(found.gradients.get(tensor), expected, "{name} {tensor}");
            }
            assert!(found.kept_bytes < whole.kept_bytes || !encoder);
        }
    }
}

/// A separate encoder: the last hidden state, and gradients from a given output gradient.
fn separate_encoders_match_transformers<B: TestBackend>() {
    for name in ["clip", "siglip"] {
        let (fixture, device) = (Fixture::open(name), B::open(2));
        let config = fixture_encoder(&fixture);
        let context = Arc::new(encoder_context(&fixture, &config, &device));
        let mut stages = encoder_stages(&fixture, &config, &device, WHOLE);
        let hidden = device.download(&rows(stages[0].forward(0, context, None).unwrap())).unwrap();
        let truth = fixture.floats("hidden");
        let of_hidden = difference(&hidden, &truth) / norm(&truth);
        assert!(of_hidden < TOLERANCE, "{name}: {of_hidden}");
        let gradient = device.upload(&fixture.floats("gradient")).unwrap();
        stages[0].backward(0, Some(gradient)).unwrap();
        let of_gradients = fixture.compare_gradients(&gradients(&stages));
        report!("{name}: hidden state {of_hidden:.1e}, gradients {of_gradients:.1e}");
    }
}

/// A multimodal decoder on text only.
fn a_microbatch_without_media_needs_no_encoder<B: TestBackend>() {
    for name in MODELS {
        let (fixture, device) = (Fixture::open(name), B::open(2));
        let llm = LlmConfig::from_config(&fixture.config).unwrap();
        let text = Text::of(&fixture, &[]);
        // the second sample in every fixture has no media
        let context = Arc::new(text.context_of_sample(1, &llm, &device));
        let mut stage = llm_stage(&llm, 0..llm.layers(), &device, StageOptions::new("llm"), &fixture.weights);
        let BlockOutput::Loss(loss) = stage.forward(0, context, None).unwrap() else { panic!("all layers") };
        assert!(stage.read_loss(0, &loss).unwrap() > 0.0);
        assert!(stage.backward(0, None).unwrap().is_none());
    }
}
