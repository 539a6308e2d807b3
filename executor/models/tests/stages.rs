//! Inputs and calls that a stage rejects, and the returned errors.

use std::sync::Arc;

use dflop_device::Cpu;
use dflop_device::prelude::*;
use dflop_models::encoder::{EncoderInput, TiledMedium};
use dflop_models::weights::Seed;
use dflop_models::{
    Activations, BlockStage, Error, FrozenModules, LlmConfig, MicrobatchContext, ModelConfig, ModuleKind,
    Stage, StageRange, TextBatch,
};
use dflop_models::{BlockOutput, encoder::EncoderConfig};
use serde_json::{Value, json};

fn document() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48})
}

fn config() -> ModelConfig {
    ModelConfig::from_config(&document()).unwrap()
}

fn stage(device: &Cpu, layers: std::ops::Range<usize>) -> BlockStage<Cpu> {
    let range = StageRange { module: ModuleKind::Llm, layers };
    config().stage(device, &range, FrozenModules::default(), Activations::Stored, &Seed(1)).unwrap()
}

const IDS: [i64; 5] = [1, 2, 3, 4, 5];

fn batch<'a>() -> TextBatch<'a> {
    TextBatch {
        input_ids: &IDS,
        labels: &IDS,
        positions: &[0, 1, 2, 0, 1],
        cu_seqlens: &[0, 3, 5],
        media_places: &[],
        loss_scale: 1.0,
    }
}

fn context(device: &Cpu, batch: &TextBatch<'_>) -> dflop_models::Result<MicrobatchContext<Cpu>> {
    config().llm.context(device, batch)
}

#[test]
fn mismatched_inputs_are_named() {
    let device = Cpu::new(1).unwrap();
    for (batch, expected) in [
        (TextBatch { labels: &IDS[1..], ..batch() }, "input `labels`: has 4 elements for 5 tokens"),
        (TextBatch { labels: &[1, 48, 1, 1, 1], ..batch() }, "input `labels`: has 48, the vocabulary 48"),
        (
            TextBatch { input_ids: &[1, -1, 1, 1, 1], ..batch() },
            "input `input_ids`: has -1, the vocabulary 48",
        ),
        (
            TextBatch { positions: &[0; 4], ..batch() },
            "input `position_ids`: has 4 elements for 1 axes of 5 tokens",
        ),
        (TextBatch { positions: &[0, 1, 2, 0, -3], ..batch() }, "input `position_ids`: has -3"),
        (TextBatch { cu_seqlens: &[0, 3, 4], ..batch() }, "must ascend from 0 to 5, found [0, 3, 4]"),
        (TextBatch { cu_seqlens: &[0, 4, 3, 5], ..batch() }, "must ascend from 0 to 5"),
        (TextBatch { media_places: &[2, 2], ..batch() }, "position 2 is taken twice"),
        (TextBatch { media_places: &[5], ..batch() }, "position 5 is taken twice or is beyond the tokens"),
    ] {
        let error = context(&device, &batch).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn mismatched_rows_and_calls_out_of_order_are_named() {
    let device = Cpu::new(1).unwrap();
    let mut last = stage(&device, 1..2);
    let good = Arc::new(context(&device, &batch()).unwrap());
    let rows = |len| device.upload(&vec![0.5; len]).ok();
    let error = last.forward(3, Arc::clone(&good), rows(79)).err().unwrap();
    assert!(error.to_string().contains("must have 5 x 16 elements, found 79"), "{error}");
    assert!(last.forward(3, Arc::clone(&good), None).is_err());
    assert_eq!(last.in_flight(), 0);
    last.forward(3, Arc::clone(&good), rows(80)).unwrap();
    let error = last.forward(3, Arc::clone(&good), rows(80)).err().unwrap();
    assert_eq!(error.to_string(), "stage Llm 1..2, microbatch 3: is in flight already");
    assert!(matches!(last.backward(4, None), Err(Error::Order { microbatch: 4, .. })));
    assert!(last.kept_bytes() > 0);
    assert!(last.backward(3, None).unwrap().is_some_and(|gradient| gradient.len() == 80));
    assert_eq!((last.kept_bytes(), last.in_flight()), (0, 0));
    let range = StageRange { module: ModuleKind::Llm, layers: 1..3 };
    let error = config()
        .stage(&device, &range, FrozenModules::default(), Activations::Stored, &Seed(1))
        .err()
        .unwrap();
    assert_eq!(error.to_string(), "`config.json`: `num_hidden_layers` = 2, but layers 1..3 were requested");
}

#[test]
fn a_nan_loss_names_stage_and_microbatch() {
    let device = Cpu::new(1).unwrap();
    let mut last = stage(&device, 1..2);
    let good = Arc::new(context(&device, &batch()).unwrap());
    let mut rows = vec![0.5; 80];
    rows[17] = f32::NAN;
    let BlockOutput::Loss(loss) = last.forward(9, good, device.upload(&rows).ok()).unwrap() else {
        panic!("the last stage has the loss")
    };
    let error = last.read_loss(9, &loss).unwrap_err();
    assert_eq!(error.to_string(), "stage Llm 1..2, microbatch 9: the loss is NaN");
}

/// All tokens ignored, and no tokens at all: no loss, no gradient, no error.
#[test]
fn microbatches_without_targets_change_no_gradient() {
    let device = Cpu::new(2).unwrap();
    for empty in [
        TextBatch { labels: &[-100; 5], ..batch() },
        TextBatch { input_ids: &[], labels: &[], positions: &[], cu_seqlens: &[0], ..batch() },
        TextBatch { input_ids: &[], labels: &[], positions: &[], cu_seqlens: &[0, 0], ..batch() },
    ] {
        let mut whole = stage(&device, 0..2);
        let context = Arc::new(context(&device, &empty).unwrap());
        let BlockOutput::Loss(loss) = whole.forward(0, context, None).unwrap() else { panic!("all layers") };
        assert!(whole.read_loss(0, &loss).unwrap().abs() <= 0.0);
        whole.backward(0, None).unwrap();
        let gradients = whole.parameters().gradients(&device).unwrap();
        assert!(gradients.values().flatten().all(|&value| value == 0.0));
    }
}

#[test]
fn evaluation_saves_nothing_and_has_the_bits_of_training() {
    let device = Cpu::new(2).unwrap();
    let mut whole = stage(&device, 0..2);
    let context = Arc::new(context(&device, &batch()).unwrap());
    let loss = |output| match output {
        BlockOutput::Loss(loss) => device.read(&loss).unwrap()[0],
        BlockOutput::Rows(_) => f64::NAN,
    };
    let evaluated = loss(whole.evaluate(&context, None).unwrap());
    assert_eq!(whole.in_flight(), 0);
    assert_eq!(evaluated.to_bits(), loss(whole.forward(0, context, None).unwrap()).to_bits());
}

/// Layers complete one by one, the last layer first, and complete gradients no longer change.
#[test]
fn gradients_are_complete_when_backward_reports_them() {
    let device = Cpu::new(2).unwrap();
    let mut whole = stage(&device, 0..2);
    let context = Arc::new(context(&device, &batch()).unwrap());
    whole.forward(0, context, None).unwrap();
    let mut complete: Vec<(usize, Vec<Vec<f32>>)> = Vec::new();
    let input = whole.backward_with(0, None, &mut |parameters, first| {
        let from_first = parameters.trained().filter(|(index, ..)| *index >= first);
        complete
            .push((first, from_first.map(|(_, _, gradient)| device.download(gradient).unwrap()).collect()));
        Ok(())
    });
    assert!(input.unwrap().is_none());
    let names: Vec<&str> =
        complete.iter().map(|(first, _)| whole.parameters().specs()[*first].name.as_str()).collect();
    assert_eq!(names, ["model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"]);
    for (first, gradients) in complete {
        let from_first = whole.parameters().trained().filter(|(index, ..)| *index >= first);
        assert!(from_first.map(|(_, _, gradient)| device.download(gradient).unwrap()).eq(gradients));
    }
}

/// The input gradient first, weight gradients later: same bits as both at once.
#[test]
fn a_backward_pass_can_be_split() {
    let device = Cpu::new(2).unwrap();
    let context = Arc::new(context(&device, &batch()).unwrap());
    let run = |is_split: bool| {
        let mut last = stage(&device, 1..2);
        for microbatch in 0..2 {
            let rows: Vec<f32> = (0..80).map(|at| ((at * 7 + microbatch) % 13) as f32 / 6.0 - 1.0).collect();
            last.forward(microbatch, Arc::clone(&context), device.upload(&rows).ok()).unwrap();
        }
        let inputs: Vec<Vec<f32>> = (0..2)
            .map(|microbatch| {
                let input = if is_split {
                    last.backward_input(microbatch, None)
                } else {
                    last.backward(microbatch, None)
                };
                device.download(&input.unwrap().unwrap()).unwrap()
            })
            .collect();
        if is_split {
            assert!(last.kept_bytes() > 0, "rows and gradients are kept for the weights");
            (0..2).for_each(|microbatch| last.backward_weight(microbatch).unwrap());
        }
        assert_eq!((last.kept_bytes(), last.in_flight()), (0, 0));
        let error = last.backward_weight(1).unwrap_err().to_string();
        assert!(error.contains("microbatch 1: has no backward pass of its input"), "{error}");
        (inputs, last.parameters().gradients(&device).unwrap())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn configurations_without_a_counterpart_are_refused_by_field() {
    for (field, value, expected) in [
        ("hidden_act", json!("gelu"), "`hidden_act` must be \"silu\" in a gated MLP"),
        ("hidden_act", json!("relu"), "`hidden_act` = \"relu\" is not a supported activation"),
        ("rms_norm_eps", json!(0), "`rms_norm_eps` must be a number above 0, found 0"),
        ("num_key_value_heads", json!(3), "num_attention_heads"),
        ("model_type", json!("mamba"), "model_type"),
        (
            "model_type",
            json!("internlm2"),
            "`model_type` = \"internlm2\" is not supported, known are llama, qwen2",
        ),
        ("head_dim", json!(5), "must give heads an even width to rotate, found 5"),
    ] {
        let mut document = document();
        document[field] = value;
        let error = LlmConfig::from_config(&document).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn mismatched_media_are_named() {
    let device = Cpu::new(1).unwrap();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor");
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(path.join(name).join("config.json")).unwrap()).unwrap()
    };
    let llava = EncoderConfig::vision(&read("llava_onevision")).unwrap().unwrap();
    let qwen = EncoderConfig::vision(&read("qwen2_5_vl")).unwrap().unwrap();
    let audio = EncoderConfig::audio(&read("qwen2_audio")).unwrap().unwrap();
    let image = |tiles| TiledMedium::Image { height: 24, width: 12, tiles };
    let pixels = vec![0.0; 3 * 12 * 12 * 3];
    for (encoder, medium, expected) in [
        (
            &llava,
            EncoderInput::Tiles { pixels: &pixels, shown: &[image(2)] },
            "`pixel_values`: has 1296 elements for 2",
        ),
        (
            &llava,
            EncoderInput::Tiles { pixels: &pixels[..864], shown: &[image(2)] },
            "tiles for an image of 12 x 24 pixels, found 2",
        ),
        (&llava, EncoderInput::Tiles { pixels: &[], shown: &[image(0)] }, "medium 0 has no tile"),
        (&llava, EncoderInput::Windows { features: &[], frames: &[] }, "`medium`: is of another kind"),
        (&qwen, EncoderInput::Patches { values: &[], grids: &[[1, 3, 2]] }, "image 0 has 3 x 2 patches"),
        (
            &qwen,
            EncoderInput::Patches { values: &[0.0; 24], grids: &[[1, 2, 2]] },
            "`patches`: has 24 elements for 4 x 24",
        ),
        (
            &audio,
            EncoderInput::Windows { features: &[0.0; 7], frames: &[1] },
            "`input_features`: has 7 elements for 1 x 8 x 40",
        ),
        (&audio, EncoderInput::Windows { features: &[0.0; 320], frames: &[41] }, "window 0 has 41 of 40"),
    ] {
        let error = encoder.context(&device, &medium).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn failed_allocations_are_named() {
    let device = Cpu::new(1).unwrap();
    let mut whole = stage(&device, 0..2);
    let context = Arc::new(context(&device, &batch()).unwrap());
    let small = device.clone().memory_limit(device.memory_used_bytes() + 2_000);
    let error = whole.forward(7, context, None).err().unwrap().to_string();
    assert!(error.starts_with("out of memory: could not allocate "), "{error}");
    assert!(error.contains(" bytes for stage Llm 0..2, forward of microbatch 7 ("), "{error}");
    assert_eq!(whole.in_flight(), 0);
    let range = StageRange { module: ModuleKind::Llm, layers: 0..2 };
    let error = config()
        .stage(&small, &range, FrozenModules::default(), Activations::Stored, &Seed(1))
        .err()
        .unwrap();
    assert!(error.to_string().contains(" bytes for tensor `"), "{error}");
}
