//! Measured profiles for tiny models predict the same models' times.

use dflop_costmodel::config::Documents;
use dflop_costmodel::profile::{Part, Phase, Profile};
use dflop_costmodel::{CostModel, ModelSpec, Module, ProfileOptions};
use dflop_device::Cpu;
use dflop_executor::profile::check::{CheckOptions, check};
use dflop_executor::profile::{MeasureOptions, MeasuredModel, MeasuredProfile, gemm_peak_flops, measure};
use serde_json::{Value, json};

fn text() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48})
}

/// Returns one model per modality.
fn documents() -> [(&'static str, Value); 4] {
    let tower = |kind: &str| {
        json!({"model_type": kind, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 16, "patch_size": 4, "vision_use_head": false})
    };
    let native = json!({"depth": 3, "fullatt_block_indexes": [1], "hidden_size": 16, "intermediate_size": 20,
        "num_heads": 2, "out_hidden_size": 16, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 112});
    let whisper = json!({"model_type": "qwen2_audio_encoder", "d_model": 12, "encoder_layers": 2,
        "encoder_attention_heads": 3, "encoder_ffn_dim": 20, "num_mel_bins": 8});
    [
        (
            "internvl",
            json!({"model_type": "internvl", "downsample_ratio": 0.5, "text_config": text(),
            "vision_config": tower("internvl_vision")}),
        ),
        (
            "llava_onevision",
            json!({"model_type": "llava_onevision", "text_config": text(),
            "vision_config": tower("siglip_vision_model"), "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]}),
        ),
        ("qwen2_5_vl", json!({"model_type": "qwen2_5_vl", "text_config": text(), "vision_config": native})),
        ("qwen2_audio", json!({"model_type": "qwen2_audio", "text_config": text(), "audio_config": whisper})),
    ]
}

fn model(name: &str, config: Value) -> MeasuredModel {
    let documents = Documents { config, ..Documents::default() };
    let spec =
        ModelSpec::from_hugging_face(name, &documents).unwrap_or_else(|error| panic!("{name}: {error}"));
    MeasuredModel::from_config(&documents.config, spec).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Measures with a budget that is spent immediately.
fn measured(model: &MeasuredModel, device: &Cpu, layers: Option<usize>) -> MeasuredProfile {
    let options = MeasureOptions { tokens_max: 128, seconds_max: 1e-9, layers, ..MeasureOptions::default() };
    measure(model, device, &options, |_| ()).unwrap()
}

fn predictor(model: &MeasuredModel, profile: &MeasuredProfile) -> CostModel {
    let text = profile.file.to_csv();
    let read = Profile::parse([("measured.csv", text.as_str())]).unwrap();
    assert_eq!(read.files()[0].measurements, profile.file.measurements);
    CostModel::from_profile(model.spec.clone(), &read, ProfileOptions::default()).unwrap()
}

#[test]
fn every_kind_of_model_is_measured_predicted_and_run() {
    let device = Cpu::new(1).unwrap();
    for (name, config) in documents() {
        let model = model(name, config);
        let profile = measured(&model, &device, None);
        let predictor = predictor(&model, &profile);
        assert_eq!(predictor.modules(), model.modules(), "{name}");
        let options = CheckOptions { microbatches: 6, repeats: 1, tokens_max: 1600, seed: 3 };
        let report = check(&model, &predictor, &device, &options, |_| ()).unwrap();
        assert_eq!(report.modules.len(), 2, "{name}: an encoder and the LLM have run");
        for row in &report.microbatches {
            assert!(row.predicted_ns > 0 && row.measured_ns > 0 && row.runs_ns.len() == 1, "{name}: {row:?}");
            assert_eq!(row.corrected_ns.is_some(), row.microbatch >= 3, "{name}");
        }
        for module in &report.modules {
            assert!(module.errors.count >= module.second_half.count);
            assert_eq!(module.second_half.count, module.corrected.count);
            assert!(module.p95_bound >= 0.12 && module.errors.p95 >= module.errors.p50);
        }
    }
}

#[test]
fn a_time_that_is_too_short_for_every_module_is_said() {
    let (name, config) = documents()[0].clone();
    let model = model(name, config);
    let lines = |seconds_max| {
        let options =
            MeasureOptions { tokens_max: 512, seconds_max, repeats: 1, ..MeasureOptions::default() };
        let mut lines = Vec::new();
        let say = |line: &str| lines.push(line.to_owned());
        let profile = measure(&model, &Cpu::new(1).unwrap(), &options, say).unwrap();
        let largest = profile.modules.iter().map(|module| module.tokens).collect::<Vec<_>>();
        (lines, largest)
    };
    let (short, few) = lines(1e-9);
    let over = short.last().expect("lines");
    assert!(over.starts_with("took ") && over.contains("s, not 0.0 s: weights, the two smallest"), "{over}");
    assert!(short.iter().any(|line| line.contains("as the time is over")), "{short:?}");
    let (long, many) = lines(1e6);
    assert!(!long.iter().any(|line| line.contains("took ") || line.contains("is over")), "{long:?}");
    assert!(few.iter().zip(&many).all(|(few, many)| few < many), "{few:?} {many:?}");
}

#[test]
fn a_spent_budget_leaves_the_smallest_shapes_and_says_that_nothing_is_known_between() {
    let (name, config) = documents()[0].clone();
    let model = model(name, config);
    let device = Cpu::new(1).unwrap();
    let profile = measured(&model, &device, None);
    for report in &profile.modules {
        assert_eq!((report.rounds, report.error_max()), (0, None));
        assert!(report.whole.open > 0 && report.flops > 0.0);
    }
    let points = profile.file.measurements.iter().map(|row| row.setting);
    let has = |module, part, phase| {
        points.clone().any(|setting| (setting.module, setting.part, setting.phase) == (module, part, phase))
    };
    for module in [Module::Vision, Module::Llm] {
        for part in [Part::Linear, Part::Attention, Part::OutsideLayers] {
            assert!(
                has(module, part, Phase::Forward) && has(module, part, Phase::Backward),
                "{module} {part}"
            );
        }
        assert!(
            has(module, Part::Linear, Phase::Optimizer) && has(module, Part::OutsideLayers, Phase::Optimizer)
        );
        assert_eq!(has(module, Part::Head, Phase::Forward), module == Module::Llm);
    }
}

#[test]
fn few_layers_stand_for_all_in_proportion() {
    let (name, config) = documents()[0].clone();
    let model = model(name, config);
    let profile = measured(&model, &Cpu::new(2).unwrap(), Some(1));
    assert!(profile.modules.iter().all(|report| report.layers == 1));
    let predictor = predictor(&model, &profile);
    assert!(!predictor.profile_warnings().is_empty(), "warns that times are scaled from fewer layers");
}

#[test]
fn products_reach_something() {
    assert!(gemm_peak_flops(&Cpu::new(1).unwrap(), 1).unwrap() > 1e6);
}
