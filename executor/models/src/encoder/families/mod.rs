//! Reads encoders from the `config.json` of each model family.

mod qwen2_audio;
mod qwen_vl;
mod square_towers;

use dflop_costmodel::model::EncoderSpec;
use serde_json::Value;

use super::INIT;
use super::config::EncoderConfig;
use crate::attention::{AttentionMask, AttentionSpec, QkvNames};
use crate::config_fields::ConfigFields;
use crate::error::{Error, Result};
use crate::mlp::{MlpNames, MlpSpec};
use dflop_device::ops::activation::Activation;

/// Supported families of image encoders.
const VISION: &str =
    "llava_onevision, internvl, qwen2_vl, qwen2_5_vl, clip_vision_model and siglip_vision_model";

/// Error for an encoder that the cost model knows, but whose checkpoints have other tensor names.
fn refuse_other_form(top: &ConfigFields<'_>, model_type: &str, known: &str) -> Error {
    top.refused("model_type", format!("= \"{model_type}\" is not supported, encoders are read from {known}"))
}

impl EncoderConfig {
    /// Reads the image encoder, if the model has one: of LLaVA-OneVision, InternVL, Qwen2-VL or Qwen2.5-VL,
    /// or a separate CLIP or SigLIP.
    ///
    /// # Errors
    /// [`Error::CostModel`] or [`Error::ModelConfig`] if a field is invalid or not supported.
    pub fn vision(document: &Value) -> Result<Option<Self>> {
        let top = ConfigFields::new(document);
        match top.text("model_type")?.unwrap_or_default() {
            "llava_onevision" => square_towers::llava_onevision(document).map(Some),
            "internvl" => square_towers::intern_vl(document).map(Some),
            "clip_vision_model" | "siglip_vision_model" => square_towers::alone(document).map(Some),
            "qwen2_vl" => qwen_vl::qwen2_vl(document).map(Some),
            "qwen2_5_vl" => qwen_vl::qwen2_5_vl(document).map(Some),
            other @ ("clip" | "siglip" | "internvl_chat") => Err(refuse_other_form(&top, other, VISION)),
            _ => Ok(None),
        }
    }

    /// Reads the audio encoder, if the model has one: of Qwen2-Audio.
    ///
    /// # Errors
    /// [`Error::CostModel`] or [`Error::ModelConfig`] if a field is invalid or not supported.
    pub fn audio(document: &Value) -> Result<Option<Self>> {
        match ConfigFields::new(document).text("model_type")? {
            Some("qwen2_audio") => qwen2_audio::qwen2_audio(document).map(Some),
            Some(other @ ("whisper" | "qwen2_audio_encoder")) => {
                Err(refuse_other_form(&ConfigFields::new(document), other, "qwen2_audio"))
            }
            _ => Ok(None),
        }
    }
}

/// Attention of an encoder in which all rows of an image or audio clip attend to each other.
fn full_attention(spec: &EncoderSpec, qkv: QkvNames, output: String) -> AttentionSpec {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    AttentionSpec {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        qkv,
        output: (output, true),
        mask: AttentionMask::Full,
        is_rotated: false,
        init: INIT,
    }
}

/// MLP of two matrices with biases.
fn plain_mlp(spec: &EncoderSpec, names: [String; 2], activation: Activation) -> MlpSpec {
    MlpSpec {
        inputs: spec.hidden as usize,
        middle: spec.ffn as usize,
        outputs: spec.hidden as usize,
        names: MlpNames::Plain(names, activation),
        has_bias: true,
        init: INIT,
    }
}
