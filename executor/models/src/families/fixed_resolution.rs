//! Shared parts for square-tile encoders: CLIP, SigLIP and `InternViT`, separate or in a multimodal model.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::{EncoderSpec, VisionSpec};
use dflop_costmodel::tokens::VisionRule;

use super::{activation, full_attention, plain_mlp};
use crate::encoder::{
    Arrangement, EncoderConfig, PatchStemSpec, ProjectorSpec, Stem, TailSpec, TileRule, Tiles,
};
use crate::error::Result;
use crate::layers::{DimensionFields, LayerSpec, NormKind, QkvNames};
use dflop_device::ops::activation::Activation;

const FIELDS: DimensionFields = DimensionFields {
    heads: "vision_config.num_attention_heads",
    kv_heads: "vision_config.num_attention_heads",
    mlp: "vision_config.intermediate_size",
};
const FIELDS_ALONE: DimensionFields = DimensionFields {
    heads: "num_attention_heads",
    kv_heads: "num_attention_heads",
    mlp: "intermediate_size",
};

/// Encoder without its projector, as read.
pub(super) struct Tower {
    pub(super) spec: EncoderSpec,
    pub(super) tiles: Tiles,
    pub(super) stem: PatchStemSpec,
    pub(super) layers: Vec<LayerSpec>,
    /// Name and epsilon for the norm after the layers.
    pub(super) last_norm: Option<(String, f64)>,
    pub(super) ignored: Vec<String>,
    /// Whether the configuration describes only the encoder.
    pub(super) is_alone: bool,
}

impl Tower {
    /// Joins the tower with the tail and projector after the layers.
    pub(super) fn joined(self, tail: Option<TailSpec>, projector: Option<ProjectorSpec>) -> EncoderConfig {
        EncoderConfig {
            hidden: self.spec.hidden as usize,
            stem: Stem::Patches(self.stem),
            layers: self.layers,
            tail,
            projector,
            deepstack: Vec::new(),
            arrangement: Arrangement::Tiles(self.tiles),
            ignored: self.ignored,
            fields: if self.is_alone { &FIELDS_ALONE } else { &FIELDS },
        }
    }
}

/// Returns the tiles for a tower: side from the token rule, patches from the stem.
pub(super) fn tiles(fields: &ConfigFields<'_>, vision: &VisionSpec, rule: TileRule) -> Result<Tiles> {
    let side = match vision.rule {
        VisionRule::AnyRes(rule) => rule.tile_pixels,
        VisionRule::ListedGrids(rule) => rule.tile_pixels,
        VisionRule::ScaledTiles(rule) => rule.tile_pixels,
        VisionRule::FittedTiles(rule) => rule.tile_pixels,
        VisionRule::DynamicTiles(rule) => rule.tile_pixels,
        VisionRule::Fixed(rule) => rule.tile_pixels,
        VisionRule::PanAndScan(rule) => rule.tile.tile_pixels,
        VisionRule::Native(_) | VisionRule::LongestEdge(_) | VisionRule::Table(_) => {
            return Err(fields.invalid("model_type", "has no images in tiles of a known side").into());
        }
    };
    let (channels, details) = (fields.count("num_channels", 3)?, &vision.encoder.details);
    // stem inputs are channels × side²
    let patch = (vision.encoder.stem_inputs / channels).isqrt().max(1);
    Ok(Tiles {
        channels: channels as usize,
        side: usize::from(side),
        patch: patch as usize,
        has_class: details.class_tokens > 0,
        rule,
    })
}

/// Builds a CLIP, which has a class token, or a SigLIP.
pub(super) fn square_tower(
    fields: &ConfigFields<'_>,
    vision: &VisionSpec,
    prefix: &str,
    rule: TileRule,
) -> Result<Tower> {
    let spec = vision.encoder;
    let is_clip = spec.details.class_tokens > 0;
    let name = |rest: &str| format!("{prefix}{rest}");
    let epsilon = fields.number("layer_norm_eps", if is_clip { 1e-5 } else { 1e-6 })?;
    let default = if is_clip { Activation::GeluQuick } else { Activation::GeluTanh };
    let act = activation(fields, "hidden_act", default)?;
    let tiles = tiles(fields, vision, rule)?;
    let hidden = spec.hidden as usize;
    let positions = tiles.patches() + usize::from(is_clip);
    let stem = PatchStemSpec {
        name: name("embeddings.patch_embedding"),
        kernel: vec![tiles.channels, tiles.patch, tiles.patch],
        has_bias: !is_clip,
        class: is_clip.then(|| (name("embeddings.class_embedding"), vec![hidden])),
        positions: Some((name("embeddings.position_embedding.weight"), vec![positions, hidden])),
        // the misspelled name is the one in the checkpoints
        norm: is_clip.then(|| (name("pre_layrnorm"), epsilon)),
    };
    let layers = (0..spec.layers.saturating_sub(spec.details.unused_layers)).map(|layer| {
        let name = |rest: &str| format!("{prefix}encoder.layers.{layer}.{rest}");
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(|rest| (name(rest), true));
        LayerSpec {
            norm: NormKind::Layer,
            epsilon,
            norm_names: [name("layer_norm1"), name("layer_norm2")],
            post_norm_names: None,
            attention: full_attention(&spec, QkvNames::Separate(qkv), name("self_attn.out_proj")),
            mlp: plain_mlp(&spec, ["mlp.fc1", "mlp.fc2"].map(name), act),
            scales: None,
        }
    });
    let layers: Vec<LayerSpec> = layers.collect();
    let unused = (layers.len()..spec.layers as usize).map(|layer| name(&format!("encoder.layers.{layer}.")));
    let mut ignored: Vec<String> = unused.collect();
    // SigLIP's pooling head
    ignored.push(name("head."));
    let last = name("post_layernorm");
    if is_clip {
        ignored.push(format!("{last}."));
    }
    let is_alone = prefix.is_empty();
    Ok(Tower { last_norm: Some((last, epsilon)), spec, tiles, stem, layers, ignored, is_alone })
}
