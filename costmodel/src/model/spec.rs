//! Models: the dimensions that FLOPs, parameters and tokens follow from.
//!
//! A [`ModelSpec`] is plain data: one of the presets ([`ModelSpec::preset`]), read from the `config.json` of a
//! checkpoint ([`crate::model::config`]), or written down with serde. Its modules are its encoders and its LLM;
//! whatever walks over modules does so through [`ModelSpec::encoders`], so that a further kind of encoder
//! is a field here, a [`Module`] and a [`MediaRule`], and nothing else.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::module::Module;
use crate::tokens::audio::AudioRule;
use crate::tokens::{MediaRule, VisionRule};

/// A multimodal LLM: encoders, if any, and the LLM that reads their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name in messages and reports.
    pub name: String,
    /// Encoder of images and videos; `None` for a model that cannot see.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio; `None` for a model that cannot hear.
    pub audio: Option<AudioSpec>,
    /// The language model.
    pub llm: LlmSpec,
}

impl ModelSpec {
    /// Returns the encoders in the order of the modules, each with the rule that says its work.
    pub fn encoders(&self) -> impl Iterator<Item = (Module, EncoderSpec, MediaRule)> {
        let vision = self.vision.map(|seen| (Module::Vision, seen.encoder, MediaRule::Vision(seen.rule)));
        let audio = self.audio.map(|heard| (Module::Audio, heard.encoder, MediaRule::Audio(heard.rule)));
        [vision, audio].into_iter().flatten()
    }
}

/// How a model sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VisionSpec {
    /// The encoder and its projector.
    pub encoder: EncoderSpec,
    /// From pixels to encoder items and tokens.
    pub rule: VisionRule,
}

/// How a model hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioSpec {
    /// The encoder and its projector.
    pub encoder: EncoderSpec,
    /// From seconds to windows and tokens.
    #[serde(default)]
    pub rule: AudioRule,
}

/// A transformer encoder with the projector into the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSpec {
    /// Transformer layers.
    pub layers: u32,
    /// Those of the layers whose attention is windowed; at most `layers`.
    pub windowed_layers: u32,
    /// Width of an encoder token.
    pub hidden: u32,
    /// Attention heads.
    pub heads: u32,
    /// Width between the matrices of the MLP.
    pub ffn: u32,
    /// Kind of MLP.
    pub mlp: Mlp,
    /// Multiply-adds per hidden unit with which the stem, patch embedding or convolutions, makes one
    /// encoder token: `3 * patch²` for images.
    pub stem_inputs: u32,
    /// The way into the LLM.
    pub projector: Projector,
    /// What the dimensions above leave open; nothing of it by default.
    #[serde(default)]
    pub details: EncoderDetails,
}

/// Parts of an encoder that few have, and the parameters outside its matrices.
///
/// Left at its default, FLOPs are a fraction of a percent off and parameters count matrices of layers alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct EncoderDetails {
    /// Tokens that the encoder adds to every item and drops again before the projector.
    pub class_tokens: u32,
    /// Whether an attention pooling head runs behind the layers, whose output no one uses (SigLIP).
    pub has_pooling_head: bool,
    /// Layers at the end that run, though an earlier layer's output is taken; nothing flows back through them.
    pub unused_layers: u32,
    /// Those of `stem_inputs` that read the medium itself, to which no gradient is computed.
    pub stem_medium_inputs: u32,
    /// Vectors of width `hidden` in a layer: biases, norms, scales.
    pub layer_vectors: u32,
    /// Vectors of width `ffn` in a layer: biases.
    pub layer_ffn_vectors: u32,
    /// Parameters outside the layers: stem, positions, class token, norms, but not the pooling head.
    pub outside_parameters: u64,
}

/// The MLP of a transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// Two matrices.
    Plain,
    /// Three matrices, as in `SwiGLU`.
    Gated,
}

impl Mlp {
    /// Matrices of `hidden` x `ffn`.
    pub(crate) const fn matrices(self) -> u32 {
        match self {
            Self::Plain => 2,
            Self::Gated => 3,
        }
    }
}

/// The projector from encoder tokens to the width of the LLM; charged to the encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Projector {
    /// Encoder tokens that become one projected token.
    pub merged_tokens: NonZeroU32,
    /// Width of a token that enters.
    pub input: u32,
    /// Width between the two matrices; `None` for a single matrix.
    pub middle: Option<u32>,
    /// Parameters outside the matrices: biases, norms, newline embeddings.
    #[serde(default)]
    pub vector_parameters: u64,
}

impl Projector {
    /// A projector without parameters outside its matrices; no merging for `merged_tokens` = 0.
    pub(crate) const fn new(merged_tokens: u32, input: u32, middle: Option<u32>) -> Self {
        let merged_tokens = match NonZeroU32::new(merged_tokens) {
            Some(merged_tokens) => merged_tokens,
            None => NonZeroU32::MIN,
        };
        Self { merged_tokens, input, middle, vector_parameters: 0 }
    }

    pub(crate) const fn vectors(mut self, parameters: u64) -> Self {
        self.vector_parameters = parameters;
        self
    }
}

/// A decoder-only language model with grouped-query attention and gated MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LlmSpec {
    /// Transformer layers.
    pub layers: u32,
    /// Width of a token.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Width between the matrices of the MLP.
    pub ffn: u32,
    /// Rows of the LM head, padding included.
    pub vocab: u32,
    /// What parameters follow from beside the matrices; nothing of it by default.
    #[serde(default)]
    pub details: LlmDetails,
}

/// Parts of an LLM that change its parameters and not its FLOPs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct LlmDetails {
    /// Biases of the attention's projections.
    pub attention_bias: AttentionBias,
    /// Whether the three matrices of the MLP have biases.
    pub has_mlp_bias: bool,
    /// Whether queries and keys are normalized, with a scale of the width of a head each.
    pub has_qk_norm: bool,
    /// Whether the LM head is the embedding.
    pub has_tied_embeddings: bool,
}

/// Which projections of an attention have a bias.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionBias {
    /// None, as in Llama.
    #[default]
    None,
    /// Queries, keys and values, as in Qwen2.
    Qkv,
    /// The output as well.
    All,
}
