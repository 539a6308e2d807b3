//! Counts a model's parameters exactly, by module and by layer.
//!
//! Counts equal transformers' parameters, with which `costmodel/tests/flops.rs` and `llm_flops.rs` compare
//! them; pipeline stage memory follows from them.

use std::ops::Range;

use serde::Serialize;

use crate::Module;
use crate::interned::Interned;
use crate::model::counts::{LayerParameters, LlmCounts};
use crate::model::{AttentionBias, EncoderSpec, LayerSet, LlmSpec, ModelSpec};

/// Parameters in an encoder with projector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct EncoderParameters {
    /// Number of parameters in a transformer layer.
    pub layer: u64,
    /// Number of transformer layers.
    pub layers: u32,
    /// Number of parameters outside the layers: stem, positions, class token, norms, pooling head.
    pub outside: u64,
    /// Number of parameters in the projector, including projectors for earlier layers.
    pub projector: u64,
}

/// Parameters in an LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct LlmParameters {
    /// Number of parameters in a layer with an MLP.
    pub dense_layer: u64,
    /// Number of parameters in a layer with experts, all experts included; 0 without experts.
    pub sparse_layer: u64,
    /// Number of expert parameters in such a layer, which expert parallelism divides, without shared experts.
    pub experts: u64,
    /// Number of expert parameters in such a layer that a token goes through.
    pub active_experts: u64,
    /// Number of transformer layers.
    pub layers: u32,
    /// Layers with experts.
    pub sparse_layers: LayerSet,
    /// Number of embedding parameters, which the first stage holds.
    pub embedding: u64,
    /// Number of parameters in the norm after the layers.
    pub last_norm: u64,
    /// Number of LM head parameters, which the last stage holds; 0 if it shares the embedding's weights.
    pub head: u64,
    /// Counted layers, and the TP degree that divides them; `None` if layers follow from sizes.
    #[serde(skip)]
    counts: Option<(Interned<LlmCounts>, u32)>,
}

impl EncoderParameters {
    /// Counts an encoder for an LLM with width `llm_hidden`.
    #[must_use]
    pub fn new(spec: &EncoderSpec, llm_hidden: u32) -> Self {
        let details = &spec.details;
        let by_sizes = sum([
            product([4, spec.hidden, spec.hidden]),
            product([spec.mlp.matrices(), spec.hidden, spec.ffn]),
            product([details.layer_vectors, spec.hidden]),
            product([details.layer_ffn_vectors, spec.ffn]),
        ]);
        // Counted layers may differ: each has the mean, and what remains is outside the layers.
        let (layer, rest) = match (spec.counts, spec.layers) {
            (Some(counts), 1..) => {
                let layers = u64::from(spec.layers);
                (counts.layer_parameters / layers, counts.layer_parameters % layers)
            }
            _ => (by_sizes, 0),
        };
        let projector = match spec.projector.middle {
            Some(middle) => sum([product([spec.projector.input, middle]), product([middle, llm_hidden])]),
            None => product([spec.projector.input, llm_hidden]),
        };
        let pooling = if details.has_pooling_head { pooling_head(spec) } else { 0 };
        Self {
            layer,
            layers: spec.layers,
            outside: sum([details.outside_parameters, pooling, rest]),
            projector: sum([
                projector.saturating_mul(spec.projector.count()),
                spec.projector.further_weights,
                spec.projector.vector_parameters,
            ]),
        }
    }

    /// Returns the number of parameters in the encoder without projector, saturating.
    #[must_use]
    pub const fn tower(&self) -> u64 {
        self.layer.saturating_mul(self.layers as u64).saturating_add(self.outside)
    }

    /// Returns the number of parameters in encoder and projector, saturating.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.tower().saturating_add(self.projector)
    }
}

/// Counts the pooling head: the probe, attention with biases, a norm and an MLP with biases.
fn pooling_head(spec: &EncoderSpec) -> u64 {
    sum([
        product([4, spec.hidden, spec.hidden]),
        product([2, spec.hidden, spec.ffn]),
        product([8, spec.hidden]), // probe, 4 biases, norm, bias of the MLP
        product([1, spec.ffn]),
    ])
}

impl LlmParameters {
    /// Counts an LLM.
    #[must_use]
    pub fn new(spec: &LlmSpec) -> Self {
        if let Some(counts) = spec.counts {
            return Self::counted(spec, counts, 1);
        }
        let details = &spec.details;
        let hidden = u64::from(spec.hidden);
        let mlp_bias = if details.has_mlp_bias { sum([product([2, spec.ffn]), hidden]) } else { 0 };
        let norms = hidden.saturating_mul(if details.has_post_norms { 4 } else { 2 });
        let around = sum([narrow(spec.attention_weights()), attention_vectors(spec), norms]);
        let (mut experts, mut active_experts, mut sparse_layer) = (0, 0, 0);
        if let Some(mixture) = &spec.experts {
            let biases =
                if mixture.details.has_biases { sum([product([2, mixture.ffn]), hidden]) } else { 0 };
            let one = narrow(spec.expert_weights()).saturating_add(biases);
            experts = one.saturating_mul(u64::from(mixture.experts));
            active_experts = one.saturating_mul(u64::from(mixture.experts_per_token));
            let router_bias = if mixture.details.has_router_bias { u64::from(mixture.experts) } else { 0 };
            sparse_layer = sum([around, narrow(spec.around_experts_weights()), router_bias, experts]);
        }
        let embedding = product([spec.vocab, spec.hidden]);
        Self {
            dense_layer: sum([around, narrow(spec.mlp_weights()), mlp_bias]),
            sparse_layer,
            experts,
            active_experts,
            layers: spec.layers,
            sparse_layers: spec.sparse_layers(),
            embedding,
            last_norm: hidden,
            head: if details.has_tied_embeddings { 0 } else { embedding },
            counts: None,
        }
    }

    /// Returns the counted parameters on one rank in a TP group.
    ///
    /// `dense_layer` and `sparse_layer` are the largest of such layers.
    pub(crate) fn counted(spec: &LlmSpec, counts: Interned<LlmCounts>, tp: u32) -> Self {
        let split = |parameters: u64| parameters.div_ceil(u64::from(tp.max(1)));
        let largest = |has_experts: bool, size: fn(&LayerParameters) -> u64| {
            let runs = counts.runs.iter().filter(|run| (run.experts > 0) == has_experts);
            runs.map(|run| size(&run.on_rank(tp))).max().unwrap_or(0)
        };
        Self {
            dense_layer: largest(false, |layer| layer.all),
            sparse_layer: largest(true, |layer| layer.all),
            experts: largest(true, |layer| layer.experts),
            active_experts: largest(true, |layer| layer.active_experts),
            layers: spec.layers,
            sparse_layers: spec.sparse_layers(),
            embedding: split(counts.embedding),
            last_norm: counts.outside,
            head: split(counts.head_parameters),
            counts: Some((counts, tp)),
        }
    }

    /// Adds up a size over counted layers in a range; `None` if layers follow from sizes.
    fn counted_sum(&self, layers: &Range<u32>, size: fn(&LayerParameters) -> u64) -> Option<u64> {
        let (counts, tp) = self.counts?;
        let (mut first, mut sum) = (0_u32, 0_u64);
        for run in &counts.runs {
            let end = first.saturating_add(run.layers);
            let shared = layers.end.min(end).saturating_sub(layers.start.max(first));
            sum = sum.saturating_add(size(&run.on_rank(tp)).saturating_mul(u64::from(shared)));
            first = end;
        }
        Some(sum)
    }

    /// Returns the number of parameters in some layers, saturating.
    #[must_use]
    pub fn layer_parameters(&self, layers: Range<u32>) -> u64 {
        if let Some(counted) = self.counted_sum(&layers, |layer| layer.all) {
            return counted;
        }
        let all = u64::from(layers.end.saturating_sub(layers.start));
        let sparse = self.sparse_layer_count(layers);
        let dense = all.saturating_sub(sparse).saturating_mul(self.dense_layer);
        dense.saturating_add(sparse.saturating_mul(self.sparse_layer))
    }

    /// Returns the number of expert parameters in some layers, saturating.
    #[must_use]
    pub fn experts_of_layers(&self, layers: Range<u32>) -> u64 {
        if let Some(counted) = self.counted_sum(&layers, |layer| layer.experts) {
            return counted;
        }
        self.sparse_layer_count(layers).saturating_mul(self.experts)
    }

    /// Returns the total number of parameters, saturating.
    #[must_use]
    pub fn total(&self) -> u64 {
        sum([self.layer_parameters(0..self.layers), self.embedding, self.last_norm, self.head])
    }

    /// Returns the number of parameters that a token goes through: all except the experts that it is not
    /// routed to, saturating.
    #[must_use]
    pub fn active(&self) -> u64 {
        let idle = self.experts.saturating_sub(self.active_experts);
        let layers = self.sparse_layer_count(0..self.layers);
        let counted =
            self.counted_sum(&(0..self.layers), |run| run.experts.saturating_sub(run.active_experts));
        self.total().saturating_sub(counted.unwrap_or_else(|| idle.saturating_mul(layers)))
    }

    fn sparse_layer_count(&self, layers: Range<u32>) -> u64 {
        let below = |end: u32| u64::from(self.sparse_layers.len_below(end));
        below(layers.end).saturating_sub(below(layers.start))
    }
}

/// Counts attention biases, norms inside attention, and sinks.
fn attention_vectors(spec: &LlmSpec) -> u64 {
    let details = &spec.details;
    let hidden = u64::from(spec.hidden);
    let queries = product([spec.heads, spec.head_dim]);
    let keys = product([spec.kv_heads, spec.head_dim]);
    let mut vectors = 0_u64;
    let mut add = |parameters: u64| vectors = vectors.saturating_add(parameters);
    match spec.latent {
        // A head's queries and keys are never projected separately; their latent vectors are normalized.
        Some(latent) => {
            let query_rank = u64::from(latent.query_rank.unwrap_or(0));
            add(query_rank.saturating_add(u64::from(latent.kv_rank)));
            if details.attention_bias == AttentionBias::All {
                let into_keys = u64::from(latent.kv_rank) + u64::from(latent.rotated_dim);
                add(sum([query_rank, into_keys, hidden]));
            }
        }
        None => add(match details.attention_bias {
            AttentionBias::None => 0,
            AttentionBias::Qkv => sum([queries, keys, keys]),
            AttentionBias::All => sum([queries, keys, keys, hidden]),
        }),
    }
    if details.has_qk_norm {
        add(product([2, spec.head_dim]));
    }
    if details.has_wide_qk_norm {
        add(queries.saturating_add(keys));
    }
    if details.has_sinks {
        add(u64::from(spec.heads));
    }
    vectors
}

impl ModelSpec {
    /// Returns the parameters for each encoder with projector, in module order.
    #[must_use]
    pub fn encoder_parameters(&self) -> Vec<(Module, EncoderParameters)> {
        let count = |(module, encoder, _)| (module, EncoderParameters::new(&encoder, self.llm.hidden));
        self.encoders().map(count).collect()
    }

    /// Returns the LLM parameters, embedding and LM head included.
    #[must_use]
    pub fn llm_parameters(&self) -> LlmParameters {
        LlmParameters::new(&self.llm)
    }

    /// Returns the number of parameters in the whole model, saturating.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let encoders = self.encoder_parameters();
        let llm = self.llm_parameters().total();
        encoders.iter().fold(llm, |total, (_, encoder)| total.saturating_add(encoder.total()))
    }
}

/// Converts a weight count, saturating.
fn narrow(weights: u128) -> u64 {
    u64::try_from(weights).unwrap_or(u64::MAX)
}

fn product<const N: usize>(factors: [u32; N]) -> u64 {
    factors.into_iter().fold(1, |product: u64, factor| product.saturating_mul(u64::from(factor)))
}

fn sum<const N: usize>(terms: [u64; N]) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published checkpoint sizes, from the model cards' tensors: Llama 3 and Qwen2.5.
    #[test]
    fn language_models_have_their_published_parameters() {
        for (name, parameters) in [
            ("llava-ov-llama3-8b", 8_030_261_248),
            ("llava-ov-llama3-70b", 70_553_706_496),
            ("llava-ov-qwen2.5-7b", 7_615_616_512),
            ("llava-ov-qwen2.5-32b", 32_763_876_352),
            ("llava-ov-qwen2.5-72b", 72_706_203_648),
        ] {
            let spec = ModelSpec::preset(name).unwrap();
            assert_eq!(spec.llm_parameters().total(), parameters, "{name}");
        }
    }

    #[test]
    fn modules_add_up() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let encoders: u64 = spec.encoder_parameters().iter().map(|(_, encoder)| encoder.total()).sum();
            assert_eq!(spec.parameters(), encoders + spec.llm_parameters().total());
        }
    }
}
