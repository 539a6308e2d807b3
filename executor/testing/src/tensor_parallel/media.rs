//! Multimodal models: ranks share the encoder, the LLM, or both.

use std::sync::Arc;

use dflop_device::Runtime;
use dflop_models::encoder::FrozenEncoder;
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, Stage, StageBlocks, StageOptions, TensorParallel,
};
use serde_json::Value;

use super::job::{Anything, Job, gradients};
use crate::claim::{claims, report};
use crate::device::TestBackend;
use crate::parity::fixture::{Fixture, TOLERANCE, difference, norm};
use crate::parity::{encoder_context, fixture_encoder};
use crate::support::{Transport, patient, run};

claims! {
    logits_loss_and_gradients_match_transformers,
    encoder_and_llm_on_the_same_ranks_give_the_result_of_one_rank,
    frozen_parts_of_ranks_have_no_gradient_and_change_no_other,
    separate_encoders_match_transformers,
}

/// Number of ranks, whether they share the encoder, whether they share the LLM.
type Sharing = (usize, bool, bool);

/// Recorded models; three models have encoders with three heads and MLPs that are not divisible by three.
const RECORDED: [(&str, &[Sharing]); 6] = [
    ("llava_onevision", &[(3, true, false), (2, false, true), (4, false, true)]),
    ("internvl", &[(3, true, false), (4, false, true)]),
    ("qwen2_vl", &[(2, true, true)]),
    ("qwen2_5_vl", &[(2, true, true)]),
    ("qwen3_vl", &[(2, true, true)]),
    ("qwen2_audio", &[(3, true, false), (4, false, true)]),
];

fn logits_loss_and_gradients_match_transformers<B: TestBackend>() {
    for (name, sharings) in RECORDED {
        let fixture = Fixture::open(name);
        let job = Job::new(&fixture.config, name, &fixture.weights);
        for &(ranks, is_encoder_shared, is_llm_shared) in sharings {
            let found = Job { ranks, is_encoder_shared, is_llm_shared, ..job }.run::<B>();
            let truth = fixture.floats("logits");
            let of_logits = difference(&found.logits, &truth) / norm(&truth);
            let of_loss = (found.loss - fixture.loss()).abs() / fixture.loss();
            assert!(of_logits < TOLERANCE && of_loss < TOLERANCE, "{name}: {of_logits}, {of_loss}");
            let of_gradients = fixture.compare_gradients(&found.gradients);
            report!(
                "{name}, {ranks} ranks: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}"
            );
        }
    }
}

/// Returns recorded configurations with four encoder heads; tiles, patches and windows are unchanged.
fn with_four_heads(name: &'static str) -> Value {
    let mut config = Fixture::open(name).config;
    match name {
        "qwen2_audio" => {
            config["audio_config"]["d_model"] = 16.into();
            config["audio_config"]["encoder_attention_heads"] = 4.into();
        }
        "qwen2_5_vl" => config["vision_config"]["num_heads"] = 4.into(),
        _ => {
            config["vision_config"]["hidden_size"] = 16.into();
            config["vision_config"]["num_attention_heads"] = 4.into();
        }
    }
    config
}

fn encoder_and_llm_on_the_same_ranks_give_the_result_of_one_rank<B: TestBackend>() {
    for (name, degrees) in
        [("llava_onevision", &[2, 4][..]), ("internvl", &[2, 4]), ("qwen2_5_vl", &[2]), ("qwen2_audio", &[4])]
    {
        let config = with_four_heads(name);
        let job = Job::new(&config, name, &Anything);
        let whole = job.run::<B>();
        for &ranks in degrees {
            let shared = Job { ranks, ..job };
            let found = shared.run::<B>();
            let worst = found.compare(&whole, &format!("{name}, {ranks} ranks"));
            report!("{name}, {ranks} ranks: {worst:.1e}");
            let recomputed = Job { activations: Activations::Recomputed, ..shared }.run::<B>();
            recomputed.assert_same_bits(&found, name);
        }
    }
}

/// Trained parts have the same gradients as when everything is trained.
fn frozen_parts_of_ranks_have_no_gradient_and_change_no_other<B: TestBackend>() {
    for name in ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"] {
        let fixture = Fixture::open(name);
        let job = Job { ranks: 2, ..Job::new(&fixture.config, name, &fixture.weights) };
        let whole = job.run::<B>();
        for (encoder, projector, is_llm_frozen) in
            [(true, false, false), (true, true, false), (true, false, true)]
        {
            let frozen = FrozenModules {
                vision: FrozenEncoder { encoder, projector },
                is_llm_frozen,
                ..FrozenModules::default()
            };
            let found = Job { frozen, ..job }.run::<B>();
            let is_trained = |name: &str| {
                let name = name.trim_start_matches("model.");
                let is_projector = ["visual.merger.", "visual.deepstack_merger_list."];
                match (is_projector.iter().any(|part| name.starts_with(part)), name.starts_with("visual.")) {
                    (true, _) => !projector,
                    (false, true) => !encoder,
                    (false, false) => !is_llm_frozen,
                }
            };
            for (tensor, gradient) in &whole.gradients {
                let expected = is_trained(tensor).then_some(gradient);
                assert_eq!(found.gradients.get(tensor), expected, "{name} {tensor}");
            }
        }
    }
}

/// CLIP and SigLIP: the last hidden state, and gradients from a given output gradient.
fn separate_encoders_match_transformers<B: TestBackend>() {
    for name in ["clip", "siglip"] {
        let fixture = Fixture::open(name);
        let ranks = run(Transport::Threads, 3, patient(), |comm| {
            let (fixture, device) = (Fixture::open(name), B::open(1));
            let config = fixture_encoder(&fixture);
            let mut parts =
                StageBlocks::new(Some(Arc::new(TensorParallel::new(device.clone(), Arc::new(comm)))));
            config.add_to(0..config.layers(), FrozenEncoder::default(), &mut parts).unwrap();
            let options = StageOptions { is_input_trained: false, ..StageOptions::new("tower") };
            let mut stages = [BlockStage::new(device.clone(), options, parts, &fixture.weights).unwrap()];
            let context = Arc::new(encoder_context(&fixture, &config, &device));
            let BlockOutput::Rows(hidden) = stages[0].forward(0, context, None).unwrap() else {
                unreachable!("an encoder has no loss")
            };
            stages[0].backward(0, Some(device.upload(&fixture.floats("gradient")).unwrap())).unwrap();
            (device.download(&hidden).unwrap(), gradients(&mut stages).1)
        });
        let truth = fixture.floats("hidden");
        for (hidden, _) in &ranks {
            assert_eq!(hidden, &ranks[0].0);
        }
        let of_hidden = difference(&ranks[0].0, &truth) / norm(&truth);
        assert!(of_hidden < TOLERANCE, "{name}: {of_hidden}");
        let of_gradients = fixture.compare_gradients(&ranks[0].1);
        report!("{name}: hidden state {of_hidden:.1e}, gradients {of_gradients:.1e}");
    }
}
