//! Models that the cost model knows but the executor does not run are rejected by name, never read as another
//! model.

use dflop_models::encoder::EncoderConfig;
use dflop_models::{Error, ModelConfig};
use serde_json::{Value, json};

fn refusal<T>(result: dflop_models::Result<T>) -> String {
    match result {
        Err(error @ (Error::ModelConfig { .. } | Error::CostModel(_))) => error.to_string(),
        Err(error) => panic!("another kind of error: {error}"),
        Ok(_) => panic!("not refused"),
    }
}

fn decoder(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 48})
}

#[test]
fn language_models_of_other_architectures_are_refused() {
    let problem = refusal(ModelConfig::from_config(&decoder("internlm2")));
    assert!(problem.contains("`model_type` = \"internlm2\" is not supported"), "{problem}");
    assert!(problem.contains("known are llama, qwen2"), "{problem}");
}

#[test]
fn multimodal_models_on_other_decoders_are_refused() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor");
    for whole in ["internvl", "llava_onevision", "qwen2_audio"] {
        let text = std::fs::read(golden.join(whole).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config["text_config"] = decoder("internlm2");
        let problem = refusal(ModelConfig::from_config(&config));
        let expected = "`text_config.model_type` = \"internlm2\" is not supported";
        assert!(problem.contains(expected), "{whole}: {problem}");
    }
}

#[test]
fn separate_encoders_in_other_formats_are_refused() {
    let whisper =
        json!({"model_type": "whisper", "d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 3});
    for (model_type, mut config) in [("whisper", whisper.clone()), ("qwen2_audio_encoder", whisper)] {
        config["model_type"] = model_type.into();
        let expected = format!("`model_type` = \"{model_type}\" is not supported, known are ");
        assert!(refusal(EncoderConfig::audio(&config)).contains(&expected));
        assert!(refusal(ModelConfig::from_config(&config)).contains(&expected));
        assert!(EncoderConfig::vision(&config).unwrap().is_none());
    }
    for model_type in ["clip", "siglip", "internvl_chat"] {
        let problem = refusal(EncoderConfig::vision(&json!({"model_type": model_type})));
        assert!(problem.contains(&format!("`model_type` = \"{model_type}\" is not supported")), "{problem}");
    }
    let tower = json!({"model_type": "siglip_vision_model", "hidden_size": 12, "num_attention_heads": 3,
        "num_hidden_layers": 1, "intermediate_size": 20, "image_size": 12, "patch_size": 4});
    assert!(EncoderConfig::vision(&tower).unwrap().is_some());
    let problem = refusal(ModelConfig::from_config(&tower));
    assert_eq!(problem, "`config.json`: `model_type` = \"siglip_vision_model\" is not a language model");
}

#[test]
fn a_rotated_part_of_a_head_is_above_nothing_and_even() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor");
    let text = std::fs::read(golden.join("glm4_moe/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (part, problem) in [
        (json!(0.0), "`rope_parameters.partial_rotary_factor` must be a number above 0, found 0.0"),
        (json!(1.5), "`rope_parameters.partial_rotary_factor` = 1.5 must be at most 1"),
        (json!(0.4), "must give heads an even width to rotate, found 3"),
    ] {
        config["rope_parameters"]["partial_rotary_factor"] = part;
        let found = refusal(ModelConfig::from_config(&config));
        assert!(found.contains(problem), "{found}");
    }
}

#[test]
fn routers_of_other_kinds_are_refused() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor");
    for (model, field, value, part) in [
        ("mixtral", "output_router_logits", json!(true), "adds a loss that balances experts"),
        ("mixtral", "router_jitter_noise", json!(0.1), "must be 0"),
        ("gpt_oss", "quantization_config", json!({"quant_method": "mxfp4"}), "cannot be trained"),
        ("deepseek_v3", "n_group", json!(3), "= 3 must divide 8 experts"),
        ("deepseek_v3", "n_group", json!(8), "into groups of 2 or more"),
        ("deepseek_v3", "topk_group", json!(1), "= 1: top-k groups (1 of 4) hold fewer than 3 experts"),
        ("deepseek_v3", "topk_group", json!(5), "= 5 is more than `n_group` = 4"),
        ("deepseek_v3", "scoring_func", json!("softmax"), "= \"softmax\" is not supported"),
        ("deepseek_v3", "topk_method", json!("greedy"), "= \"greedy\" is not supported"),
        ("deepseek_v2", "topk_method", json!("noaux_tc"), "= \"noaux_tc\" is not supported"),
        ("deepseek_v2", "topk_group", json!(4), "= 4 is more than `n_group` = 3"),
        ("llama4_text", "output_router_logits", json!(true), "adds a loss that balances experts"),
        ("llama4_text", "no_rope_layers", json!([1, 0, 1]), "has 3 entries for 2 layers"),
        ("llama4_text", "hidden_act", json!("gelu"), "must be \"silu\""),
    ] {
        let text = std::fs::read(golden.join(model).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        assert!(ModelConfig::from_config(&config).is_ok(), "{model}");
        config[field] = value;
        let problem = refusal(ModelConfig::from_config(&config));
        assert!(problem.contains(&format!("`{field}")) && problem.contains(part), "{problem}");
    }
}
