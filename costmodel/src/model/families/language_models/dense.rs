//! Architectures without experts, and published language model sizes.

use super::architecture::{Architecture, Bias};
use super::windows::WindowFields;
use crate::model::{AttentionBias, ExpertsDetails, ExpertsSpec, LayerSet, LlmDetails, LlmSpec};

/// Known architectures without experts.
///
/// # Source
/// The transformers 5.24.0 configuration classes with these `model_type`s; `InternLM2Config` as published
/// with it.
pub(super) const ARCHITECTURES: [Architecture; 12] = [
    LLAMA,
    QWEN2,
    QWEN3,
    Architecture {
        name: "internlm2",
        vocab: 103_168,
        bias: Bias::Field("bias", true, AttentionBias::All),
        reads_mlp_bias: false,
        ..LLAMA
    },
    Architecture { name: "qwen2_vl_text", ..QWEN2_VL },
    Architecture { name: "qwen2_5_vl_text", ..QWEN2_VL },
    Architecture {
        name: "qwen2_5_omni_text",
        hidden: 3584,
        ffn: 18_944,
        layers: 28,
        heads: 28,
        kv_heads: Some(4),
        windows: WindowFields::Upper { tokens: 32_768, below: 28 },
        ..QWEN2_VL
    },
    Architecture {
        name: "qwen3_vl_text",
        head_dim: Some(128),
        bias: Bias::Field("attention_bias", false, AttentionBias::All),
        details: QK_NORM,
        windows: WindowFields::None,
        ..QWEN2
    },
    MISTRAL,
    Architecture {
        name: "ministral3",
        vocab: 131_072,
        layers: 34,
        head_dim: Some(128),
        windows: WindowFields::All(None),
        ..MISTRAL
    },
    GEMMA3,
    GLM4V,
];

const QK_NORM: LlmDetails = LlmDetails { has_qk_norm: true, ..LlmDetails::NONE };

pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    vocab: 32_000,
    hidden: 4096,
    ffn_field: "intermediate_size",
    ffn: 11_008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    bias: Bias::Field("attention_bias", false, AttentionBias::All),
    reads_mlp_bias: true,
    reads_qk_norm: false,
    details: LlmDetails::NONE,
    windows: WindowFields::None,
    experts: None,
    latent: None,
    refused: &[],
};

pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    vocab: 151_936,
    ffn: 22_016,
    kv_heads: Some(32),
    bias: Bias::Always(AttentionBias::Qkv),
    reads_mlp_bias: false,
    windows: WindowFields::Upper { tokens: 4096, below: 28 },
    ..LLAMA
};

pub(super) const QWEN3: Architecture = Architecture {
    name: "qwen3",
    head_dim: Some(128),
    bias: Bias::Field("attention_bias", false, AttentionBias::All),
    details: QK_NORM,
    ..QWEN2
};

pub(super) const QWEN2_VL: Architecture = Architecture {
    name: "qwen2_vl_text",
    vocab: 152_064,
    hidden: 8192,
    ffn: 29_568,
    layers: 80,
    heads: 64,
    kv_heads: Some(8),
    windows: WindowFields::Upper { tokens: 4096, below: 80 },
    ..QWEN2
};

pub(super) const MISTRAL: Architecture = Architecture {
    name: "mistral",
    ffn: 14_336,
    kv_heads: Some(8),
    bias: Bias::Always(AttentionBias::None),
    reads_mlp_bias: false,
    windows: WindowFields::All(Some(4096)),
    ..LLAMA
};

const GEMMA3: Architecture = Architecture {
    name: "gemma3_text",
    vocab: 262_208,
    hidden: 2304,
    ffn: 9216,
    layers: 26,
    heads: 8,
    kv_heads: Some(4),
    head_dim: Some(256),
    reads_mlp_bias: false,
    details: LlmDetails { has_post_norms: true, has_tied_embeddings: true, ..QK_NORM },
    windows: WindowFields::ButEach { tokens: 4096, period: 6 },
    refused: &["use_bidirectional_attention"],
    ..LLAMA
};

const GLM4V: Architecture = Architecture {
    name: "glm4v_text",
    vocab: 151_552,
    ffn: 13_696,
    layers: 40,
    kv_heads: Some(2),
    bias: Bias::Always(AttentionBias::Qkv),
    reads_mlp_bias: false,
    details: LlmDetails { has_post_norms: true, ..LlmDetails::NONE },
    ..LLAMA
};

/// Qwen2.5-7B; Qwen2-7B has the same sizes.
pub(in crate::model::families) const QWEN2_5_7B: LlmSpec = qwen2(28, 3584, [28, 4, 128], 18_944, 152_064);
/// Qwen2.5-3B, whose LM head is the embedding.
pub(in crate::model::families) const QWEN2_5_3B: LlmSpec = {
    let mut spec = qwen2(36, 2048, [16, 2, 128], 11_008, 151_936);
    spec.details.has_tied_embeddings = true;
    spec
};
pub(in crate::model::families) const QWEN2_5_32B: LlmSpec = qwen2(64, 5120, [40, 8, 128], 27_648, 152_064);
pub(in crate::model::families) const QWEN2_5_72B: LlmSpec = qwen2(80, 8192, [64, 8, 128], 29_568, 152_064);
pub(in crate::model::families) const QWEN3_8B: LlmSpec = qwen3(36, 4096, [32, 8, 128], 12_288);
pub(in crate::model::families) const QWEN3_32B: LlmSpec = qwen3(64, 5120, [64, 8, 128], 25_600);
pub(in crate::model::families) const QWEN3_30B_A3B: LlmSpec =
    with_experts(qwen3(48, 2048, [32, 4, 128], 6144), 768);
pub(in crate::model::families) const QWEN3_235B_A22B: LlmSpec =
    with_experts(qwen3(94, 4096, [64, 4, 128], 12_288), 1536);
pub(in crate::model::families) const LLAMA3_8B: LlmSpec = llama(32, 4096, [32, 8, 128], 14_336, 128_256);
pub(in crate::model::families) const LLAMA3_70B: LlmSpec = llama(80, 8192, [64, 8, 128], 28_672, 128_256);
/// Qwen2-Audio LLM.
pub(in crate::model::families) const QWEN_7B: LlmSpec = qwen2(32, 4096, [32, 32, 128], 11_008, 156_032);
pub(in crate::model::families) const TINY_LLM: LlmSpec = llama(4, 256, [4, 2, 64], 1024, 4096);

/// Builds a Llama; `heads` are query heads, key and value heads, and head width.
pub(in crate::model::families) const fn llama(
    layers: u32,
    hidden: u32,
    heads: [u32; 3],
    ffn: u32,
    vocab: u32,
) -> LlmSpec {
    let [heads, kv_heads, head_dim] = heads;
    let details = LlmDetails::NONE;
    let (experts, windows, latent) = (None, None, None);
    let counts = None;
    LlmSpec {
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        details,
        experts,
        windows,
        latent,
        counts,
    }
}

const fn qwen2(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let mut spec = llama(layers, hidden, heads, ffn, vocab);
    spec.details.attention_bias = AttentionBias::Qkv;
    spec
}

const fn qwen3(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32) -> LlmSpec {
    let mut spec = llama(layers, hidden, heads, ffn, 151_936);
    spec.details.has_qk_norm = true;
    spec
}

/// Replaces all MLPs by Qwen3 experts: 8 of 128, with this width.
const fn with_experts(mut spec: LlmSpec, ffn: u32) -> LlmSpec {
    spec.experts = Some(ExpertsSpec {
        layers: LayerSet::range(0, spec.layers),
        experts: 128,
        experts_per_token: 8,
        ffn,
        shared_ffn: 0,
        details: ExpertsDetails::NONE,
    });
    spec
}
