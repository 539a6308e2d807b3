//! Tests layers that differ, and rejected fields.

use serde_json::{Value, json};

use crate::config::{Documents, PartialModelSpec};
use crate::model::{LayerSet, LlmSpec, Window};

fn read(config: Value) -> Result<LlmSpec, String> {
    let documents = Documents { config, ..Documents::default() };
    let read = PartialModelSpec::from_hugging_face(&documents).map_err(|error| error.to_string())?;
    Ok(read.llm.unwrap())
}

/// Reads a small model of some kind, with further fields.
fn small(model_type: &str, more: &Value) -> Result<LlmSpec, String> {
    let mut config = json!({"model_type": model_type, "num_hidden_layers": 6});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    read(config)
}

fn layers(of: impl IntoIterator<Item = u32>) -> LayerSet {
    of.into_iter().collect()
}

#[test]
fn experts_are_in_the_layers_that_the_fields_name() {
    let kinds = ["dense", "sparse", "sparse", "dense", "sparse", "dense"];
    for (model_type, more, expected) in [
        ("qwen3_moe", json!({}), layers(0..6)),
        ("qwen3_moe", json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]}), layers([1, 5])),
        ("deepseek_v3", json!({}), layers(3..6)),
        ("deepseek_v3", json!({"first_k_dense_replace": 1}), layers(1..6)),
        ("glm4_moe", json!({"head_dim": 128, "mlp_layer_types": kinds}), layers([1, 2, 4])),
        ("llama4_text", json!({"interleave_moe_layer_step": 2}), layers([1, 3, 5])),
        ("llama4_text", json!({"moe_layers": [0, 4]}), layers([0, 4])),
        ("mixtral", json!({}), layers(0..6)),
    ] {
        let spec = small(model_type, &more).unwrap();
        assert_eq!(spec.sparse_layers(), expected, "{model_type} {more}");
    }
    let dense = small("qwen3_moe", &json!({"num_experts": 0})).unwrap();
    assert_eq!(dense.experts, None);
    // Files from transformers 5 have a different name for the number of experts.
    let renamed = small("qwen3_moe", &json!({"num_local_experts": 16})).unwrap();
    assert_eq!(renamed.experts.unwrap().experts, 16);
    let shared =
        small("deepseek_v2", &json!({"num_experts_per_tok": 6, "moe_intermediate_size": 1408})).unwrap();
    assert_eq!(shared.experts.unwrap().shared_ffn, 2 * 1408);
}

#[test]
fn windows_are_in_the_layers_that_the_fields_name() {
    let used = json!({"use_sliding_window": true, "max_window_layers": 4});
    let kinds = ["full_attention", "sliding_attention"].repeat(3);
    for (model_type, more, expected) in [
        ("qwen2", used.clone(), layers(4..6)),
        ("qwen2_moe", used.clone(), layers([0, 2])),
        ("qwen3_moe", used, layers(0..6)),
        ("gemma3_text", json!({"sliding_window_pattern": 3}), layers([0, 1, 3, 4])),
        ("gemma3_text", json!({"layer_types": kinds}), layers([1, 3, 5])),
        ("gpt_oss", json!({}), layers([0, 2, 4])),
        ("mistral", json!({}), layers(0..6)),
        ("llama4_text", json!({}), layers([0, 1, 2, 4, 5])),
        ("llama4_text", json!({"no_rope_layers": [1, 0, 0, 0, 0, 1]}), layers([0, 5])),
    ] {
        let windows = small(model_type, &more).unwrap().windows.unwrap();
        assert_eq!(windows.layers, expected, "{model_type} {more}");
        assert_eq!(windows.kind == Window::Chunk, model_type == "llama4_text");
    }
    for (model_type, more) in [
        ("qwen2", json!({"sliding_window": 32})),
        ("mistral", json!({"sliding_window": null})),
        ("llama4_text", json!({"attention_chunk_size": null})),
    ] {
        assert_eq!(small(model_type, &more).unwrap().windows, None, "{model_type}");
    }
}

#[test]
fn latent_vectors_give_the_widths_of_heads() {
    let spec = small("deepseek_v3", &json!({"q_lora_rank": null, "qk_nope_head_dim": 96})).unwrap();
    let latent = spec.latent.unwrap();
    assert_eq!((latent.query_rank, spec.head_dim, spec.value_dim()), (None, 96 + 64, 128));
    assert_eq!((spec.heads, spec.kv_heads), (128, 128));
}

#[test]
fn fields_that_are_not_modeled_are_refused_by_name() {
    for (model_type, more, message) in [
        ("qwen3_moe", json!({"num_experts": 4}), "`num_experts_per_tok` = 8, but there are 4 experts"),
        ("deepseek_v2", json!({}), "`num_experts_per_tok` is missing"),
        ("deepseek_v3", json!({"moe_layer_freq": 2}), "`moe_layer_freq` must be 1, found 2"),
        ("glm4_moe", json!({"mlp_layer_types": ["dense"]}), "`mlp_layer_types` has 1 entries for 6 layers"),
        (
            "gemma3_text",
            json!({"use_bidirectional_attention": true}),
            "`use_bidirectional_attention` must be",
        ),
        (
            "gemma3_text",
            json!({"layer_types": ["full_attention"]}),
            "`layer_types` has 1 entries for 6 layers",
        ),
        (
            "gpt_oss",
            json!({"layer_types": vec!["linear_attention"; 6]}),
            "`layer_types` has unknown value \"linear_attention\"",
        ),
        (
            "llama",
            json!({"layer_types": vec!["sliding_attention"; 6]}),
            "without a window only `full_attention`",
        ),
        ("llama", json!({"use_sliding_window": true}), "`use_sliding_window` must be false"),
        ("mistral", json!({"layer_types": vec!["full_attention"; 6]}), "must have `sliding_attention` only"),
        ("mixtral", json!({"num_hidden_layers": 300}), "`num_hidden_layers` = 300 must be at most 256"),
        ("qwen3_next", json!({}), "`model_type` = \"qwen3_next\" is unknown"),
    ] {
        let error = small(model_type, &more).unwrap_err();
        assert!(error.contains(message), "{model_type} {more}: {error}");
    }
}
