//! Counts the parameters of a model exactly, by module and by layer.
//!
//! Counts equal the parameters of transformers 4.57.1, with which `costmodel/tests/flops.rs` compares them;
//! memory of a pipeline stage follows from them.

use serde::Serialize;

use crate::model::{AttentionBias, EncoderSpec, LlmSpec, ModelSpec};
use crate::module::Module;

/// Parameters of an encoder and its projector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct EncoderParameters {
    /// Parameters of one transformer layer.
    pub layer: u64,
    /// Transformer layers.
    pub layers: u32,
    /// Parameters outside the layers: stem, positions, class token, norms, pooling head.
    pub outside: u64,
    /// Parameters of the projector, with those of earlier layers.
    pub projector: u64,
}

/// Parameters of an LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct LlmParameters {
    /// Parameters of one transformer layer.
    pub layer: u64,
    /// Transformer layers.
    pub layers: u32,
    /// Parameters of the embedding, which the first stage holds.
    pub embedding: u64,
    /// Parameters of the norm after the layers.
    pub last_norm: u64,
    /// Parameters of the LM head, which the last stage holds; 0 where it shares the embedding's weights.
    pub head: u64,
}

impl EncoderParameters {
    /// Counts an encoder for an LLM of width `llm_hidden`.
    #[must_use]
    pub fn new(spec: &EncoderSpec, llm_hidden: u32) -> Self {
        let details = &spec.details;
        let layer = sum([
            product([4, spec.hidden, spec.hidden]),
            product([spec.mlp.matrices(), spec.hidden, spec.ffn]),
            product([details.layer_vectors, spec.hidden]),
            product([details.layer_ffn_vectors, spec.ffn]),
        ]);
        let projector = match spec.projector.middle {
            Some(middle) => sum([product([spec.projector.input, middle]), product([middle, llm_hidden])]),
            None => product([spec.projector.input, llm_hidden]),
        };
        let pooling = if details.has_pooling_head { pooling_head(spec) } else { 0 };
        Self {
            layer,
            layers: spec.layers,
            outside: details.outside_parameters.saturating_add(pooling),
            projector: projector
                .saturating_mul(spec.projector.count())
                .saturating_add(spec.projector.vector_parameters),
        }
    }

    /// Returns the parameters of the encoder without its projector, saturating.
    #[must_use]
    pub const fn tower(&self) -> u64 {
        self.layer.saturating_mul(self.layers as u64).saturating_add(self.outside)
    }

    /// Returns the parameters of encoder and projector, saturating.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.tower().saturating_add(self.projector)
    }
}

/// Counts the pooling head: the probe, an attention with biases, a norm and an MLP with biases.
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
        let details = &spec.details;
        let queries = product([spec.heads, spec.head_dim]);
        let keys = product([spec.kv_heads, spec.head_dim]);
        let hidden = u64::from(spec.hidden);
        // Queries and output have `hidden x queries` weights each, keys and values `hidden x keys`.
        let projections = hidden.saturating_mul(2).saturating_mul(queries.saturating_add(keys));
        let qkv_bias = queries.saturating_add(keys.saturating_mul(2));
        let attention_bias = match details.attention_bias {
            AttentionBias::None => 0,
            AttentionBias::Qkv => qkv_bias,
            AttentionBias::All => qkv_bias.saturating_add(hidden),
        };
        let mlp_bias = if details.has_mlp_bias { sum([product([2, spec.ffn]), hidden]) } else { 0 };
        let qk_norm = if details.has_qk_norm { product([2, spec.head_dim]) } else { 0 };
        let norms = hidden.saturating_mul(2);
        let mlp = product([3, spec.hidden, spec.ffn]);
        let embedding = product([spec.vocab, spec.hidden]);
        Self {
            layer: sum([projections, attention_bias, mlp, mlp_bias, qk_norm, norms]),
            layers: spec.layers,
            embedding,
            last_norm: hidden,
            head: if details.has_tied_embeddings { 0 } else { embedding },
        }
    }

    /// Returns all parameters, saturating.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.layer
            .saturating_mul(self.layers as u64)
            .saturating_add(self.embedding)
            .saturating_add(self.last_norm)
            .saturating_add(self.head)
    }
}

impl ModelSpec {
    /// Returns the parameters of each encoder with its projector, in the order of the modules.
    #[must_use]
    pub fn encoder_parameters(&self) -> Vec<(Module, EncoderParameters)> {
        let count = |(module, encoder, _)| (module, EncoderParameters::new(&encoder, self.llm.hidden));
        self.encoders().map(count).collect()
    }

    /// Returns the parameters of the LLM, embedding and LM head included.
    #[must_use]
    pub fn llm_parameters(&self) -> LlmParameters {
        LlmParameters::new(&self.llm)
    }

    /// Returns the parameters of the whole model, saturating.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let encoders = self.encoder_parameters();
        let llm = self.llm_parameters().total();
        encoders.iter().fold(llm, |total, (_, encoder)| total.saturating_add(encoder.total()))
    }
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

    /// Sizes of the published checkpoints, from the model cards' tensors: Llama 3 and Qwen2.5.
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
