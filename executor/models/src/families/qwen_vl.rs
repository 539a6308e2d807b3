//! Qwen2-VL and Qwen2.5-VL: images and videos at native resolution.
//!
//! Rows are rotated by row and column; Qwen2.5-VL attends within windows in most layers.
//!
//! # Source
//! Wang et al.: "Qwen2-VL", 2024, arXiv:2409.12191; Bai et al.: "Qwen2.5-VL Technical Report", 2025,
//! arXiv:2502.13923, section 2.1.1.

use dflop_costmodel::FamilyId;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::native::NativeResolution as Rule;

use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks, activation, full_attention, plain_mlp};
use crate::encoder::{
    Arrangement, EncoderConfig, INIT, NativeResolution, PatchStemSpec, ProjectorMap, ProjectorSpec, Stem,
};
use crate::error::Result;
use crate::layers::{
    AttentionMask, AttentionSpec, DimensionFields, FeedForwardSpec, HeadRotation, LayerSpec, MlpNames,
    MlpSpec, NormKind, QkvNames, Rope,
};
use crate::llm::LlmConfig;
use dflop_device::ops::activation::Activation;

/// Epsilon for all norms, which is not part of the configuration.
const EPSILON: f64 = 1e-6;
/// Default base for the rotation frequencies.
const THETA: f64 = 10_000.0;
/// Default full-attention layers in Qwen2.5-VL.
const FULL_LAYERS: [u32; 4] = [7, 15, 23, 31];

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_heads",
    kv_heads: "vision_config.num_heads",
    mlp: "vision_config.intermediate_size",
};

/// Tensor names that differ between image encoders.
pub(super) struct VisionNames {
    /// Prefix for all tensors.
    pub(super) prefix: &'static str,
    /// Whether queries, keys and values share a matrix.
    pub(super) has_fused_qkv: bool,
}

const NAMES: VisionNames = VisionNames { prefix: "visual.", has_fused_qkv: true };

impl VisionNames {
    fn block_name(&self, layer: usize, rest: &str) -> String {
        format!("{}blocks.{layer}.{rest}", self.prefix)
    }

    fn qkv(&self, layer: usize) -> QkvNames {
        if self.has_fused_qkv {
            return QkvNames::Fused(self.block_name(layer, "attn.qkv"));
        }
        QkvNames::Separate(["attn.q", "attn.k", "attn.v"].map(|rest| (self.block_name(layer, rest), true)))
    }
}

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&QwenVl::QWEN2, &QwenVl::QWEN2_5];

/// Qwen2-VL or Qwen2.5-VL.
#[derive(Debug)]
struct QwenVl {
    model_types: [&'static str; 1],
    /// Whether layers have windows, norms without bias and gated MLPs.
    is_windowed: bool,
}

impl QwenVl {
    const QWEN2: Self = Self { model_types: ["qwen2_vl"], is_windowed: false };
    const QWEN2_5: Self = Self { model_types: ["qwen2_5_vl"], is_windowed: true };
}

impl FamilyBlocks for QwenVl {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.model_types[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.model_types
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        if self.is_windowed { qwen2_5_vl(source, &NAMES) } else { qwen2_vl(source) }
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        decoder(source, &DecoderDefaults { epsilon: 1e-5, theta: 1e6, ..DecoderDefaults::ALONE })
    }
}

/// Returns the encoder and the token rule.
fn encoder(source: &BlockSource<'_>, fields: &ConfigFields<'_>) -> Result<(EncoderSpec, Rule)> {
    let vision = source.vision()?;
    match vision.rule {
        VisionRule::Native(rule) => Ok((vision.encoder, rule)),
        _ => Err(fields.invalid("patch_size", "must be that of images of their own size").into()),
    }
}

fn qwen2_vl(source: &BlockSource<'_>) -> Result<EncoderConfig> {
    let fields = source.fields().child_or_empty("vision_config")?;
    let (spec, rule) = encoder(source, &fields)?;
    let act = activation(&fields, "hidden_act", Activation::GeluQuick)?;
    let layer = |layer: usize| {
        let name = |rest: &str| NAMES.block_name(layer, rest);
        LayerSpec {
            norm: NormKind::Layer,
            epsilon: EPSILON,
            norm_names: ["norm1", "norm2"].map(name),
            post_norm_names: None,
            attention: attention(&spec, &NAMES, layer, AttentionMask::Full),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), act),
            scales: None,
        }
    };
    let layers = (0..spec.layers as usize).map(layer).collect();
    config(source, &fields, &NAMES, (&spec, &rule), (NormKind::Layer, layers))
}

/// Builds the Qwen2.5-VL encoder, with windows in most layers.
pub(super) fn qwen2_5_vl(source: &BlockSource<'_>, names: &VisionNames) -> Result<EncoderConfig> {
    let fields = source.fields().child_or_empty("vision_config")?;
    let (spec, rule) = encoder(source, &fields)?;
    if activation(&fields, "hidden_act", Activation::Silu)? != Activation::Silu {
        return Err(fields.invalid("hidden_act", "must be \"silu\" in a gated MLP").into());
    }
    let full = match (fields.whole_numbers("fullatt_block_indexes")?, &source.config) {
        (Some(listed), _) => listed,
        (None, Some(_)) => FULL_LAYERS.to_vec(),
        (None, None) => full_layers(spec.layers, spec.windowed_layers),
    };
    let layer = |layer: usize| {
        let name = |rest: &str| names.block_name(layer, rest);
        let mask = if full.contains(&(layer as u32)) { AttentionMask::Full } else { AttentionMask::Window };
        LayerSpec {
            norm: NormKind::Rms,
            epsilon: EPSILON,
            norm_names: ["norm1", "norm2"].map(name),
            post_norm_names: None,
            attention: attention(&spec, names, layer, mask),
            mlp: FeedForwardSpec::Mlp(MlpSpec {
                inputs: spec.hidden as usize,
                middle: spec.ffn as usize,
                outputs: spec.hidden as usize,
                names: MlpNames::Gated(
                    ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(name),
                    Activation::Silu,
                ),
                has_bias: true,
                init: INIT,
            }),
            scales: None,
        }
    };
    let layers = (0..spec.layers as usize).map(layer).collect();
    config(source, &fields, names, (&spec, &rule), (NormKind::Rms, layers))
}

/// Returns the full-attention layers, each at the end of equally long runs of windowed layers.
fn full_layers(layers: u32, windowed: u32) -> Vec<u32> {
    let full = layers - windowed.min(layers);
    (1..=full).map(|layer| layer * layers / full - 1).collect()
}

fn attention(spec: &EncoderSpec, names: &VisionNames, layer: usize, mask: AttentionMask) -> AttentionSpec {
    let full = full_attention(spec, names.qkv(layer), names.block_name(layer, "attn.proj"));
    AttentionSpec { mask, rotation: Some(HeadRotation::halves(full.head_dim)), ..full }
}

fn config(
    source: &BlockSource<'_>,
    fields: &ConfigFields<'_>,
    names: &VisionNames,
    (spec, rule): (&EncoderSpec, &Rule),
    (norm, layers): (NormKind, Vec<LayerSpec>),
) -> Result<EncoderConfig> {
    let (hidden, heads) = (spec.hidden as usize, spec.heads as usize);
    // half of the column pairs rotate by row, half by column
    if !(hidden / heads).is_multiple_of(4) {
        let problem =
            format!("must give heads a width that is a multiple of 4 to rotate, found {}", hidden / heads);
        return Err(fields.invalid("num_heads", problem).into());
    }
    let outputs = source.llm()?.hidden as usize;
    let channels = fields.count("in_channels", 3)? as usize;
    let [frames, patch, merge] =
        [rule.frames_per_patch, rule.patch_pixels, rule.merge].map(|size| usize::from(size.get()));
    let theta = fields.child_or_empty("rope_parameters")?.number("rope_theta", THETA)?;
    let stem = PatchStemSpec {
        name: format!("{}patch_embed.proj", names.prefix),
        kernel: vec![channels, frames, patch, patch],
        has_bias: false,
        class: None,
        positions: None,
        norm: None,
    };
    let merged = merge * merge;
    let merger = |rest: &str| format!("{}merger.{rest}", names.prefix);
    let projector = ProjectorSpec {
        merged,
        hidden,
        norm: Some((norm, merger("ln_q"), EPSILON, hidden)),
        map: ProjectorMap::Mlp(["mlp.0", "mlp.2"].map(merger), merged * hidden, Activation::GeluExact, true),
        outputs,
        newline: None,
    };
    let arrangement = Arrangement::Native(NativeResolution {
        patch_inputs: stem.patch_inputs(),
        merge,
        window: rule.window_patches.map(|patches| usize::from(patches.get()) / merge),
        rope: Rope::for_images(theta, hidden / heads),
        table_side: None,
    });
    Ok(EncoderConfig {
        hidden,
        stem: Stem::Patches(stem),
        layers,
        tail: None,
        projector: Some(projector),
        deepstack: Vec::new(),
        arrangement,
        ignored: Vec::new(),
        fields: &FIELDS,
    })
}
