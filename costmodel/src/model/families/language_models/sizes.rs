//! Sizes of published language models.

use crate::model::{AttentionBias, LlmDetails, LlmSpec};

/// Qwen2.5-7B; Qwen2-7B has the same sizes.
pub(in crate::model::families) const QWEN2_5_7B: LlmSpec = qwen2(28, 3584, [28, 4, 128], 18_944, 152_064);
pub(in crate::model::families) const QWEN2_5_32B: LlmSpec = qwen2(64, 5120, [40, 8, 128], 27_648, 152_064);
pub(in crate::model::families) const QWEN2_5_72B: LlmSpec = qwen2(80, 8192, [64, 8, 128], 29_568, 152_064);
pub(in crate::model::families) const LLAMA3_8B: LlmSpec = llama(32, 4096, [32, 8, 128], 14_336, 128_256);
pub(in crate::model::families) const LLAMA3_70B: LlmSpec = llama(80, 8192, [64, 8, 128], 28_672, 128_256);
/// The LLM of Qwen2-Audio.
pub(in crate::model::families) const QWEN_7B: LlmSpec = qwen2(32, 4096, [32, 32, 128], 11_008, 156_032);
pub(in crate::model::families) const TINY_LLM: LlmSpec = llama(4, 256, [4, 2, 64], 1024, 4096);

/// Makes a Llama; `heads` are query heads, key and value heads, and the width of one head.
const fn llama(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
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
