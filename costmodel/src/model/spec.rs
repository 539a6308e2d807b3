//! Defines the sizes of a model, from which FLOPs, parameters and tokens follow.
//!
//! A [`ModelSpec`] is plain data. Its modules are its encoders and its LLM; code that iterates over encoders
//! uses [`ModelSpec::encoders`], so that a new kind of encoder takes a field here, a [`Module`] and a
//! [`MediaRule`].

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{FamilyId, LlmSpec};
use crate::module::Module;
use crate::tokens::audio::AudioRule;
use crate::tokens::{EncoderWork, MediaRule, VisionRule};

/// Multimodal LLM: encoders, if any, and the LLM that reads their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name in messages and reports.
    pub name: String,
    /// Family of the checkpoint; [`FamilyId::COMPOSED`] if its encoders are of several.
    #[serde(default)]
    pub family: FamilyId,
    /// Encoder of images and videos; `None` for a model without vision.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio; `None` for a model without audio.
    pub audio: Option<AudioSpec>,
    /// Language model.
    pub llm: LlmSpec,
}

impl ModelSpec {
    /// Iterates over the encoders in the order of the modules, each with its token rule.
    pub fn encoders(&self) -> impl Iterator<Item = (Module, EncoderSpec, MediaRule)> {
        let vision = self.vision.map(|seen| (Module::Vision, seen.encoder, MediaRule::Vision(seen.rule)));
        let audio = self.audio.map(|heard| (Module::Audio, heard.encoder, MediaRule::Audio(heard.rule)));
        [vision, audio].into_iter().flatten()
    }

    /// Whether a module is an encoder of media of their own size, whose sequences differ in length: images in
    /// native resolution, audio in chunks.
    #[must_use]
    pub fn is_native(&self, module: Module) -> bool {
        let is_seen = |vision: &VisionSpec| vision.rule.is_native();
        let is_heard = |audio: &AudioSpec| matches!(audio.rule, AudioRule::Chunks(_));
        match module {
            Module::Vision => self.vision.as_ref().is_some_and(is_seen),
            Module::Audio => self.audio.as_ref().is_some_and(is_heard),
            Module::Llm => false,
        }
    }
}

/// Vision encoder and its token rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VisionSpec {
    /// Family of the encoder, which decides on placeholders, processor and blocks.
    #[serde(default)]
    pub family: FamilyId,
    /// Encoder and its projector.
    pub encoder: EncoderSpec,
    /// Rule that turns pixels into encoder items and tokens.
    pub rule: VisionRule,
}

/// Audio encoder and its token rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioSpec {
    /// Family of the encoder, which decides on placeholders, processor and blocks.
    #[serde(default)]
    pub family: FamilyId,
    /// Encoder and its projector.
    pub encoder: EncoderSpec,
    /// Rule that turns seconds into windows and tokens.
    #[serde(default)]
    pub rule: AudioRule,
}

/// Transformer encoder with the projector into the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSpec {
    /// Transformer layers.
    pub layers: u32,
    /// Layers whose attention is windowed; at most `layers`.
    pub windowed_layers: u32,
    /// Width of an encoder token.
    pub hidden: u32,
    /// Attention heads.
    pub heads: u32,
    /// Width between the matrices of the MLP.
    pub ffn: u32,
    /// Kind of MLP.
    pub mlp: Mlp,
    /// Multiply-adds per hidden unit in which the stem (patch embedding or convolutions) makes one encoder
    /// token: `3 * patch²` for images.
    pub stem_inputs: u32,
    /// Projector into the LLM.
    pub projector: Projector,
    /// Details beyond the sizes above; none by default.
    #[serde(default)]
    pub details: EncoderDetails,
}

impl EncoderSpec {
    /// Returns the query-key pairs of a mean layer over those with full attention and with windows, to the
    /// nearest integer.
    #[must_use]
    pub fn mean_layer_pairs(&self, work: &EncoderWork) -> u64 {
        let windowed = u128::from(self.windowed_layers.min(self.layers));
        let layers = u128::from(self.layers.max(1));
        let full = layers - windowed;
        let all = full * u128::from(work.attention_pairs) + windowed * u128::from(work.window_pairs);
        u64::try_from((all + layers / 2) / layers).unwrap_or(u64::MAX)
    }
}

/// Rare parts of an encoder, and the parameters outside its matrices.
///
/// With the default, FLOPs are a fraction of a percent off, and only the matrices of layers count as
/// parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct EncoderDetails {
    /// Tokens that the encoder adds to every item and drops before the projector.
    pub class_tokens: u32,
    /// Whether an attention pooling head runs after the layers, although its output is unused (SigLIP).
    pub has_pooling_head: bool,
    /// Layers at the end that run although the output of an earlier layer is taken; they have no backward
    /// pass.
    pub unused_layers: u32,
    /// Part of `stem_inputs` that reads the medium itself, which has no gradient.
    pub stem_medium_inputs: u32,
    /// Vectors of width `hidden` in a layer: biases, norms, scales.
    pub layer_vectors: u32,
    /// Vectors of width `ffn` in a layer: biases.
    pub layer_ffn_vectors: u32,
    /// Parameters outside the layers: stem, positions, class token, norms, but not the pooling head.
    pub outside_parameters: u64,
}

/// Kind of MLP of a transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// Two matrices.
    Plain,
    /// Three matrices, as in `SwiGLU`.
    Gated,
}

impl Mlp {
    /// Returns the number of matrices of `hidden` x `ffn`.
    pub(crate) const fn matrices(self) -> u32 {
        match self {
            Self::Plain => 2,
            Self::Gated => 3,
        }
    }
}

/// Projector from encoder tokens to the width of the LLM; its cost counts as the encoder's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Projector {
    /// Encoder tokens that become one projected token.
    pub merged_tokens: NonZeroU32,
    /// Width of an input token.
    pub input: u32,
    /// Width between the first matrix and the one into the LLM; `None` for a single matrix.
    pub middle: Option<u32>,
    /// Weights of the matrices besides these, through which every projected token goes as well.
    #[serde(default)]
    pub further_weights: u64,
    /// Parameters outside the matrices: biases, norms, newline embeddings.
    #[serde(default)]
    pub vector_parameters: u64,
    /// Further projectors with matrices of the same sizes: each projects an earlier layer of the encoder, and
    /// the LLM adds its output to the hidden states after one of its first layers.
    ///
    /// # Source
    /// Meng et al., "`DeepStack`", 2024, arXiv:2406.04334.
    #[serde(default)]
    pub deepstack: u32,
}

impl Projector {
    /// Makes a projector without parameters outside its matrices; `merged_tokens` = 0 counts as 1.
    pub(crate) const fn new(merged_tokens: u32, input: u32, middle: Option<u32>) -> Self {
        let merged_tokens = match NonZeroU32::new(merged_tokens) {
            Some(merged_tokens) => merged_tokens,
            None => NonZeroU32::MIN,
        };
        Self { merged_tokens, input, middle, further_weights: 0, vector_parameters: 0, deepstack: 0 }
    }

    pub(crate) const fn further(mut self, weights: u64) -> Self {
        self.further_weights = weights;
        self
    }

    pub(crate) const fn vectors(mut self, parameters: u64) -> Self {
        self.vector_parameters = parameters;
        self
    }

    /// Adds projectors of earlier layers, each with its own parameters outside the matrices.
    pub(crate) const fn deepstacked(mut self, projectors: u32, vectors_each: u64) -> Self {
        self.deepstack = projectors;
        self.vector_parameters =
            self.vector_parameters.saturating_add(vectors_each.saturating_mul(projectors as u64));
        self
    }

    /// Number of projectors, those of earlier layers included.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.deepstack as u64 + 1
    }
}
