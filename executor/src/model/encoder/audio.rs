//! The encoder of Qwen2-Audio: Whisper's, an average of two neighbors, a linear projector.
//!
//! A window is encoded as far as it is audio: rows behind see nothing that others see, and are never taken.
//!
//! # Source
//! Radford et al.: "Robust Speech Recognition via Large-Scale Weak Supervision", 2022, arXiv:2212.04356; Chu et al.:
//! "Qwen2-Audio Technical Report", 2024, arXiv:2407.10759.

use dflop_costmodel::config::{Documents, ModelPart};
use serde_json::Value;

use super::super::attention::QkvNames;
use super::super::config::ConfigFields;
use super::super::layer::LayerSpec;
use super::super::norm::NormKind;
use super::super::tensor_parallel::DimensionFields;
use super::convolution::TAPS;
use super::input::{HostContext, refuse};
use super::projector::{ProjectorMap, ProjectorSpec};
use super::tail::TailSpec;
use super::tower::{full_attention, plain_mlp};
use super::{Arrangement, EncoderConfig, Stem};
use crate::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::row_mix::SparseRows;

/// Epsilon of all norms, which no configuration says.
const EPSILON: f64 = 1e-5;
const PREFIX: &str = "audio_tower.";
const FIELDS: DimensionFields = DimensionFields {
    heads: "audio_config.encoder_attention_heads",
    kv_heads: "audio_config.encoder_attention_heads",
    mlp: "audio_config.encoder_ffn_dim",
};

/// Qwen2-Audio.
pub(super) fn qwen2_audio(document: &Value) -> Result<EncoderConfig> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = ModelPart::from_hugging_face(&documents)?;
    let (Some(audio), Some(llm)) = (part.audio, part.llm) else {
        let problem = "has no encoder of audio".to_owned();
        return Err(Error::Config { field: "model_type".to_owned(), problem });
    };
    let (fields, spec) = (ConfigFields::of(document).child("audio_config"), audio.encoder);
    if fields.flag("scale_embedding", false)? {
        return Err(fields.refused("scale_embedding", "= true is not supported"));
    }
    let activation = fields.activation("activation_function", Activation::GeluExact)?;
    let layer = |layer: u32| {
        let name = |rest: &str| format!("{PREFIX}layers.{layer}.{rest}");
        // Keys have no bias: it would add the same to all scores of a row.
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
        tail: Some(TailSpec { before: None, behind: Some((format!("{PREFIX}layer_norm"), EPSILON)) }),
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

/// Rows of a window at every step.
struct Window {
    /// Frames that are read, the first behind the audio among them.
    frames: usize,
    /// Behind the first convolution, as far as the second reads.
    first: usize,
    /// Behind the second.
    second: usize,
}

impl Window {
    fn new(frames: usize, longest: usize) -> Self {
        let second = frames.div_ceil(2);
        Self { frames: (2 * second + 1).min(longest), first: (2 * second).min(longest), second }
    }
}

impl EncoderConfig {
    pub(super) fn audio_plan(&self, features: &[f32], frames: &[u32]) -> Result<HostContext> {
        let Stem::Audio { mels, positions, .. } = self.stem else {
            return refuse("medium", "is of another kind than the encoder takes".to_owned());
        };
        let longest = 2 * positions;
        if features.len() != frames.len() * mels * longest {
            let problem =
                format!("has {} elements for {} x {mels} x {longest}", features.len(), frames.len());
            return refuse("input_features", problem);
        }
        if let Some(index) = frames.iter().position(|&frames| frames as usize > longest) {
            return refuse("frames", format!("window {index} has {} of {longest}", frames[index]));
        }
        let mut plan = HostContext { segments: vec![0], ..HostContext::default() };
        let (mut first, mut second, mut placed, mut pooled) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut medium_rows, mut first_rows, mut rows) = (0, 0, 0);
        for (values, &frames) in features.chunks(mels * longest).zip(frames) {
            let window = Window::new(frames as usize, longest);
            for frame in 0..window.frames {
                plan.medium.extend((0..mels).map(|mel| values[mel * longest + frame]));
            }
            unfold(window.first, 1, window.frames, medium_rows, &mut first);
            unfold(window.second, 2, window.first, first_rows, &mut second);
            placed.extend((0..window.second).map(|row| Some(row as u32)));
            pooled.extend(
                (0..window.second / 2).map(|row| [0, 1].map(|next| ((rows + 2 * row + next) as u32, 0.5))),
            );
            medium_rows += window.frames;
            first_rows += window.first;
            rows += window.second;
            plan.segments.push(rows as u32);
        }
        plan.medium_rows = medium_rows;
        plan.stem = vec![SparseRows::gather(first), SparseRows::gather(second)];
        plan.positions = Some(SparseRows::gather(placed));
        plan.projected_rows = pooled.len();
        plan.taken = Some(SparseRows::weighted(pooled));
        Ok(plan)
    }
}

/// The neighbors of every row that comes out of a convolution; zeros at both ends.
fn unfold(rows: usize, stride: usize, inputs: usize, start: usize, sources: &mut Vec<Option<u32>>) {
    for row in 0..rows {
        for tap in 0..TAPS {
            let place = (row * stride + tap).checked_sub(1).filter(|&place| place < inputs);
            sources.push(place.map(|place| (start + place) as u32));
        }
    }
}
