//! Computes the activations that a transformer layer saves for the backward pass.
//!
//! # Source
//! Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
//! arXiv:2205.05198, section 4, without dropout masks and with fused attention, which saves one 32-bit sum
//! per head instead of the scores, extended to grouped-query attention and gated MLPs. For width `h`, `a`
//! query and `kv` key heads of width `d` and an MLP of width `f`, in bytes per token: inputs to both norms,
//! to attention and to the MLP, `8h`; queries, keys, values and the attention output, `4d(a + kv)`; attention
//! sums, `4a`; between the MLP matrices, `4f` for a plain and `6f` for a gated MLP. With `h = ad` and
//! `f = 4h` a plain layer has the paper's `34h` less `2h` for masks.
//!
//! Eager modules of transformers 5.24 with `FlashAttention` save more: `16h + 8` around the norms, which
//! compute in 32 bits; `6d + 4` per query and key head around their norms; the gate before and after the
//! activation, `8f`. Where norms also follow attention and MLP, as in Gemma, all norms multiply in 32 bits:
//! `36h + 16`, and `8d + 4` per head. Encoders with a plain MLP have fused norms; every encoder keeps `4h`
//! more, the queries and keys before they are rotated, or the inputs of layer scales. `SigLIP` has neither,
//! so its encoder counts up to 16 % too much; other layers agree with PyTorch's saved tensors. The last stage
//! keeps the logits until the backward pass, and has their gradient, and parts in 32 bits, at that time.
//!
//! Training in 32 bits doubles the bytes per element except for the sums, which have 32 bits already; around
//! transformers' norms it takes `24h + 8`, because the 32-bit copy is the input itself.

use std::num::NonZeroU32;

use super::Peak;
use super::state::{StageLayers, mean};
use super::trainer::Kernels;
use crate::model::{EncoderSpec, ExpertsSpec, LatentAttention, LayerSet, LlmSpec, Mlp};

/// Activations saved from the forward to the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SavedActivations {
    /// Everything that a backward pass reads.
    #[default]
    All,
    /// Only every layer's input; a layer's other activations exist only while it is recomputed.
    LayerInputs,
}

/// Weight and activation type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 16 bits, with 32-bit weight copies in the optimizer.
    #[default]
    Bf16,
    /// 32 bits.
    F32,
}

impl Precision {
    /// Returns the bytes per element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => F32_BYTES,
        }
    }
}

/// Layer parallelism, kernels and precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Execution {
    /// TP degree.
    pub tp: NonZeroU32,
    /// Whether norms and inputs are split over the TP ranks as well; otherwise each rank holds all of them.
    pub is_sequence_parallel: bool,
    /// Kernels.
    pub kernels: Kernels,
    /// Activation type.
    pub precision: Precision,
}

impl Default for Execution {
    fn default() -> Self {
        Self {
            tp: NonZeroU32::MIN,
            is_sequence_parallel: false,
            kernels: Kernels::Fused,
            precision: Precision::Bf16,
        }
    }
}

/// Activation bytes on a rank in a TP group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActivationBytes {
    /// Bytes per token in a layer without experts, if everything is saved.
    pub layer_bytes_per_token: u64,
    /// Bytes per token in a layer with experts, if everything is saved; 0 without experts.
    pub sparse_layer_bytes_per_token: u64,
    /// Bytes per token at a layer's input.
    pub input_bytes_per_token: u64,
    /// Bytes per token after the layers: the logits as computed and in 32 bits; 0 for an encoder.
    pub head_bytes_per_token: u64,
    /// Part of the head bytes that a microbatch keeps until its backward pass.
    pub saved_head_bytes_per_token: u64,
    /// Number of module layers, and the layers with experts.
    layers: (u32, LayerSet),
}

const F32_BYTES: u64 = 4;

impl ActivationBytes {
    /// Computes the activations for an LLM.
    #[must_use]
    pub fn for_llm(spec: &LlmSpec, execution: Execution) -> Self {
        let tp = execution.tp.get();
        let heads = spec.heads.div_ceil(tp);
        let bytes = execution.precision.bytes();
        let kv_heads = spec.kv_heads.div_ceil(tp);
        let is_eager = execution.kernels == Kernels::AttentionOnly;
        let mlp = if is_eager { 4 } else { 3 };
        let norms = if is_eager { eager_norm_bytes(spec, bytes) } else { fused_norm_bytes(spec, bytes) };
        let attention = match spec.latent {
            None => attention_bytes([heads, kv_heads], spec.head_dim, bytes),
            Some(latent) => latent_bytes(&latent, heads, bytes),
        };
        let of_heads = if is_eager { head_norm_bytes(spec, heads + kv_heads, bytes) } else { 0 };
        let attention = attention.saturating_add(of_heads);
        let dense = attention.saturating_add(product([spec.ffn.div_ceil(tp).into(), mlp * bytes]));
        let of_experts = |experts| experts_bytes(spec, &experts, tp, [mlp, bytes]);
        let sparse = spec.experts.map(|experts| attention.saturating_add(of_experts(experts)));
        let logits = product([spec.vocab.div_ceil(tp).into(), bytes + F32_BYTES]);
        let whole = Self::new(spec.hidden, norms, dense, logits, execution);
        let of_sparse = sparse.map(|sparse| Self::new(spec.hidden, norms, sparse, logits, execution));
        let saved_logits = if is_eager { product([spec.vocab.div_ceil(tp).into(), bytes]) } else { 0 };
        Self {
            saved_head_bytes_per_token: saved_logits,
            sparse_layer_bytes_per_token: of_sparse.map_or(0, |sparse| sparse.layer_bytes_per_token),
            layers: (spec.layers, spec.sparse_layers()),
            ..whole
        }
    }

    /// Computes the activations for an encoder.
    #[must_use]
    pub fn for_encoder(spec: &EncoderSpec, execution: Execution) -> Self {
        let tp = execution.tp.get();
        let heads = spec.heads.div_ceil(tp);
        let is_eager = execution.kernels == Kernels::AttentionOnly;
        let mlp = match spec.mlp {
            Mlp::Plain => 2,
            Mlp::Gated if is_eager => 4,
            Mlp::Gated => 3,
        };
        let bytes = execution.precision.bytes();
        let norms = match spec.mlp {
            Mlp::Gated if is_eager => rms_norm_bytes(spec.hidden, F32_BYTES + bytes, bytes),
            _ => norm_bytes(spec.hidden, bytes),
        };
        let beside = if is_eager { product([2 * bytes, spec.hidden.into()]) } else { 0 };
        let split = attention_bytes([heads, heads], spec.hidden / spec.heads.max(1), bytes)
            .saturating_add(product([spec.ffn.div_ceil(tp).into(), mlp * bytes]));
        Self::new(spec.hidden, norms.saturating_add(beside), split, 0, execution)
    }

    fn new(hidden: u32, norms: u64, split: u64, logits: u64, execution: Execution) -> Self {
        let ranks = if execution.is_sequence_parallel { u64::from(execution.tp.get()) } else { 1 };
        Self {
            layer_bytes_per_token: norms.div_ceil(ranks).saturating_add(split),
            sparse_layer_bytes_per_token: 0,
            input_bytes_per_token: (u64::from(hidden) * execution.precision.bytes()).div_ceil(ranks),
            head_bytes_per_token: logits,
            saved_head_bytes_per_token: 0,
            layers: (0, LayerSet::default()),
        }
    }

    /// Returns a stage's activations and working set; state and buffers are 0.
    ///
    /// - `tokens`: tokens in a microbatch, padding included
    /// - `in_flight`: number of microbatches, see [`super::microbatches_in_flight`]
    ///
    /// A last stage computes the LM head, for a single microbatch at a time.
    #[must_use]
    pub fn peak(&self, stage: StageLayers, tokens: u64, in_flight: u32, saved: SavedActivations) -> Peak {
        let [layers, deepest] = self.layers_bytes(stage);
        let (saved_bytes, recomputed_bytes) = match saved {
            SavedActivations::All => (layers, 0),
            SavedActivations::LayerInputs => {
                (product([self.input_bytes_per_token, stage.layers.into()]), deepest)
            }
        };
        let is_last = u64::from(stage.is_last);
        let saved_head = is_last.saturating_mul(self.saved_head_bytes_per_token);
        let head = is_last.saturating_mul(self.head_bytes_per_token).saturating_sub(saved_head);
        let saved_bytes = saved_bytes.saturating_add(saved_head);
        Peak {
            activations: saved_bytes.saturating_mul(tokens).saturating_mul(u64::from(in_flight)),
            // A recomputed layer and the logits do not exist at the same time.
            working_set: if stage.layers > 0 { recomputed_bytes.max(head) } else { head }
                .saturating_mul(tokens),
            ..Peak::default()
        }
    }

    /// Returns the bytes per token in all layers of a stage, and in the stage's largest layer.
    fn layers_bytes(&self, stage: StageLayers) -> [u64; 2] {
        let (all, sparse) = self.layers;
        let [dense_bytes, sparse_bytes] = [self.layer_bytes_per_token, self.sparse_layer_bytes_per_token];
        let sum = |layers: u32, sparse: u32| {
            let dense = product([dense_bytes, layers.saturating_sub(sparse).into()]);
            dense.saturating_add(product([sparse_bytes, sparse.into()]))
        };
        if sparse.is_empty() {
            return [sum(stage.layers, 0), dense_bytes];
        }
        let Some(range) = stage.range(all) else {
            return [mean(sum(all, sparse.len_below(all)), stage.layers, all), dense_bytes.max(sparse_bytes)];
        };
        let count = sparse.len_below(range.end).saturating_sub(sparse.len_below(range.start));
        let deepest = match count {
            0 => dense_bytes,
            count if count == stage.layers => sparse_bytes,
            _ => dense_bytes.max(sparse_bytes),
        };
        [sum(stage.layers, count), deepest]
    }
}

/// Returns the expert bytes in a layer per token: the router scores in 32 bits; for each of the token's
/// experts an input copy, the values between the expert's matrices, and the expert's output, which the router
/// weight gradient needs; and the values between the shared experts' matrices.
///
/// - `[mlp, bytes]`: number of saved vectors between a gated MLP's matrices, and bytes per element
fn experts_bytes(spec: &LlmSpec, experts: &ExpertsSpec, tp: u32, [mlp, bytes]: [u64; 2]) -> u64 {
    let copies = product([2 * bytes, spec.hidden.into()]);
    let between = |ffn: u32| product([ffn.div_ceil(tp).into(), mlp * bytes]);
    let routed = copies.saturating_add(between(experts.ffn));
    product([experts.experts_per_token.into(), routed])
        .saturating_add(between(experts.shared_ffn))
        .saturating_add(product([experts.experts.into(), F32_BYTES]))
}

/// Returns the bytes for latent attention: queries, keys, values, output and sums per head, and the latent
/// vectors before and after the norms, which every rank holds.
fn latent_bytes(latent: &LatentAttention, heads: u32, bytes: u64) -> u64 {
    let width = u64::from(latent.plain_dim) + u64::from(latent.rotated_dim) + u64::from(latent.value_dim);
    let ranks = u64::from(latent.query_rank.unwrap_or(0)) + u64::from(latent.kv_rank);
    product([2 * bytes, heads.into(), width])
        .saturating_add(product([heads.into(), F32_BYTES]))
        .saturating_add((2 * ranks + u64::from(latent.rotated_dim)).saturating_mul(bytes))
}

fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// Returns the bytes for the norms in an LLM layer if they are fused.
fn fused_norm_bytes(spec: &LlmSpec, bytes: u64) -> u64 {
    // A norm after attention or MLP saves its input.
    let post_norms = if spec.details.has_post_norms { product([2 * bytes, spec.hidden.into()]) } else { 0 };
    norm_bytes(spec.hidden, bytes).saturating_add(post_norms)
}

/// Returns the bytes inside of an LLM's norm per element: the copy in 32 bits, and the product before the
/// weight, which has 32 bits in layers with norms after attention and MLP.
const fn bytes_in_norm(spec: &LlmSpec, bytes: u64) -> u64 {
    F32_BYTES + if spec.details.has_post_norms { F32_BYTES } else { bytes }
}

/// Returns the bytes for the norms in an LLM layer of transformers.
fn eager_norm_bytes(spec: &LlmSpec, bytes: u64) -> u64 {
    let inside = bytes_in_norm(spec, bytes);
    // The sum after attention or MLP needs no output of a norm.
    let post_norms = if spec.details.has_post_norms { rms_norm_bytes(spec.hidden, inside, 0) } else { 0 };
    rms_norm_bytes(spec.hidden, inside, bytes).saturating_add(post_norms)
}

/// Returns the bytes for two norms in steps: inside of them and of their output per element, and a statistic
/// each.
fn rms_norm_bytes(hidden: u32, inside: u64, output: u64) -> u64 {
    product([2 * (inside + output), hidden.into()]).saturating_add(2 * F32_BYTES)
}

/// Returns the bytes for the norms of queries and keys in an LLM layer of transformers; 0 without these.
///
/// - `heads`: query and key heads
fn head_norm_bytes(spec: &LlmSpec, heads: u32, bytes: u64) -> u64 {
    if !(spec.details.has_qk_norm || spec.details.has_wide_qk_norm) {
        return 0;
    }
    let elements = u64::from(heads).saturating_mul(spec.head_dim.into());
    elements.saturating_mul(bytes_in_norm(spec, bytes)).saturating_add(product([heads.into(), F32_BYTES]))
}

/// Returns the bytes for both norms' inputs and outputs.
fn norm_bytes(hidden: u32, bytes: u64) -> u64 {
    u64::from(hidden).saturating_mul(4 * bytes)
}

/// Returns the bytes for attention queries, keys, values, output and sums.
fn attention_bytes([heads, kv_heads]: [u32; 2], head_dim: u32, bytes: u64) -> u64 {
    let all = u64::from(heads) + u64::from(kv_heads);
    all.saturating_mul(u64::from(head_dim))
        .saturating_mul(2 * bytes)
        .saturating_add(u64::from(heads) * F32_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;

    fn tp(degree: u32, is_sequence_parallel: bool) -> Execution {
        let tp = NonZeroU32::new(degree).unwrap();
        Execution { tp, is_sequence_parallel, ..Execution::default() }
    }

    /// Everything except attention sums, which have 32 bits in any case, and the logits' copy.
    #[test]
    fn training_in_32_bits_takes_twice_the_bytes() {
        for name in ["llava-ov-qwen2.5-7b", "internvl3.5-30b-a3b", "tiny"] {
            let spec = ModelSpec::preset(name).unwrap();
            let llm = |precision| {
                ActivationBytes::for_llm(&spec.llm, Execution { precision, ..Execution::default() })
            };
            let [half, full] = [Precision::Bf16, Precision::F32].map(llm);
            let sums = 4 * u64::from(spec.llm.heads);
            assert_eq!(full.layer_bytes_per_token + sums, 2 * half.layer_bytes_per_token, "{name}");
            assert_eq!(full.input_bytes_per_token, 2 * half.input_bytes_per_token);
            assert_eq!(full.head_bytes_per_token, 8 * u64::from(spec.llm.vocab));
            let scores = spec.llm.experts.map_or(0, |experts| 4 * u64::from(experts.experts));
            let both = if scores > 0 { sums + scores } else { 0 };
            assert_eq!(full.sparse_layer_bytes_per_token + both, 2 * half.sparse_layer_bytes_per_token);
            let encoder = spec.vision.unwrap().encoder;
            let vision =
                |precision| ActivationBytes::for_encoder(&encoder, Execution { precision, ..tp(1, false) });
            let [half, full] =
                [Precision::Bf16, Precision::F32].map(vision).map(|of| of.layer_bytes_per_token);
            assert_eq!(full + 4 * u64::from(encoder.heads), 2 * half, "{name}");
        }
    }

    /// SigLIP with an MLP 4 times as wide: `34h` less masks, and 4 bytes for each of 16 heads.
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

    /// Bytes per token and layer for all tensors that PyTorch 2.15 saves for the backward pass of modules of
    /// transformers 5.24 on the CPU in 16 bits, as the difference between two depths: LLMs with width 256, 8
    /// and 2 heads of width 32 and MLP width 640 (Qwen2.5-VL, Llama; Qwen3; Gemma 3, whose 10 weight copies
    /// in 32 bits do not depend on tokens); the encoder of Qwen2.5-VL with these widths, without the joined
    /// copy of windows that `FlashAttention` does not have; SigLIP with width 256, 8 heads, MLP width 1024.
    #[test]
    fn saved_tensors_of_pytorch_agree() {
        let mut llm = ModelSpec::preset("tiny").unwrap().llm;
        (llm.heads, llm.kv_heads, llm.head_dim, llm.ffn) = (8, 2, 32, 640);
        let eager = Execution { kernels: Kernels::AttentionOnly, ..Execution::default() };
        let layer = |llm: &LlmSpec| ActivationBytes::for_llm(llm, eager).layer_bytes_per_token;
        assert_eq!(layer(&llm), 10_536);
        llm.details.has_qk_norm = true;
        assert_eq!(layer(&llm), 12_496);
        llm.details.has_post_norms = true;
        assert_eq!(layer(&llm), 18_264);
        let mut encoder = ModelSpec::preset("tiny").unwrap().vision.unwrap().encoder;
        encoder.heads = 8;
        let bytes = ActivationBytes::for_encoder(&encoder, Execution::default()).layer_bytes_per_token;
        assert_eq!(bytes, 8232 - 8, "without the statistics of two norms");
        (encoder.mlp, encoder.ffn) = (Mlp::Gated, 640);
        assert_eq!(ActivationBytes::for_encoder(&encoder, eager).layer_bytes_per_token, 12_840 - 512);
    }

    /// Logits are kept with each microbatch in flight, and exist once more with their gradient.
    #[test]
    fn eager_modules_keep_logits() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().llm;
        let stage = StageLayers { layers: 0, first_layer: None, is_first: false, is_last: true };
        let peak = |kernels, in_flight| {
            let execution = Execution { kernels, ..Execution::default() };
            let peak =
                ActivationBytes::for_llm(&spec, execution).peak(stage, 10, in_flight, SavedActivations::All);
            [peak.activations, peak.working_set].map(|bytes| bytes / 10 / 152_064)
        };
        assert_eq!(peak(Kernels::Fused, 3), [0, 6]);
        assert_eq!(peak(Kernels::AttentionOnly, 1), [2, 4]);
        assert_eq!(peak(Kernels::AttentionOnly, 3), [6, 4]);
    }

    #[test]
    fn saved_inputs_leave_one_layer_to_recompute() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().llm;
        let activations = ActivationBytes::for_llm(&spec, tp(1, false));
        let layer = activations.layer_bytes_per_token;
        let stage = |is_last| StageLayers { layers: 7, first_layer: None, is_first: false, is_last };
        let all = activations.peak(stage(false), 1000, 4, SavedActivations::All);
        assert_eq!((all.activations, all.working_set), (7 * 4 * 1000 * layer, 0));
        let inputs = activations.peak(stage(false), 1000, 4, SavedActivations::LayerInputs);
        assert_eq!((inputs.activations, inputs.working_set), (7 * 4 * 1000 * 7168, 1000 * layer));
        let last = activations.peak(stage(true), 1000, 1, SavedActivations::LayerInputs);
        assert_eq!(last.working_set, 1000 * 6 * 152_064);
    }

    /// Qwen3-30B-A3B: attention with 32 and 4 heads of width 128; for each of 8 experts two rows of 2,048 and
    /// three of 768; 128 scores in 32 bits.
    #[test]
    fn a_token_of_a_mixture_has_a_copy_for_each_expert() {
        let mut spec = ModelSpec::preset("internvl3.5-30b-a3b").unwrap().llm;
        let attention = 8 * 2048 + 4 * 128 * 36 + 4 * 32;
        let sparse = attention + 8 * (2 * 2 * 2048 + 6 * 768) + 4 * 128;
        assert_eq!(ActivationBytes::for_llm(&spec, tp(1, false)).sparse_layer_bytes_per_token, sparse);
        let layers = |stage: StageLayers, spec: &LlmSpec| {
            ActivationBytes::for_llm(spec, tp(1, false)).peak(stage, 1, 1, SavedActivations::All).activations
        };
        let stage = StageLayers { layers: 4, first_layer: Some(2), is_first: false, is_last: false };
        assert_eq!(layers(stage, &spec), 4 * sparse);
        // Layers 0 to 2 without experts: known layers count exactly, unknown layers as mean layers.
        spec.experts.as_mut().unwrap().layers = LayerSet::range(3, 48);
        let dense = attention + 6 * 6144;
        assert_eq!(layers(stage, &spec), dense + 3 * sparse);
        let unknown = StageLayers { first_layer: None, ..stage };
        assert_eq!(layers(unknown, &spec), (4 * (3 * dense + 45 * sparse)).div_ceil(48));
    }

    /// Equivalent measurement for Qwen3-MoE in transformers 5.24.0 with grouped products: width 256, 8 and 2
    /// heads of width 32, 4 of 16 experts of width 96 save 14,744 bytes, and Qwen3 with an MLP of width 640
    /// instead 12,496.
    #[test]
    fn saved_tensors_of_experts_agree() {
        let mut spec = ModelSpec::preset("internvl3.5-30b-a3b").unwrap().llm;
        (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn) = (256, 8, 2, 32, 640);
        let experts = spec.experts.as_mut().unwrap();
        (experts.experts, experts.experts_per_token, experts.ffn) = (16, 4, 96);
        let execution = Execution { kernels: Kernels::AttentionOnly, ..Execution::default() };
        let found = ActivationBytes::for_llm(&spec, execution);
        assert_eq!(found.layer_bytes_per_token, 12_496);
        let sparse = found.sparse_layer_bytes_per_token as f64;
        assert!((sparse / 14_744.0 - 1.0).abs() < 0.01, "{sparse}");
    }
}
