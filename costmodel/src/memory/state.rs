//! Counts a stage's parameters, gradients and optimizer state, on the fullest rank in a TP group.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::model::{EncoderParameters, EncoderSpec, ExpertsSpec, LlmParameters, LlmSpec};

/// State bytes per parameter.
///
/// # Source
/// Rajbhandari et al., "`ZeRO`", 2020, arXiv:1910.02054, section 3.1: in mixed precision Adam takes 2 bytes
/// for the parameter, 2 for its gradient and `K = 12` for 32-bit copies of parameter, momentum and variance.
/// Megatron-LM accumulates gradients in 32 bits: 4 for the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateBytes {
    /// Parameter bytes.
    pub parameter: u32,
    /// Gradient bytes per parameter.
    pub gradient: u32,
    /// Optimizer state bytes per parameter.
    pub optimizer: u32,
    /// Additional bytes per parameter while gradients are summed, when no activations are held.
    pub sums: u32,
    /// The same for bytes that the ranks which share the optimizer state share as well.
    pub shared_sums: u32,
    /// Number of data-parallel ranks that share the optimizer state (`ZeRO` stage 1).
    pub optimizer_ranks: NonZeroU32,
}

impl StateBytes {
    /// Adam in mixed precision, 16-bit gradients: 2 + 2 + 12.
    pub const ADAM: Self = Self {
        parameter: 2,
        gradient: 2,
        optimizer: 12,
        sums: 0,
        shared_sums: 0,
        optimizer_ranks: NonZeroU32::MIN,
    };
    /// Adam in mixed precision, 32-bit gradients: 2 + 4 + 12.
    pub const ADAM_F32_GRADIENTS: Self = Self { gradient: 4, ..Self::ADAM };
    /// Adam in 32 bits, where the parameter needs no copy: 4 + 4 + 8.
    pub const ADAM_F32: Self = Self { parameter: 4, gradient: 4, optimizer: 8, ..Self::ADAM };
    /// PyTorch's `AdamW` with `fully_shard` over the replicas of a stage in `dflop.torch.Pipeline`, 16 bits
    /// where it computes: weights and optimizer state in 32 bits in shards, gathered weights and whole
    /// gradients in 16 bits during a step. Before gradients are summed, the gathered weights are freed; the
    /// gradients are copied to 32 bits, and shards follow: 2 + 4 bytes and 4 in shards, in place of 2 + 2.
    pub const TORCH_SHARDED: Self = Self { sums: 2, shared_sums: 4, ..Self::ADAM };
    /// PyTorch's `AdamW` on 16-bit weights, whose state has 16 bits too, on every replica: 2 + 2 + 4, and the
    /// buckets in which gradients are summed.
    pub const TORCH_REPLICATED: Self = Self { optimizer: 4, sums: 2, ..Self::ADAM };
    /// Frozen module: parameters only.
    pub const FROZEN: Self = Self { parameter: 2, gradient: 0, optimizer: 0, ..Self::ADAM };

    /// Returns the bytes for this number of parameters, rounded up, saturating.
    #[must_use]
    pub fn for_parameters(&self, parameters: u64) -> u64 {
        let each = u64::from(self.parameter) + u64::from(self.gradient);
        let shared = parameters.div_ceil(u64::from(self.optimizer_ranks.get()));
        parameters.saturating_mul(each).saturating_add(shared.saturating_mul(u64::from(self.optimizer)))
    }
}

/// Module layers in a stage, and whether the stage holds what is before and after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageLayers {
    /// Number of transformer layers in the stage.
    pub layers: u32,
    /// First layer in the stage, counted from 0; `None` if unknown. Then the first stage holds the first
    /// layers, the last stage the last layers, and other stages count as mean layers.
    pub first_layer: Option<u32>,
    /// Whether the stage holds the embedding, or an encoder's stem.
    pub is_first: bool,
    /// Whether the stage holds the last norm and the LM head, or an encoder's projector.
    pub is_last: bool,
}

impl StageLayers {
    /// Returns the number of parameters in an LLM stage on one rank in a TP group.
    ///
    /// Matrices are divided by `tp`, including expert matrices, and so are biases for matrices split by
    /// columns; heads and words are rounded up, and keys and values are divided at most by the number of key
    /// heads. Norms and biases for matrices split by rows are on every rank. A tied LM head is stored again
    /// if the embedding is on a different stage.
    ///
    /// # Source
    /// Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
    #[must_use]
    pub fn parameters(&self, spec: &LlmSpec, tp: NonZeroU32) -> u64 {
        let share = rank_share(spec, tp);
        let head = if spec.details.has_tied_embeddings && self.is_first { 0 } else { share.embedding };
        let first = if self.is_first { share.embedding } else { 0 };
        let last = if self.is_last { share.last_norm.saturating_add(head) } else { 0 };
        let layers = match self.range(spec.layers) {
            Some(range) => share.layer_parameters(range),
            None => mean(share.layer_parameters(0..spec.layers), self.layers, spec.layers),
        };
        layers.saturating_add(first).saturating_add(last)
    }

    /// Returns the part of [`StageLayers::parameters`] that is in experts, without shared experts: what the
    /// ranks in an expert-parallel group divide.
    #[must_use]
    pub fn expert_parameters(&self, spec: &LlmSpec, tp: NonZeroU32) -> u64 {
        let share = rank_share(spec, tp);
        match self.range(spec.layers) {
            Some(range) => share.experts_of_layers(range),
            None => mean(share.experts_of_layers(0..spec.layers), self.layers, spec.layers),
        }
    }

    /// Returns the stage's layers, in a module with `all` layers; `None` if unknown.
    #[must_use]
    pub fn range(&self, all: u32) -> Option<Range<u32>> {
        let first = match self.first_layer {
            Some(first) => first,
            None if self.is_first => 0,
            None if self.is_last => all.saturating_sub(self.layers),
            None => return None,
        };
        Some(first..first.saturating_add(self.layers))
    }
}

/// Counts the share on one rank in a TP group, as a smaller model with the same width.
fn rank_share(spec: &LlmSpec, tp: NonZeroU32) -> LlmParameters {
    if let Some(counts) = spec.counts {
        return LlmParameters::counted(spec, counts, tp.get());
    }
    let share = LlmSpec {
        heads: spec.heads.div_ceil(tp.get()),
        kv_heads: spec.kv_heads.div_ceil(tp.get()),
        ffn: spec.ffn.div_ceil(tp.get()),
        vocab: spec.vocab.div_ceil(tp.get()),
        experts: spec.experts.map(|experts| ExpertsSpec {
            ffn: experts.ffn.div_ceil(tp.get()),
            shared_ffn: experts.shared_ffn.div_ceil(tp.get()),
            ..experts
        }),
        ..*spec
    };
    LlmParameters::new(&share)
}

/// Returns the share for some layers in a sum over `all` layers, rounded up.
pub(super) fn mean(sum: u64, layers: u32, all: u32) -> u64 {
    let share = (u128::from(sum) * u128::from(layers)).div_ceil(u128::from(all.max(1)));
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Returns the number of parameters in an encoder stage on one rank in a TP group.
///
/// The first stage has everything outside the layers, except the projector, which the last stage has.
///
/// Layer and projector matrices are divided by `tp`, heads and widths rounded up; everything else, including
/// biases, is on every rank.
#[must_use]
pub fn encoder_parameters(spec: &EncoderSpec, llm_hidden: u32, stage: StageLayers, tp: NonZeroU32) -> u64 {
    let whole = EncoderParameters::new(spec, llm_hidden);
    let vectors = match spec.counts {
        // Of counted layers only the matrices by sizes are known to be divided.
        Some(_) => whole.layer.saturating_sub(layer_matrices(spec)),
        None => u64::from(spec.details.layer_vectors)
            .saturating_mul(u64::from(spec.hidden))
            .saturating_add(u64::from(spec.details.layer_ffn_vectors).saturating_mul(u64::from(spec.ffn))),
    };
    let split = |matrices: u64| matrices.div_ceil(u64::from(tp.get()));
    let layer = split(whole.layer.saturating_sub(vectors)).saturating_add(vectors);
    let own = spec.projector.vector_parameters;
    let projector = split(whole.projector.saturating_sub(own)).saturating_add(own);
    layer
        .saturating_mul(u64::from(stage.layers))
        .saturating_add(if stage.is_first { whole.outside } else { 0 })
        .saturating_add(if stage.is_last { projector } else { 0 })
}

/// Counts the elements in an encoder layer's matrices, saturating.
fn layer_matrices(spec: &EncoderSpec) -> u64 {
    let [hidden, ffn, matrices] = [spec.hidden, spec.ffn, spec.mlp.matrices()].map(u64::from);
    let attention = hidden.saturating_mul(hidden).saturating_mul(4);
    attention.saturating_add(hidden.saturating_mul(ffn).saturating_mul(matrices))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::split_layers;
    use crate::model::ModelSpec;

    fn tp(degree: u32) -> NonZeroU32 {
        NonZeroU32::new(degree).unwrap()
    }

    fn stages(layers: u32, count: u32) -> Vec<StageLayers> {
        let shares = split_layers(layers, count).into_iter().zip(0u32..);
        let mut first = 0;
        let stage = |(layers, at)| {
            let stage = StageLayers {
                layers,
                // where layers differ, the number of a stage's layers alone does not tell what it holds
                first_layer: Some(first),
                is_first: at == 0,
                is_last: at + 1 == count,
            };
            first += layers;
            stage
        };
        shares.map(stage).collect()
    }

    #[test]
    fn a_parameter_takes_sixteen_or_eighteen_bytes() {
        assert_eq!(StateBytes::ADAM.for_parameters(1000), 16_000);
        assert_eq!(StateBytes::ADAM_F32_GRADIENTS.for_parameters(1000), 18_000);
        assert_eq!(StateBytes::ADAM_F32.for_parameters(1000), 16_000);
        assert_eq!(StateBytes::FROZEN.for_parameters(1000), 2000);
        let sharded = StateBytes { optimizer_ranks: tp(8), ..StateBytes::ADAM };
        assert_eq!(sharded.for_parameters(1000), 4000 + 125 * 12);
        assert_eq!(sharded.for_parameters(1001), 4004 + 126 * 12);
        assert_eq!(StateBytes::ADAM.for_parameters(u64::MAX), u64::MAX);
    }

    #[test]
    fn stages_hold_the_whole_model() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            for count in [1, 2, 3, 4] {
                let llm = stages(spec.llm.layers, count).into_iter();
                let held: u64 = llm.map(|stage| stage.parameters(&spec.llm, tp(1))).sum();
                // tied embeddings are on the first and on the last stage
                let is_held_twice = spec.llm.details.has_tied_embeddings && count > 1;
                let copy = u64::from(spec.llm.vocab) * u64::from(spec.llm.hidden) * u64::from(is_held_twice);
                assert_eq!(held, spec.llm_parameters().total() + copy, "{name}");
                for ((_, encoder, _), (_, whole)) in spec.encoders().zip(spec.encoder_parameters()) {
                    let parts = stages(encoder.layers, count).into_iter();
                    let hidden = spec.llm.hidden;
                    let held: u64 =
                        parts.map(|stage| encoder_parameters(&encoder, hidden, stage, tp(1))).sum();
                    assert_eq!(held, whole.total(), "{name}");
                }
            }
        }
    }

    /// Qwen2.5-7B on 4 ranks, per layer: 7 of 28 query heads and 1 of 4 key heads with width 128 and biases,
    /// a quarter of the MLP, both norms.
    #[test]
    fn a_tensor_parallel_rank_holds_its_heads() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap().llm;
        let layer = StageLayers { layers: 1, first_layer: None, is_first: false, is_last: false };
        let projections = 2 * 3584 * (7 + 1) * 128 + (7 + 2) * 128;
        let expected = projections + 3 * 3584 * 18_944 / 4 + 2 * 3584;
        assert_eq!(layer.parameters(&spec, tp(4)), expected);
        // Eight ranks share 4 key heads: each still holds one.
        let eighth = 2 * 3584 * (4 + 1) * 128 + (4 + 2) * 128 + 3 * 3584 * 2368 + 2 * 3584;
        assert_eq!(layer.parameters(&spec, tp(8)), eighth);
        let last = StageLayers { layers: 0, first_layer: None, is_first: false, is_last: true };
        assert_eq!(last.parameters(&spec, tp(4)), 3584 + 152_064 / 4 * 3584);
    }

    #[test]
    fn a_tied_head_is_stored_again_on_another_stage() {
        let mut spec = ModelSpec::preset("tiny").unwrap().llm;
        spec.details.has_tied_embeddings = true;
        let embedding = 4096 * 256;
        let whole = StageLayers { layers: 4, first_layer: None, is_first: true, is_last: true };
        assert_eq!(whole.parameters(&spec, tp(1)), LlmParameters::new(&spec).total());
        let split: u64 = stages(4, 2).iter().map(|stage| stage.parameters(&spec, tp(1))).sum();
        assert_eq!(split, LlmParameters::new(&spec).total() + embedding);
    }
}
