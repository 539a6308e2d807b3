//! Qwen2-Audio: Whisper, an average of neighboring rows, and a linear projector.
//!
//! # Source
//! Radford et al.: "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, arXiv:2212.04356; Chu
//! et al.: "Qwen2-Audio Technical Report", 2024, arXiv:2407.10759.

use dflop_costmodel::FamilyId;

use super::language_models::{DecoderDefaults, decoder};
use super::registry::FamilyBlocks;
use super::source::BlockSource;
use super::{activation, full_attention, plain_mlp};
use crate::DimensionFields;
use crate::attention::QkvNames;
use crate::encoder::{Arrangement, EncoderConfig, ProjectorMap, ProjectorSpec, Stem, TailSpec};
use crate::error::Result;
use crate::layer::LayerSpec;
use crate::llm::LlmConfig;
use crate::norm::NormKind;
use dflop_device::ops::activation::Activation;

/// Epsilon of all norms, which is not part of the configuration.
const EPSILON: f64 = 1e-5;
const PREFIX: &str = "audio_tower.";
const FIELDS: DimensionFields = DimensionFields {
    heads: "audio_config.encoder_attention_heads",
    kv_heads: "audio_config.encoder_attention_heads",
    mlp: "audio_config.encoder_ffn_dim",
};

/// Qwen2-Audio.
#[derive(Debug)]
pub(super) struct Qwen2Audio;

impl FamilyBlocks for Qwen2Audio {
    fn id(&self) -> FamilyId {
        FamilyId::new("qwen2_audio")
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_audio"]
    }

    fn audio(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        encoder(source)
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        decoder(source, &DecoderDefaults::NESTED)
    }
}

fn encoder(source: &BlockSource<'_>) -> Result<EncoderConfig> {
    let (audio, llm) = (source.audio()?, source.llm()?);
    let (fields, spec) = (source.fields().child_or_empty("audio_config")?, audio.encoder);
    if fields.flag("scale_embedding", false)? {
        return Err(fields.invalid("scale_embedding", "= true is not supported").into());
    }
    let act = activation(&fields, "activation_function", Activation::GeluExact)?;
    let layer = |layer: u32| {
        let name = |rest: &str| format!("{PREFIX}layers.{layer}.{rest}");
        // Keys have no bias, which would add the same to all scores of a row.
        let qkv = [("q_proj", true), ("k_proj", false), ("v_proj", true)]
            .map(|(rest, has_bias)| (name(&format!("self_attn.{rest}")), has_bias));
        LayerSpec {
            norm: NormKind::Layer,
            epsilon: EPSILON,
            norm_names: ["self_attn_layer_norm", "final_layer_norm"].map(name),
            post_norm_names: None,
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("self_attn.out_proj")),
            mlp: plain_mlp(&spec, ["fc1", "fc2"].map(name), act),
            scales: None,
        }
    };
    let (hidden, outputs) = (spec.hidden as usize, llm.hidden as usize);
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Audio {
            prefix: PREFIX,
            // the stem reads six frames of mel bins per token
            mels: (spec.details.stem_medium_inputs / 6) as usize,
            positions: audio.rule.window_tokens as usize,
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
