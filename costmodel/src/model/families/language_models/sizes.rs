//! Published language model sizes.

use crate::model::{AttentionBias, ExpertsDetails, ExpertsSpec, LayerSet, LlmDetails, LlmSpec};

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
    LlmSpec { layers, hidden, heads, kv_heads, head_dim, ffn, vocab, details, experts, windows, latent }
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
