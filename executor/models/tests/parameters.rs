//! Compares parameter counts for complete models with the cost model count, which is itself compared with
//! PyTorch.

use dflop_costmodel::ModelSpec;
use dflop_costmodel::config::Documents;
use dflop_device::Cpu;
use dflop_models::ModelConfig;
use serde_json::{Value, json};

/// Published configurations, reduced to the fields that affect parameters; in old and new formats.
fn published() -> [(&'static str, Value, u64); 5] {
    let qwen2 = json!({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064});
    let qwen_vl = |kind: &str, vision: Value| {
        let mut config = qwen2.clone();
        config["model_type"] = kind.into();
        config["rope_scaling"] = json!({"type": "mrope", "mrope_section": [16, 24, 24]});
        config["vision_config"] = vision;
        config
    };
    let tower = json!({"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384,
        "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14,
        "vision_use_head": false});
    let llava = json!({"model_type": "llava_onevision", "vision_config": tower, "text_config": qwen2,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"});
    let llama = json!({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0});
    let vision = json!({"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 3584, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]});
    let old_vision =
        json!({"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14});
    [
        ("Llama 3 8B", llama, 8_030_261_248),
        ("Qwen2.5 7B", qwen2.clone(), 7_615_616_512),
        ("Qwen2.5-VL 7B", qwen_vl("qwen2_5_vl", vision), 8_292_166_656),
        ("Qwen2-VL 7B", qwen_vl("qwen2_vl", old_vision), 8_291_375_616),
        // without the norm after the encoder, which is unused
        ("LLaVA-OneVision 7B", llava, 8_030_348_832 - 2 * 1152),
    ]
}

#[test]
fn published_models_have_the_published_number_of_parameters() {
    for (name, config, parameters) in published() {
        let model = ModelConfig::from_config(&config).unwrap();
        let specs = model.parameters::<Cpu>().unwrap();
        assert_eq!(specs.iter().map(|spec| spec.elements() as u64).sum::<u64>(), parameters, "{name}");
    }
}

#[test]
fn recorded_models_have_the_parameters_that_the_cost_model_counts() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor");
    for (name, unread) in [
        ("llama", 0),
        ("internvl", 0),
        ("qwen2_5_vl", 0),
        ("qwen3_vl", 0),
        ("llava_onevision", 2 * 12),
        ("qwen2_audio", 0),
    ] {
        let text = std::fs::read(golden.join(name).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&text).unwrap();
        let specs = ModelConfig::from_config(&config).unwrap().parameters::<Cpu>().unwrap();
        let counted: u64 = specs.iter().map(|spec| spec.elements() as u64).sum();
        let documents = Documents { config, ..Documents::default() };
        let truth = ModelSpec::from_hugging_face(name, &documents).unwrap().parameters();
        assert_eq!(counted + unread, truth, "{name}");
    }
}
