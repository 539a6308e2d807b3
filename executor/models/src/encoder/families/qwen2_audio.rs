//! Reads the encoder of Qwen2-Audio: Whisper, an average of neighboring rows, and a linear projector.
//!
//! # Source
//! Radford et al.: "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, arXiv:2212.04356; Chu
//! et al.: "Qwen2-Audio Technical Report", 2024, arXiv:2407.10759.

use dflop_costmodel::config::{Documents, PartialModelSpec};
use serde_json::Value;

use super::{full_attention, plain_mlp};
use crate::attention::QkvNames;
use crate::config_fields::ConfigFields;
use crate::encoder::config::{Arrangement, EncoderConfig, Stem};
use crate::encoder::projector::{ProjectorMap, ProjectorSpec};
use crate::encoder::tail::TailSpec;
use crate::error::{Error, Result};
use crate::layer::LayerSpec;
use crate::norm::NormKind;
use crate::sharding_check::DimensionFields;
use dflop_device::ops::activation::Activation;

/// Epsilon of all norms, which is not part of the configuration.
const EPSILON: f64 = 1e-5;
const PREFIX: &str = "audio_tower.";
const FIELDS: DimensionFields = DimensionFields {
    heads: "audio_config.encoder_attention_heads",
    kv_heads: "audio_config.encoder_attention_heads",
    mlp: "audio_config.encoder_ffn_dim",
};

/// Reads Qwen2-Audio.
pub(super) fn qwen2_audio(document: &Value) -> Result<EncoderConfig> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = PartialModelSpec::from_hugging_face(&documents)?;
    let (Some(audio), Some(llm)) = (part.audio, part.llm) else {
        let problem = "has no audio encoder".to_owned();
        return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
    };
    let (fields, spec) = (ConfigFields::new(document).child("audio_config"), audio.encoder);
    if fields.flag("scale_embedding", false)? {
        return Err(fields.refused("scale_embedding", "= true is not supported"));
    }
    let activation = fields.activation("activation_function", Activation::GeluExact)?;
    let layer = |layer: u32| {
        let name = |rest: &str| format!("{PREFIX}layers.{layer}.{rest}");
        // Keys have no bias, which would add the same to all scores of a row.
        let qkv = [("q_proj", true), ("k_proj", false), ("v_proj", true)]
            .map(|(rest, has_bias)| (name(&format!("self_attn.{rest}")), has_bias));
        LayerSpec {
            norm: NormKind::Layer,
            epsilon: EPSILON,
            norm_names: ["self_attn_layer_norm", "final_layer_norm"].map(name),
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("self_attn.out_proj")),
            mlp: plain_mlp(&spec, ["fc1", "fc2"].map(name), activation),
            scales: None,
        }
    };
    let (hidden, outputs) = (spec.hidden as usize, llm.hidden as usize);
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Audio {
            prefix: PREFIX,
            mels: fields.count("num_mel_bins")?.unwrap_or(128),
            positions: fields.count("max_source_positions")?.unwrap_or(1500),
        },
        layers: (0..spec.layers).map(layer).collect(),
        tail: Some(TailSpec { before: None, after: Some((format!("{PREFIX}layer_norm"), EPSILON)) }),
        projector: Some(ProjectorSpec {
            merged: 1,
            hidden,
            norm: None,
            map: ProjectorMap::Linear("multi_modal_projector.linear".to_owned()),
            outputs,
            newline: None,
        }),
        arrangement: Arrangement::Audio,
        ignored: Vec::new(),
        fields: &FIELDS,
    })
}
