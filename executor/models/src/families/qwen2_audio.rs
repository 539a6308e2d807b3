//! Qwen2-Audio: Whisper, an average over neighboring rows, and a linear projector.
//!
//! # Source
//! Radford et al.: "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, arXiv:2212.04356; Chu
//! et al.: "Qwen2-Audio Technical Report", 2024, arXiv:2407.10759.

use dflop_costmodel::FamilyId;
use dflop_costmodel::tokens::audio::AudioRule;

use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks, activation, full_attention, plain_mlp};
use crate::encoder::{
    Arrangement, AudioPositions, EncoderConfig, ProjectorMap, ProjectorSpec, Stem, TailSpec,
};
use crate::error::{Error, Result};
use crate::layers::{DimensionFields, LayerSpec, NormKind, QkvNames};
use crate::llm::LlmConfig;
use dflop_device::ops::activation::Activation;

/// Epsilon for all norms, which is not part of the configuration.
const EPSILON: f64 = 1e-5;
const PREFIX: &str = "audio_tower.";
const FIELDS: DimensionFields = DimensionFields {
    heads: "audio_config.encoder_attention_heads",
    kv_heads: "audio_config.encoder_attention_heads",
    mlp: "audio_config.encoder_ffn_dim",
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Qwen2Audio];

/// Qwen2-Audio.
#[derive(Debug)]
struct Qwen2Audio;

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
    let AudioRule::Windows(rule) = audio.rule else {
        let problem = "must be that of padded windows".to_owned();
        return Err(Error::ModelConfig { field: "audio rule".to_owned(), problem });
    };
    let names = AudioNames { prefix: PREFIX, last_norm: "layer_norm", fields: &FIELDS };
    let projector = "multi_modal_projector.linear".to_owned();
    let positions = AudioPositions::Stored(rule.window_tokens as usize);
    whisper(source, &names, (projector, llm.hidden), (positions, Arrangement::Windows))
}

/// Names that differ between Whisper encoders.
pub(super) struct AudioNames {
    /// Prefix for all encoder tensors.
    pub(super) prefix: &'static str,
    /// Name of the norm after the layers.
    pub(super) last_norm: &'static str,
    /// Dimension fields, for errors.
    pub(super) fields: &'static DimensionFields,
}

/// Builds Whisper with an average over neighboring rows and a linear projector with the given name and width.
pub(super) fn whisper(
    source: &BlockSource<'_>,
    names: &AudioNames,
    (projector, outputs): (String, u32),
    (positions, arrangement): (AudioPositions, Arrangement),
) -> Result<EncoderConfig> {
    let (fields, spec) = (source.fields().child_or_empty("audio_config")?, source.audio()?.encoder);
    if fields.flag("scale_embedding", false)? {
        return Err(fields.invalid("scale_embedding", "= true is not supported").into());
    }
    let act = activation(&fields, "activation_function", Activation::GeluExact)?;
    let prefix = names.prefix;
    let layer = |layer: u32| {
        let name = |rest: &str| format!("{prefix}layers.{layer}.{rest}");
        // Keys have no bias, which would add the same value to all scores in a row.
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
    let hidden = spec.hidden as usize;
    // the stem reads six mel frames per token
    let mels = (spec.details.stem_medium_inputs / 6) as usize;
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Audio { prefix, mels, positions },
        layers: (0..spec.layers).map(layer).collect(),
        tail: Some(TailSpec { before: None, after: Some((format!("{prefix}{}", names.last_norm), EPSILON)) }),
        projector: Some(ProjectorSpec {
            merged: 1,
            hidden,
            norm: None,
            map: ProjectorMap::Linear(projector),
            outputs: outputs as usize,
            newline: None,
        }),
        deepstack: Vec::new(),
        arrangement,
        ignored: Vec::new(),
        fields: names.fields,
    })
}
