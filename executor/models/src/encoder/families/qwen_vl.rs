//! Reads the encoders of Qwen2-VL and Qwen2.5-VL: images and videos of their own resolution.
//!
//! Rows are rotated by row and column; Qwen2.5-VL attends within windows in most layers.
//!
//! # Source
//! Wang et al.: "Qwen2-VL", 2024, arXiv:2409.12191; Bai et al.: "Qwen2.5-VL Technical Report", 2025,
//! arXiv:2502.13923, section 2.1.1.

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::model::EncoderSpec;
use serde_json::Value;

use super::{full_attention, plain_mlp};
use crate::attention::{AttentionMask, AttentionSpec, QkvNames};
use crate::config_fields::ConfigFields;
use crate::encoder::INIT;
use crate::encoder::config::{Arrangement, EncoderConfig, Stem};
use crate::encoder::native_resolution::NativeResolution;
use crate::encoder::projector::{ProjectorMap, ProjectorSpec};
use crate::encoder::stem::PatchStemSpec;
use crate::error::{Error, Result};
use crate::layer::LayerSpec;
use crate::mlp::{MlpNames, MlpSpec};
use crate::norm::NormKind;
use crate::rope::Rope;
use crate::sharding_check::DimensionFields;
use dflop_device::ops::activation::Activation;

/// Epsilon of all norms, which is not part of the configuration.
const EPSILON: f64 = 1e-6;
/// Default base of the rotation frequencies.
const THETA: f64 = 10_000.0;
/// Default layers of full attention in Qwen2.5-VL.
const FULL_LAYERS: [usize; 4] = [7, 15, 23, 31];

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_heads",
    kv_heads: "vision_config.num_heads",
    mlp: "vision_config.intermediate_size",
};

fn encoder(document: &Value) -> Result<(EncoderSpec, usize)> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = PartialModelSpec::from_hugging_face(&documents)?;
    let (Some(vision), Some(llm)) = (part.vision, part.llm) else {
        let problem = "has no image encoder".to_owned();
        return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
    };
    Ok((vision.encoder, llm.hidden as usize))
}

/// Reads Qwen2-VL.
pub(super) fn qwen2_vl(document: &Value) -> Result<EncoderConfig> {
    let fields = ConfigFields::new(document).child("vision_config");
    let (spec, outputs) = encoder(document)?;
    let activation = fields.activation("hidden_act", Activation::GeluQuick)?;
    let layer = |layer: usize| {
        let name = |rest: &str| format!("visual.blocks.{layer}.{rest}");
        LayerSpec {
            norm: NormKind::Layer,
            epsilon: EPSILON,
            norm_names: ["norm1", "norm2"].map(name),
            attention: attention(&spec, layer, AttentionMask::Full),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), activation),
            scales: None,
        }
    };
    let layers = (0..spec.layers as usize).map(layer).collect();
    config(&fields, &spec, outputs, NormKind::Layer, layers, None)
}

/// Reads Qwen2.5-VL.
pub(super) fn qwen2_5_vl(document: &Value) -> Result<EncoderConfig> {
    let fields = ConfigFields::new(document).child("vision_config");
    let (spec, outputs) = encoder(document)?;
    if fields.activation("hidden_act", Activation::Silu)? != Activation::Silu {
        return Err(fields.refused("hidden_act", "must be \"silu\" in a gated MLP"));
    }
    let full = fields.counts("fullatt_block_indexes")?.unwrap_or(FULL_LAYERS.to_vec());
    let layer = |layer: usize| {
        let name = |rest: &str| format!("visual.blocks.{layer}.{rest}");
        let mask = if full.contains(&layer) { AttentionMask::Full } else { AttentionMask::Window };
        LayerSpec {
            norm: NormKind::Rms,
            epsilon: EPSILON,
            norm_names: ["norm1", "norm2"].map(name),
            attention: attention(&spec, layer, mask),
            mlp: MlpSpec {
                inputs: spec.hidden as usize,
                middle: spec.ffn as usize,
                outputs: spec.hidden as usize,
                names: MlpNames::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(name)),
                has_bias: true,
                init: INIT,
            },
            scales: None,
        }
    };
    let layers = (0..spec.layers as usize).map(layer).collect();
    let window = fields.count("window_size")?.unwrap_or(112);
    config(&fields, &spec, outputs, NormKind::Rms, layers, Some(window))
}

fn attention(spec: &EncoderSpec, layer: usize, mask: AttentionMask) -> AttentionSpec {
    let name = |rest: &str| format!("visual.blocks.{layer}.attn.{rest}");
    let full = full_attention(spec, QkvNames::Fused(name("qkv")), name("proj"));
    AttentionSpec { mask, is_rotated: true, ..full }
}

fn config(
    fields: &ConfigFields<'_>,
    spec: &EncoderSpec,
    outputs: usize,
    norm: NormKind,
    layers: Vec<LayerSpec>,
    window_pixels: Option<usize>,
) -> Result<EncoderConfig> {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    // half of the pairs of columns rotate by row, half by column
    if !(hidden / heads).is_multiple_of(4) {
        let problem =
            format!("must give heads a width that is a multiple of 4 to rotate, found {}", hidden / heads);
        return Err(fields.refused("num_heads", problem));
    }
    let channels = fields.count("in_channels")?.unwrap_or(3);
    let frames = fields.count("temporal_patch_size")?.unwrap_or(2);
    let patch = fields.count("patch_size")?.unwrap_or(14);
    let merge = fields.count("spatial_merge_size")?.unwrap_or(2);
    let theta = fields.child("rope_parameters").number("rope_theta", THETA)?;
    let stem = PatchStemSpec {
        name: "visual.patch_embed.proj".to_owned(),
        kernel: vec![channels, frames, patch, patch],
        has_bias: false,
        class: None,
        positions: None,
        norm: None,
    };
    let merged = merge * merge;
    let names = ["visual.merger.mlp.0", "visual.merger.mlp.2"].map(str::to_owned);
    let projector = ProjectorSpec {
        merged,
        hidden,
        norm: Some((norm, "visual.merger.ln_q".to_owned(), EPSILON, hidden)),
        map: ProjectorMap::Mlp(names, merged * hidden, Activation::GeluExact, true),
        outputs,
        newline: None,
    };
    let arrangement = Arrangement::Native(NativeResolution {
        patch_inputs: stem.patch_inputs(),
        merge,
        // at least one block, for windows smaller than a block
        window: window_pixels.map(|pixels| (pixels / merge / patch).max(1)),
        rope: Rope::for_images(theta, hidden / heads),
    });
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Patches(stem),
        layers,
        tail: None,
        projector: Some(projector),
        arrangement,
        ignored: Vec::new(),
        fields: &FIELDS,
    })
}
