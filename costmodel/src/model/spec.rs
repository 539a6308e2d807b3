//! Defines a model's sizes, from which FLOPs, parameters and tokens follow, and identifies model families.
//!
//! A [`ModelSpec`] is plain data. Its modules are its encoders and its LLM; code that iterates over encoders
//! uses [`ModelSpec::encoders`], so a new kind of encoder requires a field here, a [`Module`] and a
//! [`MediaRule`].

use super::LlmSpec;
use super::counts::EncoderCounts;
use crate::Module;
use crate::interned::Interned;
use crate::tokens::audio::AudioRule;
use crate::tokens::{EncoderWork, MediaRule, VisionRule};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::num::NonZeroU32;

/// Multimodal LLM: encoders, if any, and the LLM that reads encoder tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name in messages and reports.
    pub name: String,
    /// Checkpoint family; [`FamilyId::COMPOSED`] if the encoders belong to several families.
    #[serde(default)]
    pub family: FamilyId,
    /// Image and video encoder; `None` for a model without vision.
    pub vision: Option<VisionSpec>,
    /// Audio encoder; `None` for a model without audio.
    pub audio: Option<AudioSpec>,
    /// Language model.
    pub llm: LlmSpec,
}

impl ModelSpec {
    /// Iterates over the encoders in module order, each with the token rule.
    pub fn encoders(&self) -> impl Iterator<Item = (Module, EncoderSpec, MediaRule)> {
        let vision = self.vision.map(|seen| (Module::Vision, seen.encoder, MediaRule::Vision(seen.rule)));
        let audio = self.audio.map(|heard| (Module::Audio, heard.encoder, MediaRule::Audio(heard.rule)));
        [vision, audio].into_iter().flatten()
    }

    /// Whether a module is an encoder for native-size media, whose sequences differ in length:
    /// native-resolution images, audio in chunks.
    #[must_use]
    pub fn is_native(&self, module: Module) -> bool {
        let is_seen = |vision: &VisionSpec| vision.rule.is_native();
        let is_heard = |audio: &AudioSpec| audio.rule.is_native();
        match module {
            Module::Vision => self.vision.as_ref().is_some_and(is_seen),
            Module::Audio => self.audio.as_ref().is_some_and(is_heard),
            Module::Llm => false,
        }
    }
}

/// Vision encoder and token rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VisionSpec {
    /// Encoder family, which decides on placeholders, processor and blocks.
    #[serde(default)]
    pub family: FamilyId,
    /// Encoder with projector.
    pub encoder: EncoderSpec,
    /// Rule that converts pixels to encoder items and tokens.
    pub rule: VisionRule,
}

/// Audio encoder and token rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioSpec {
    /// Encoder family, which decides on placeholders, processor and blocks.
    #[serde(default)]
    pub family: FamilyId,
    /// Encoder with projector.
    pub encoder: EncoderSpec,
    /// Rule that converts seconds to windows and tokens.
    #[serde(default)]
    pub rule: AudioRule,
}

/// Transformer encoder with the projector into the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSpec {
    /// Number of transformer layers.
    pub layers: u32,
    /// Number of layers with windowed attention; at most `layers`.
    pub windowed_layers: u32,
    /// Encoder token width (hidden size).
    pub hidden: u32,
    /// Number of attention heads.
    pub heads: u32,
    /// Width between the MLP matrices.
    pub ffn: u32,
    /// MLP kind.
    pub mlp: Mlp,
    /// Multiply-adds per hidden unit in which the stem (patch embedding or convolutions) computes an encoder
    /// token: `3 * patch²` for images.
    pub stem_inputs: u32,
    /// Projector into the LLM.
    pub projector: Projector,
    /// Details beyond the sizes above; none by default.
    #[serde(default)]
    pub details: EncoderDetails,
    /// Counts that replace the formulas over sizes; `None` if these are exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Interned<EncoderCounts>>,
}

impl EncoderSpec {
    /// Returns the query-key pairs in a mean layer over layers with full attention and with windows, rounded
    /// to the nearest integer.
    #[must_use]
    pub fn mean_layer_pairs(&self, work: &EncoderWork) -> u64 {
        let windowed = u128::from(self.windowed_layers.min(self.layers));
        let layers = u128::from(self.layers.max(1));
        let full = layers - windowed;
        let all = full * u128::from(work.attention_pairs) + windowed * u128::from(work.window_pairs);
        u64::try_from((all + layers / 2) / layers).unwrap_or(u64::MAX)
    }
}

/// Rare encoder parts, and parameters outside the matrices.
///
/// With the default, FLOPs are a fraction of a percent off, and only the layer matrices count as parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct EncoderDetails {
    /// Number of tokens that the encoder adds to every item and drops before the projector.
    pub class_tokens: u32,
    /// Whether an attention pooling head runs after the layers, although the output is unused (SigLIP).
    pub has_pooling_head: bool,
    /// Number of layers at the end that run although an earlier layer's output is used; they have no backward
    /// pass.
    pub unused_layers: u32,
    /// Part of `stem_inputs` that reads the medium itself, which has no gradient.
    pub stem_medium_inputs: u32,
    /// Number of `hidden`-wide vectors per layer: biases, norms, scales.
    pub layer_vectors: u32,
    /// Number of `ffn`-wide vectors per layer: biases.
    pub layer_ffn_vectors: u32,
    /// Number of parameters outside the layers: stem, positions, class token, norms, but not the pooling
    /// head.
    pub outside_parameters: u64,
}

/// MLP kind in a transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// Two matrices.
    Plain,
    /// Three matrices, as in `SwiGLU`.
    Gated,
}

impl Mlp {
    /// Returns the number of `hidden` x `ffn` matrices.
    pub(crate) const fn matrices(self) -> u32 {
        match self {
            Self::Plain => 2,
            Self::Gated => 3,
        }
    }
}

/// Projector from encoder tokens to the LLM width; the cost counts as encoder cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Projector {
    /// Number of encoder tokens that become one projected token.
    pub merged_tokens: NonZeroU32,
    /// Input token width.
    pub input: u32,
    /// Width between the first matrix and the matrix into the LLM; `None` for a single matrix.
    pub middle: Option<u32>,
    /// Number of weights in additional matrices, which every projected token also goes through.
    #[serde(default)]
    pub further_weights: u64,
    /// Number of parameters outside the matrices: biases, norms, newline embeddings.
    #[serde(default)]
    pub vector_parameters: u64,
    /// Number of further projectors with matrices of the same sizes: each projects an earlier encoder layer,
    /// and the LLM adds the output to the hidden states after one of its first layers.
    ///
    /// # Source
    /// Meng et al., "`DeepStack`", 2024, arXiv:2406.04334.
    #[serde(default)]
    pub deepstack: u32,
}

impl Projector {
    /// Creates a projector without parameters outside the matrices; `merged_tokens` = 0 counts as 1.
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

    /// Adds projectors for earlier layers, each with separate parameters outside the matrices.
    pub(crate) const fn deepstacked(mut self, projectors: u32, vectors_each: u64) -> Self {
        self.deepstack = projectors;
        self.vector_parameters =
            self.vector_parameters.saturating_add(vectors_each.saturating_mul(projectors as u64));
        self
    }

    /// Returns the number of projectors, including projectors for earlier layers.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.deepstack as u64 + 1
    }
}

/// Model family name, such as `qwen2_vl`: the `model_type` in the family's checkpoints.
///
/// Readers and presets set it, and [`ModelSpec`](crate::ModelSpec) stores it: nothing else about a model
/// decides the family. Any name is possible, so that families can be added outside this crate.
///
/// # Examples
/// ```
/// use dflop_costmodel::{FamilyId, ModelSpec};
///
/// const OWN: FamilyId = FamilyId::new("my_vlm");
/// assert_eq!(OWN.as_str(), "my_vlm");
/// assert_ne!(ModelSpec::preset("qwen2-vl-7b").unwrap().family, OWN);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FamilyId {
    bytes: [u8; Self::BYTES_MAX],
    len: u8,
}

impl FamilyId {
    /// Maximum name length in bytes.
    pub const BYTES_MAX: usize = 32;
    /// Family for a specification that was written without a family.
    pub const UNKNOWN: Self = Self::new("");
    /// Family for a model whose encoders belong to several families.
    pub const COMPOSED: Self = Self::new("composed");

    /// Creates the id for a name.
    ///
    /// # Panics
    /// If the name has more than [`BYTES_MAX`](Self::BYTES_MAX) bytes; a constant then does not compile.
    #[must_use]
    pub const fn new(name: &str) -> Self {
        assert!(name.len() <= Self::BYTES_MAX, "the name of a model family has at most 32 bytes");
        let mut bytes = [0; Self::BYTES_MAX];
        let mut at = 0;
        while at < name.len() {
            bytes[at] = name.as_bytes()[at];
            at += 1;
        }
        Self { bytes, len: name.len() as u8 }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl Default for FamilyId {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

impl fmt::Display for FamilyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for FamilyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FamilyId({:?})", self.as_str())
    }
}

impl Serialize for FamilyId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for FamilyId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name.len() > Self::BYTES_MAX {
            let problem = format!("the name of a model family has at most {} bytes", Self::BYTES_MAX);
            return Err(de::Error::custom(problem));
        }
        Ok(Self::new(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_survives_json_and_a_long_name_is_an_error() {
        let family = FamilyId::new("qwen2_5_vl");
        let json = serde_json::to_string(&family).unwrap();
        assert_eq!(json, "\"qwen2_5_vl\"");
        assert_eq!(serde_json::from_str::<FamilyId>(&json).unwrap(), family);
        assert!(serde_json::from_str::<FamilyId>(&format!("\"{}\"", "x".repeat(33))).is_err());
        assert_eq!(
            (format!("{family}"), format!("{family:?}")),
            ("qwen2_5_vl".into(), r#"FamilyId("qwen2_5_vl")"#.into())
        );
    }
}
