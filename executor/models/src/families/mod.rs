//! Builds encoder and decoder configurations for a model family, from checkpoints or only from sizes.
//!
//! Each file contains one family; [`ModelConfig`] is the configuration of a complete model. [`BlockFamilies`]
//! finds the family by the `model_type` in a checkpoint or by the id in a
//! [`ModelSpec`](dflop_costmodel::ModelSpec), among built-in and user-defined families.

mod clip_siglip;
mod family_blocks;
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
mod source;
mod text_models;

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::EncoderSpec;

pub use self::family_blocks::FamilyBlocks;
pub use self::language_models::{DecoderDefaults, decoder};
pub use self::model_config::{FrozenModules, ModelConfig, ModuleKind, StageRange};
pub use self::registry::BlockFamilies;
pub use self::source::BlockSource;
use crate::encoder::INIT;
use crate::error::Result;
use crate::layers::{AttentionMask, AttentionSpec, FeedForwardSpec, MlpNames, MlpSpec, QkvNames};
use dflop_device::ops::activation::Activation;

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
