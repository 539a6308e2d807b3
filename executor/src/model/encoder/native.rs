//! Qwen2-VL and Qwen2.5-VL: images and videos of their own resolution, rotated by rows and columns, in windows but for a
//! few layers in the latter.
//!
//! # Source
//! Wang et al.: "Qwen2-VL", 2024, arXiv:2409.12191; Bai et al.: "Qwen2.5-VL Technical Report", 2025, arXiv:2502.13923,
//! section 2.1.1.

use dflop_costmodel::config::{Documents, ModelPart};
use dflop_costmodel::model::EncoderSpec;
use serde_json::Value;

use super::super::attention::{AttentionSpec, QkvNames, AttentionMask};
use super::super::config::ConfigFields;
use super::super::layer::LayerSpec;
use super::super::mlp::{MlpNames, MlpSpec};
use super::super::norm::NormKind;
use super::super::rope::Rope;
use super::super::tensor_parallel::DimensionFields;
use super::input::{HostContext, refuse};
use super::projector::{ProjectorMap, ProjectorSpec};
use super::stem::PatchStemSpec;
use super::tower::{full_attention, plain_mlp};
use super::{Arrangement, EncoderConfig, INIT, Stem};
use crate::error::{Error, Result};
use crate::ops::activation::Activation;
use crate::row_mix::SparseRows;

/// Epsilon of all norms, which no configuration says.
const EPSILON: f64 = 1e-6;
/// Base of the frequencies where no configuration says it.
const THETA: f64 = 10_000.0;
/// Layers of full attention of Qwen2.5-VL where no configuration says them.
const FULL_LAYERS: [usize; 4] = [7, 15, 23, 31];

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_heads",
    kv_heads: "vision_config.num_heads",
    mlp: "vision_config.intermediate_size",
};

/// How patches become rows.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Native {
    patch_inputs: usize,
    /// Patches along the side of a block that becomes one token.
    merge: usize,
    /// Blocks along the side of a window.
    window: Option<usize>,
    rope: Rope,
}

fn encoder(document: &Value) -> Result<(EncoderSpec, usize)> {
    let documents = Documents { config: document.clone(), ..Documents::default() };
    let part = ModelPart::from_hugging_face(&documents)?;
    let (Some(vision), Some(llm)) = (part.vision, part.llm) else {
        let problem = "has no encoder of images".to_owned();
        return Err(Error::Config { field: "model_type".to_owned(), problem });
    };
    Ok((vision.encoder, llm.hidden as usize))
}

/// Qwen2-VL.
pub(super) fn qwen2_vl(document: &Value) -> Result<EncoderConfig> {
    let fields = ConfigFields::of(document).child("vision_config");
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

/// Qwen2.5-VL.
pub(super) fn qwen2_5_vl(document: &Value) -> Result<EncoderConfig> {
    let fields = ConfigFields::of(document).child("vision_config");
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
    if !(hidden / heads).is_multiple_of(4) {
        let problem = format!("makes heads {} wide, which must be a multiple of 4 to rotate", hidden / heads);
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
    let arrangement = Arrangement::Native(Native {
        patch_inputs: stem.patch_inputs(),
        merge,
        window: window_pixels.map(|pixels| (pixels / merge / patch).max(1)),
        rope: Rope::of_images(theta, hidden / heads),
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

impl Native {
    /// Numbers of a patch's pixels.
    pub(super) fn patch_inputs(&self) -> usize {
        self.patch_inputs
    }

    pub(super) fn rope(&self) -> &Rope {
        &self.rope
    }

    pub(super) fn plan(&self, values: &[f32], grids: &[[u32; 3]]) -> Result<HostContext> {
        let block = self.merge * self.merge;
        let mut plan = HostContext { segments: vec![0], windows: vec![0], ..HostContext::default() };
        // Row and column of every patch, and the blocks in the order of windows.
        let (mut rows, mut columns, mut order) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &grid) in grids.iter().enumerate() {
            let [layers, height, width] = grid.map(|length| length as usize);
            if [height, width].iter().any(|&side| side == 0 || !side.is_multiple_of(self.merge)) {
                return refuse("grids", format!("image {index} has {height} x {width} patches"));
            }
            for _ in 0..layers {
                let first = rows.len() / block;
                self.layer(height, width, &mut rows, &mut columns);
                plan.segments.push(rows.len() as u32);
                self.windows(
                    first,
                    [height, width].map(|side| side / self.merge),
                    &mut order,
                    &mut plan.windows,
                );
            }
        }
        if values.len() != rows.len() * self.patch_inputs {
            let problem = format!("has {} elements for {} x {}", values.len(), rows.len(), self.patch_inputs);
            return refuse("patches", problem);
        }
        plan.medium = values.to_vec();
        plan.medium_rows = rows.len();
        plan.projected_rows = order.len();
        if self.window.is_some() {
            let patch = |index: usize| order[index / block] * block + index % block;
            let patches = || (0..rows.len()).map(patch);
            plan.stem = vec![SparseRows::gather(patches().map(|patch| Some(patch as u32)))];
            let ordered = |axis: &[u32]| patches().map(|patch| axis[patch]).collect();
            plan.rotation = Some([ordered(&rows), ordered(&columns)]);
            let mut back = vec![None; order.len()];
            (0..).zip(&order).for_each(|(place, &block)| back[block] = Some(place));
            plan.arranged = Some(SparseRows::gather(back));
        } else {
            plan.windows.clear();
            plan.rotation = Some([rows, columns]);
        }
        Ok(plan)
    }

    /// Rows and columns of the patches of a layer, block by block.
    fn layer(&self, height: usize, width: usize, rows: &mut Vec<u32>, columns: &mut Vec<u32>) {
        let merge = self.merge;
        for (top, left) in pairs(height / merge, width / merge) {
            for (row, column) in pairs(merge, merge) {
                rows.push((top * merge + row) as u32);
                columns.push((left * merge + column) as u32);
            }
        }
    }

    /// The blocks of a layer in the order of windows, which are cut off at the lower and right edges.
    fn windows(
        &self,
        first: usize,
        [height, width]: [usize; 2],
        order: &mut Vec<usize>,
        ends: &mut Vec<u32>,
    ) {
        let Some(window) = self.window else { return order.extend(first..first + height * width) };
        for (top, left) in pairs(height.div_ceil(window), width.div_ceil(window)) {
            let (top, left) = (top * window, left * window);
            let (bottom, right) = ((top + window).min(height), (left + window).min(width));
            for row in top..bottom {
                order.extend((left..right).map(|column| first + row * width + column));
            }
            ends.push((order.len() * self.merge * self.merge) as u32);
        }
    }
}

fn pairs(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}
