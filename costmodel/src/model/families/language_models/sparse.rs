//! Architectures with experts.

use super::architecture::{Architecture, Bias, LatentDefaults};
use super::dense::{LLAMA, MISTRAL, QWEN2};
use super::experts::{ExpertFields, SharedExperts, SparseLayers};
use super::windows::WindowFields;
use crate::model::{AttentionBias, ExpertsDetails, LlmDetails};

/// Known architectures with experts.
///
/// # Source
/// The transformers 5.24.0 configuration classes with these `model_type`s; `kimi_k2` as published, with the
/// `deepseek_v3` fields. Layers that predict further tokens (`num_nextn_predict_layers`) are not counted:
/// transformers does not train them.
pub(super) const ARCHITECTURES: [Architecture; 13] = [
    QWEN3_MOE,
    Architecture {
        name: "qwen3_vl_moe_text",
        ffn: 5632,
        heads: 16,
        kv_heads: Some(16),
        head_dim: Some(128),
        windows: WindowFields::None,
        experts: Some(ExpertFields { count: 60, per_token: 4, ffn: 1408, ..QWEN3_EXPERTS }),
        ..QWEN3_MOE
    },
    Architecture {
        name: "qwen3_omni_moe_text",
        vocab: 3584,
        ffn: 18_944,
        layers: 28,
        heads: 28,
        windows: WindowFields::None,
        ..QWEN3_MOE
    },
    Architecture {
        name: "qwen2_moe",
        hidden: 2048,
        ffn: 5632,
        layers: 24,
        heads: 16,
        kv_heads: Some(16),
        bias: Bias::Field("qkv_bias", true, AttentionBias::Qkv),
        windows: WindowFields::LowerEven { tokens: 4096, end: 28 },
        experts: Some(ExpertFields {
            count: 60,
            per_token: 4,
            ffn: 1408,
            shared: SharedExperts::Width("shared_expert_intermediate_size", 5632),
            details: ExpertsDetails { has_shared_gate: true, ..ExpertsDetails::NONE },
            ..QWEN3_EXPERTS
        }),
        ..QWEN2
    },
    Architecture {
        name: "mixtral",
        windows: WindowFields::All(None),
        experts: Some(ExpertFields {
            count_fields: &["num_local_experts", "num_experts"],
            count: 8,
            per_token_field: "num_experts_per_tok",
            per_token: 2,
            ffn_field: "intermediate_size",
            ffn: 14_336,
            shared: SharedExperts::None,
            layers: SparseLayers::All,
            details: ExpertsDetails::NONE,
        }),
        ..MISTRAL
    },
    DEEPSEEK_V3,
    Architecture { name: "kimi_k2", ..DEEPSEEK_V3 },
    Architecture {
        name: "deepseek_v2",
        vocab: 102_400,
        hidden: 4096,
        ffn: 11_008,
        layers: 32,
        heads: 32,
        reads_mlp_bias: true,
        experts: Some(ExpertFields {
            count_fields: &["n_routed_experts", "num_experts"],
            count: 64,
            per_token: 0,
            ffn: 1407,
            shared: SharedExperts::Count("n_shared_experts", 2),
            layers: SparseLayers::From(0),
            ..DEEPSEEK_EXPERTS
        }),
        ..DEEPSEEK_V3
    },
    Architecture {
        name: "mistral4",
        vocab: 131_072,
        hidden: 4096,
        ffn: 12_288,
        layers: 36,
        heads: 32,
        experts: Some(ExpertFields {
            count: 128,
            per_token: 4,
            layers: SparseLayers::From(0),
            ..DEEPSEEK_EXPERTS
        }),
        latent: Some(LatentDefaults {
            query_rank: 1024,
            kv_rank: 256,
            plain_dim: 64,
            rotated_dim: 64,
            value_dim: 128,
        }),
        ..DEEPSEEK_V3
    },
    GLM4_MOE,
    Architecture {
        name: "glm4v_moe_text",
        vocab: 151_424,
        bias: Bias::Field("attention_bias", true, AttentionBias::Qkv),
        reads_qk_norm: false,
        ..GLM4_MOE
    },
    Architecture {
        name: "gpt_oss",
        vocab: 201_088,
        hidden: 2880,
        ffn: 2880,
        layers: 36,
        heads: 64,
        kv_heads: Some(8),
        head_dim: Some(64),
        bias: Bias::Field("attention_bias", true, AttentionBias::All),
        reads_mlp_bias: false,
        details: LlmDetails { has_sinks: true, ..LlmDetails::NONE },
        windows: WindowFields::ButEach { tokens: 128, period: 2 },
        experts: Some(ExpertFields {
            count_fields: &["num_local_experts", "num_experts"],
            count: 128,
            per_token_field: "num_experts_per_tok",
            per_token: 4,
            ffn_field: "intermediate_size",
            ffn: 2880,
            shared: SharedExperts::None,
            layers: SparseLayers::All,
            details: ExpertsDetails { has_router_bias: true, has_biases: true, ..ExpertsDetails::NONE },
        }),
        ..LLAMA
    },
    LLAMA4,
];

const QWEN3_EXPERTS: ExpertFields = ExpertFields {
    count_fields: &["num_experts", "num_local_experts"],
    count: 128,
    per_token_field: "num_experts_per_tok",
    per_token: 8,
    ffn_field: "moe_intermediate_size",
    ffn: 768,
    shared: SharedExperts::None,
    layers: SparseLayers::Step,
    details: ExpertsDetails::NONE,
};

const QWEN3_MOE: Architecture = Architecture {
    name: "qwen3_moe",
    vocab: 151_936,
    hidden: 2048,
    ffn: 6144,
    layers: 24,
    heads: 32,
    kv_heads: Some(4),
    bias: Bias::Field("attention_bias", false, AttentionBias::All),
    reads_mlp_bias: false,
    details: LlmDetails { has_qk_norm: true, ..LlmDetails::NONE },
    windows: WindowFields::AllIfUsed(4096),
    experts: Some(QWEN3_EXPERTS),
    ..LLAMA
};

const DEEPSEEK_EXPERTS: ExpertFields = ExpertFields {
    count_fields: &["n_routed_experts", "num_local_experts"],
    count: 256,
    per_token_field: "num_experts_per_tok",
    per_token: 8,
    ffn_field: "moe_intermediate_size",
    ffn: 2048,
    shared: SharedExperts::Count("n_shared_experts", 1),
    layers: SparseLayers::From(3),
    details: ExpertsDetails::NONE,
};

const DEEPSEEK_V3: Architecture = Architecture {
    name: "deepseek_v3",
    vocab: 129_280,
    hidden: 7168,
    ffn: 18_432,
    layers: 61,
    heads: 128,
    reads_mlp_bias: false,
    experts: Some(DEEPSEEK_EXPERTS),
    latent: Some(LatentDefaults {
        query_rank: 1536,
        kv_rank: 512,
        plain_dim: 128,
        rotated_dim: 64,
        value_dim: 128,
    }),
    ..LLAMA
};

const GLM4_MOE: Architecture = Architecture {
    name: "glm4_moe",
    vocab: 151_552,
    ffn: 10_944,
    layers: 46,
    heads: 96,
    kv_heads: Some(8),
    bias: Bias::Field("attention_bias", false, AttentionBias::Qkv),
    reads_mlp_bias: false,
    reads_qk_norm: true,
    experts: Some(ExpertFields { count: 128, ffn: 1408, layers: SparseLayers::From(1), ..DEEPSEEK_EXPERTS }),
    ..LLAMA
};

const LLAMA4: Architecture = Architecture {
    name: "llama4_text",
    vocab: 202_048,
    hidden: 5120,
    ffn_field: "intermediate_size_mlp",
    ffn: 16_384,
    layers: 48,
    heads: 40,
    kv_heads: Some(8),
    head_dim: Some(128),
    reads_mlp_bias: false,
    // Query and key norms have no parameters here.
    windows: WindowFields::Chunks(8192),
    experts: Some(ExpertFields {
        count_fields: &["num_local_experts", "num_experts"],
        count: 16,
        per_token_field: "num_experts_per_tok",
        per_token: 1,
        ffn_field: "intermediate_size",
        ffn: 8192,
        shared: SharedExperts::One,
        layers: SparseLayers::Interleaved,
        details: ExpertsDetails::NONE,
    }),
    ..LLAMA
};
