//! Builds encoder and decoder configurations for a model family, from checkpoints or only from sizes.
//!
//! Each file contains one family; [`ModelConfig`] is the configuration of a complete model. [`BlockFamilies`]
//! finds the family by the `model_type` in a checkpoint or by the id in a
//! [`ModelSpec`](dflop_costmodel::ModelSpec), among built-in and user-defined families.
//!
//! Every family implements [`FamilyBlocks`], and builds its blocks from the sizes and fields in a
//! [`BlockSource`].

mod clip_siglip;
mod fixed_resolution;
mod gemma3;
mod intern_vl;
mod language_models;
mod llama4;
mod llava_onevision;
mod model_config;
mod qwen2_5_omni;
mod qwen2_audio;
mod qwen3_vl;
mod qwen_vl;
mod registry;
mod routing;
mod text_models;

use crate::encoder::{EncoderConfig, INIT};
use crate::error::{Error, Result};
use crate::layers::{AttentionMask, AttentionSpec, FeedForwardSpec, MlpNames, MlpSpec, QkvNames};
use crate::llm::LlmConfig;
use dflop_costmodel::FamilyId;
use dflop_costmodel::config::{CONFIG_FILE, ConfigFields, PartialModelSpec};
use dflop_costmodel::model::{AudioSpec, EncoderSpec, LlmSpec, VisionSpec};
use dflop_device::ops::activation::Activation;
use std::fmt::Debug;

pub use language_models::{DecoderDefaults, decoder};
pub use model_config::{FrozenModules, ModelConfig, ModuleKind, StageRange};
pub use registry::BlockFamilies;

/// Built-in families by file.
static BUILT_IN: &[&[&dyn FamilyBlocks]] = &[
    text_models::FAMILIES,
    llama4::FAMILIES,
    qwen_vl::FAMILIES,
    qwen3_vl::FAMILIES,
    llava_onevision::FAMILIES,
    intern_vl::FAMILIES,
    qwen2_audio::FAMILIES,
    qwen2_5_omni::FAMILIES,
    gemma3::FAMILIES,
    clip_siglip::FAMILIES,
];

/// Reads an activation name.
fn activation(fields: &ConfigFields<'_>, key: &str, default: Activation) -> Result<Activation> {
    match fields.text(key)? {
        None => Ok(default),
        Some("gelu") => Ok(Activation::GeluExact),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("quick_gelu") => Ok(Activation::GeluQuick),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some(other) => {
            Err(fields.invalid(key, format!("= \"{other}\" is not a supported activation")).into())
        }
    }
}

/// Returns encoder attention in which all rows in an image or audio clip attend to each other.
#[must_use]
pub fn full_attention(spec: &EncoderSpec, qkv: QkvNames, output: String) -> AttentionSpec {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    AttentionSpec {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        qkv,
        output: (output, true),
        qk_norm: None,
        sinks: None,
        scale: None,
        mask: AttentionMask::Full,
        rotation: None,
        has_query_scales: false,
        init: INIT,
    }
}

/// Returns an MLP with two matrices and biases.
#[must_use]
pub fn plain_mlp(spec: &EncoderSpec, names: [String; 2], activation: Activation) -> FeedForwardSpec {
    let mlp = MlpSpec {
        inputs: spec.hidden as usize,
        middle: spec.ffn as usize,
        outputs: spec.hidden as usize,
        names: MlpNames::Plain(names, activation),
        has_bias: true,
        init: INIT,
    };
    mlp.into()
}

/// Model family: builds encoder and decoder blocks, with the checkpoint tensor names.
///
/// Implement this trait for a family outside this crate and pass the family to
/// [`BlockFamilies::with`].
pub trait FamilyBlocks: Debug + Send + Sync {
    /// Returns the id used in all modules of the family.
    fn id(&self) -> FamilyId;

    /// Returns the `model_type` values in checkpoints with these tensor names.
    fn model_types(&self) -> &[&str];

    /// Builds the image encoder. Default: the family has none.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] or [`Error::CostModel`] if a field is invalid or not supported.
    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let _ = source;
        Err(missing("image encoder"))
    }

    /// Builds the audio encoder. Default: the family has none.
    ///
    /// # Errors
    /// As [`vision`](Self::vision).
    fn audio(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let _ = source;
        Err(missing("audio encoder"))
    }

    /// Builds the decoder. Default: a Llama or a Qwen2 with the names in language model checkpoints.
    ///
    /// # Errors
    /// As [`vision`](Self::vision).
    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        language_models::alone(source)
    }
}

/// Model sizes and, for a checkpoint, `config.json`.
///
/// Sizes come from the cost model. The fields are the ones that change results but no cost: epsilons,
/// activations, rotation frequencies. Without a checkpoint they have the family defaults.
#[derive(Debug, Clone)]
pub struct BlockSource<'a> {
    /// Module sizes.
    pub spec: PartialModelSpec,
    /// `config.json`; `None` for a model that is built only from sizes.
    pub config: Option<ConfigFields<'a>>,
}

impl<'a> BlockSource<'a> {
    /// Returns the fields in `config.json`; empty without a checkpoint.
    #[must_use]
    pub fn fields(&self) -> ConfigFields<'a> {
        self.config.clone().unwrap_or_else(|| ConfigFields::empty(CONFIG_FILE))
    }

    /// Returns the vision encoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn vision(&self) -> Result<VisionSpec> {
        self.spec.vision.ok_or_else(|| missing("image encoder"))
    }

    /// Returns the audio encoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn audio(&self) -> Result<AudioSpec> {
        self.spec.audio.ok_or_else(|| missing("audio encoder"))
    }

    /// Returns the language model.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn llm(&self) -> Result<LlmSpec> {
        if let (None, Some(config)) = (self.spec.llm, &self.config) {
            let model_type = config.text("model_type")?.unwrap_or_default();
            let problem = format!("= \"{model_type}\" is not a language model");
            return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
        }
        self.spec.llm.ok_or_else(|| missing("language model"))
    }
}

/// Returns the error for a module that the model does not have.
fn missing(module: &str) -> Error {
    Error::ModelConfig { field: "model_type".to_owned(), problem: format!("has no {module}") }
}
