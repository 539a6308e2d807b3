//! Separate decoders: grouped queries with shared and copied keys, biases, tied and untied heads, uneven
//! parts.

use dflop_models::Activations;
use serde_json::{Value, json};

use super::job::{Anything, Job};
use crate::claim::{claims, report};
use crate::device::TestBackend;
use crate::parity::fixture::{Fixture, TOLERANCE, difference, norm};
use crate::support::Transport;

claims! {
    any_degree_gives_the_result_of_one_rank,
    logits_loss_and_gradients_match_transformers,
    runs_stages_recomputation_devices_and_transports_give_the_same_bits,
    gradients_of_microbatches_in_flight_add_up,
    a_group_of_one_rank_changes_no_bit,
}

/// 4 query heads on 2 key heads, biases on these, a tied head; neither 22 nor 50 is divisible by 4.
fn qwen2() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": true})
}

/// Heads wider than the model width share, biases everywhere, an untied head.
fn llama(kv_heads: usize) -> Value {
    json!({"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 8, "vocab_size": 49,
        "attention_bias": true, "mlp_bias": true})
}

/// Normalized query and key heads, whose weights each rank has.
fn qwen3(kv_heads: usize) -> Value {
    let mut config = llama(kv_heads);
    config["model_type"] = json!("qwen3");
    config
}

/// Experts, and shared experts with a gate, with widths that 4 does not divide.
fn qwen2_moe() -> Value {
    json!({"model_type": "qwen2_moe", "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 10})
}

/// Latent attention, whose latent rows each rank has, and experts in groups.
fn deepseek_v3() -> Value {
    json!({"model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50, "n_routed_experts": 4,
        "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 6,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": null, "kv_lora_rank": 6,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 5})
}

/// Layers with and without rotation, experts that read weighted inputs, and a shared expert.
fn llama4() -> Value {
    json!({"model_type": "llama4_text", "hidden_size": 16, "intermediate_size": 6,
        "intermediate_size_mlp": 22, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0],
        "attention_chunk_size": 8, "floor_scale": 4})
}

fn models() -> [(&'static str, Value); 9] {
    [
        ("weighted inputs of experts", llama4()),
        ("experts", qwen2_moe()),
        ("latent attention", deepseek_v3()),
        ("qwen2", qwen2()),
        ("llama with keys of its own", llama(4)),
        ("llama with two of keys", llama(2)),
        ("llama with one of keys", llama(1)),
        ("qwen3 with two of keys", qwen3(2)),
        ("qwen3 with one of keys", qwen3(1)),
    ]
}

fn any_degree_gives_the_result_of_one_rank<B: TestBackend>() {
    for (name, config) in models() {
        let job = Job::new(&config, "llama", &Anything);
        let whole = job.run::<B>();
        for ranks in [2, 4] {
            let worst = Job { ranks, ..job }.run::<B>().compare(&whole, &format!("{name}, {ranks} ranks"));
            report!("{name}, {ranks} ranks: {worst:.1e}");
        }
    }
}

fn logits_loss_and_gradients_match_transformers<B: TestBackend>() {
    for name in ["qwen2", "llama", "qwen3", "qwen2_moe", "deepseek_v3", "llama4_text", "glm4_moe"] {
        let fixture = Fixture::open(name);
        for ranks in [2, 4] {
            let found = Job { ranks, ..Job::new(&fixture.config, name, &fixture.weights) }.run::<B>();
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

fn runs_stages_recomputation_devices_and_transports_give_the_same_bits<B: TestBackend>() {
    let config = llama(2);
    for ranks in [2, 4] {
        let job = Job { ranks, ..Job::new(&config, "llama", &Anything) };
        let stored = job.run::<B>();
        for (what, other) in [
            ("again", job),
            ("two stages", Job { cut: Some(1), ..job }),
            ("recomputed", Job { activations: Activations::Recomputed, ..job }),
            ("one thread for all", Job { is_device_shared: true, ..job }),
            ("TCP", Job { transport: Transport::Tcp, ..job }),
        ] {
            other.run::<B>().assert_same_bits(&stored, what);
        }
    }
}

fn gradients_of_microbatches_in_flight_add_up<B: TestBackend>() {
    let config = qwen2();
    let packed = Job::new(&config, "qwen2", &Anything);
    let whole = packed.run::<B>();
    for ranks in [2, 4] {
        Job { ranks, is_by_sample: true, ..packed }.run::<B>().compare(&whole, &format!("{ranks} ranks"));
    }
}

fn a_group_of_one_rank_changes_no_bit<B: TestBackend>() {
    let config = qwen2();
    let job = Job::new(&config, "qwen2", &Anything);
    Job { is_llm_shared: false, ..job }.run::<B>().assert_same_bits(&job.run::<B>(), "one rank");
}
