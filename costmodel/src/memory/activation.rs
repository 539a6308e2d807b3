//! Computes the activations that a transformer layer saves for its backward pass.
//!
//! # Source
//! Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
//! arXiv:2205.05198, section 4, without dropout masks and with fused attention, which saves one 32-bit sum
//! per head instead of the scores, extended to grouped-query attention and gated MLPs. For width `h`, `a`
//! query and `kv` key heads of width `d` and an MLP of width `f`, in bytes per token: inputs of both norms,
//! of the attention and of the MLP, `8h`; queries, keys, values and the attention's output, `4d(a + kv)`; its
//! sums, `4a`; between the matrices of the MLP, `4f` for a plain and `6f` for a gated one. With `h = ad` and
//! `f = 4h` a plain layer takes the paper's `34h` less `2h` of masks.
//!
//! An LLM of transformers 4.57.1 without fused kernels saves more: `16h + 8` around its norms, which compute
//! in 32 bits; keys and values repeated for each query head, `8ad` in all; the gate before and after its
//! activation, `8f`. Saved tensors of PyTorch agree with both to 3 %.

use std::num::NonZeroU32;

use super::Peak;
use crate::model::{EncoderSpec, LlmSpec, Mlp};

/// Activations that are saved from the forward to the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SavedActivations {
    /// Everything that a backward pass reads.
    #[default]
    All,
    /// The input of every layer; the other activations of a layer exist only while it is recomputed.
    LayerInputs,
}

/// Operations that are fused, so that nothing is saved between their parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Norms, attention with grouped key heads, and the activation of gated MLPs.
    #[default]
    Fused,
    /// Attention only, as in transformers.
    AttentionOnly,
}

/// Parallelism and kernels of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Execution {
    /// TP degree.
    pub tp: NonZeroU32,
    /// Whether norms and inputs are split over the TP ranks as well; otherwise each rank holds all of them.
    pub is_sequence_parallel: bool,
    /// Kernels of an LLM; norms of encoders are always fused.
    pub kernels: Kernels,
}

impl Default for Execution {
    fn default() -> Self {
        Self { tp: NonZeroU32::MIN, is_sequence_parallel: false, kernels: Kernels::Fused }
    }
}

/// Bytes of activations on one rank of a TP group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActivationBytes {
    /// Bytes of one token in one layer, if everything is saved.
    pub layer_bytes_per_token: u64,
    /// Bytes of one token at the input of a layer.
    pub input_bytes_per_token: u64,
    /// Bytes of one token after the layers: its logits in 16 and in 32 bits; 0 for an encoder.
    pub head_bytes_per_token: u64,
}

const BYTES: u64 = 2;
const F32_BYTES: u64 = 4;

impl ActivationBytes {
    /// Computes the activations of an LLM.
    #[must_use]
    pub fn for_llm(spec: &LlmSpec, execution: Execution) -> Self {
        let tp = execution.tp.get();
        let heads = spec.heads.div_ceil(tp);
        let (kv_heads, norms, mlp) = match execution.kernels {
            Kernels::Fused => (spec.kv_heads.div_ceil(tp), norm_bytes(spec.hidden), 3),
            Kernels::AttentionOnly => {
                let norms = u64::from(spec.hidden).saturating_mul(16).saturating_add(2 * F32_BYTES);
                (heads, norms, 4)
            }
        };
        let split = attention_bytes([heads, kv_heads], spec.head_dim)
            .saturating_add(u64::from(spec.ffn.div_ceil(tp)).saturating_mul(mlp * BYTES));
        let logits = u64::from(spec.vocab.div_ceil(tp)).saturating_mul(BYTES + F32_BYTES);
        Self::new(spec.hidden, norms, split, logits, execution)
    }

    /// Computes the activations of an encoder.
    #[must_use]
    pub fn for_encoder(spec: &EncoderSpec, execution: Execution) -> Self {
        let tp = execution.tp.get();
        let heads = spec.heads.div_ceil(tp);
        let mlp = match spec.mlp {
            Mlp::Plain => 2,
            Mlp::Gated => 3,
        };
        let split = attention_bytes([heads, heads], spec.hidden / spec.heads.max(1))
            .saturating_add(u64::from(spec.ffn.div_ceil(tp)).saturating_mul(mlp * BYTES));
        Self::new(spec.hidden, norm_bytes(spec.hidden), split, 0, execution)
    }

    fn new(hidden: u32, norms: u64, split: u64, logits: u64, execution: Execution) -> Self {
        let ranks = if execution.is_sequence_parallel { u64::from(execution.tp.get()) } else { 1 };
        Self {
            layer_bytes_per_token: norms.div_ceil(ranks).saturating_add(split),
            input_bytes_per_token: (u64::from(hidden) * BYTES).div_ceil(ranks),
            head_bytes_per_token: logits,
        }
    }

    /// Returns activations and working set of a stage of `layers` layers; state and buffers are 0.
    ///
    /// - `tokens`: tokens of one microbatch, padding included
    /// - `in_flight`: number of microbatches, see [`super::microbatches_in_flight`]
    /// - `has_head`: whether the stage computes the LM head, for one microbatch at a time
    #[must_use]
    pub fn peak(
        &self,
        layers: u32,
        tokens: u64,
        in_flight: u32,
        saved: SavedActivations,
        has_head: bool,
    ) -> Peak {
        let (saved_bytes, recomputed_bytes) = match saved {
            SavedActivations::All => (self.layer_bytes_per_token, 0),
            SavedActivations::LayerInputs => (self.input_bytes_per_token, self.layer_bytes_per_token),
        };
        let head = if has_head { self.head_bytes_per_token } else { 0 };
        Peak {
            activations: saved_bytes
                .saturating_mul(u64::from(layers))
                .saturating_mul(tokens)
                .saturating_mul(u64::from(in_flight)),
            // A recomputed layer and the logits do not exist at the same time.
            working_set: if layers > 0 { recomputed_bytes.max(head) } else { head }.saturating_mul(tokens),
            ..Peak::default()
        }
    }
}

/// Returns the bytes of inputs and outputs of both norms.
fn norm_bytes(hidden: u32) -> u64 {
    u64::from(hidden).saturating_mul(4 * BYTES)
}

/// Returns the bytes of queries, keys, values, output and sums of an attention.
fn attention_bytes([heads, kv_heads]: [u32; 2], head_dim: u32) -> u64 {
    let all = u64::from(heads) + u64::from(kv_heads);
    all.saturating_mul(u64::from(head_dim))
        .saturating_mul(2 * BYTES)
        .saturating_add(u64::from(heads) * F32_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;

    fn tp(degree: u32, is_sequence_parallel: bool) -> Execution {
        let tp = NonZeroU32::new(degree).unwrap();
        Execution { tp, is_sequence_parallel, kernels: Kernels::Fused }
    }

    /// SigLIP with an MLP of 4 times its width: `34h` less masks, and 4 bytes for each of 16 heads.
    #[test]
    fn a_plain_layer_takes_the_papers_bytes() {
        let mut spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().vision.unwrap().encoder;
        spec.ffn = 4 * spec.hidden;
        let activations = ActivationBytes::for_encoder(&spec, tp(1, false));
        assert_eq!(activations.layer_bytes_per_token, 32 * 1152 + 4 * 16);
    }

    /// Qwen2.5-7B: `8h`, `4 * 128 * (28 + 4)`, `4 * 28`, `6f`.
    #[test]
    fn a_gated_layer_with_few_key_heads_follows_the_formula() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().llm;
        let whole = ActivationBytes::for_llm(&spec, tp(1, false));
        assert_eq!(whole.layer_bytes_per_token, 28_672 + 16_384 + 112 + 113_664);
        assert_eq!(whole.head_bytes_per_token, 6 * 152_064);
        let quarter = ActivationBytes::for_llm(&spec, tp(4, false));
        assert_eq!(quarter.layer_bytes_per_token, 28_672 + 4096 + 28 + 28_416);
        let sequence = ActivationBytes::for_llm(&spec, tp(4, true));
        assert_eq!(sequence.layer_bytes_per_token * 4, whole.layer_bytes_per_token);
    }

    /// Bytes per token and layer of all tensors that PyTorch 2.15 saves for the backward pass on the CPU in
    /// 16 bits, as the difference of two depths: a Llama of width 256, 8 and 2 heads of 32, MLP of 640, with
    /// a causal mask of 256 bytes that belongs to the kernel; SigLIP of width 256, 8 heads, MLP of 1024.
    #[test]
    fn saved_tensors_of_pytorch_agree() {
        let mut llama = ModelSpec::preset("tiny").unwrap().llm;
        (llama.heads, llama.kv_heads, llama.head_dim, llama.ffn) = (8, 2, 32, 640);
        let execution = Execution { kernels: Kernels::AttentionOnly, ..Execution::default() };
        assert_eq!(ActivationBytes::for_llm(&llama, execution).layer_bytes_per_token, 11_560 - 256);
        let mut siglip = ModelSpec::preset("tiny").unwrap().vision.unwrap().encoder;
        siglip.heads = 8;
        let bytes = ActivationBytes::for_encoder(&siglip, Execution::default()).layer_bytes_per_token;
        assert_eq!(bytes, 8232 - 8, "without the statistics of two norms");
    }

    #[test]
    fn saved_inputs_leave_one_layer_to_recompute() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().llm;
        let activations = ActivationBytes::for_llm(&spec, tp(1, false));
        let layer = activations.layer_bytes_per_token;
        let all = activations.peak(7, 1000, 4, SavedActivations::All, false);
        assert_eq!((all.activations, all.working_set), (7 * 4 * 1000 * layer, 0));
        let inputs = activations.peak(7, 1000, 4, SavedActivations::LayerInputs, false);
        assert_eq!((inputs.activations, inputs.working_set), (7 * 4 * 1000 * 7168, 1000 * layer));
        let last = activations.peak(7, 1000, 1, SavedActivations::LayerInputs, true);
        assert_eq!(last.working_set, 1000 * 6 * 152_064);
    }
}
