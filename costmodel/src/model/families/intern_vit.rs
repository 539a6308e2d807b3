//! Towers and projectors of InternVL, and their join with a language model, for both forms of its files.

use super::fixed_resolution::{
    FRAMES_MAX, SquareInput, SquareTower, TowerSize, bare_tower, layers_until, product,
};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

pub(crate) const FAMILY: FamilyId = FamilyId::new("internvl");

/// Options in which the towers of InternVL differ.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the published configuration")]
pub(crate) struct InternVitOptions {
    pub(crate) has_qkv_bias: bool,
    pub(crate) has_qk_norm: bool,
    /// Whether norms have no bias.
    pub(crate) has_rms_norm: bool,
    /// Whether a layer norm follows the layers; it is absent where tokens are averaged.
    pub(crate) has_last_norm: bool,
    pub(crate) has_positions: bool,
    pub(crate) has_mask_token: bool,
}

impl InternVitOptions {
    /// Options of InternViT-300M.
    pub(crate) const SMALL: Self = Self {
        has_qkv_bias: true,
        has_qk_norm: false,
        has_rms_norm: false,
        has_last_norm: false,
        has_positions: true,
        has_mask_token: false,
    };
    /// Options of InternViT-6B.
    pub(crate) const LARGE: Self =
        Self { has_qkv_bias: false, has_qk_norm: true, has_rms_norm: true, ..Self::SMALL };
}

/// Builds InternViT: a class token, layer scales, and what `options` selects.
pub(crate) const fn encoder(size: TowerSize, square: SquareInput, options: InternVitOptions) -> EncoderSpec {
    let hidden = size.hidden;
    let norms = if options.has_rms_norm { 2 } else { 4 };
    let qkv_biases = if options.has_qkv_bias { 3 } else { 0 };
    let qk_norms = if options.has_qk_norm { 2 } else { 0 };
    let positions =
        if options.has_positions { product(square.patches, hidden).saturating_add(hidden as u64) } else { 0 };
    // Bias of the stem and class token; mask token; last norm.
    let vectors = 2 + options.has_mask_token as u32 + if options.has_last_norm { 2 } else { 0 };
    let details = EncoderDetails {
        class_tokens: 1,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        // 2 layer scales, biases of the attention's output and of the MLP.
        layer_vectors: 4 + norms + qkv_biases + qk_norms,
        layer_ffn_vectors: 1,
        outside_parameters: product(square.patch_inputs, hidden)
            .saturating_add(product(vectors, hidden))
            .saturating_add(positions),
    };
    bare_tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Builds the projector of InternVL: a norm, then two matrices with biases over `merged_tokens` tokens side
/// by side.
pub(crate) const fn projector(hidden: u32, merged_tokens: u32, llm_hidden: u32) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let vectors = product(2, width).saturating_add(product(2, llm_hidden));
    Projector::new(merged_tokens, width, Some(llm_hidden)).vectors(vectors)
}

/// Settings that the two forms have under different names.
pub(super) struct Tiling {
    /// Index of the hidden state that is taken, and the field that states it.
    pub(super) feature_layer: (&'static str, i64),
    pub(super) tiles_max: u32,
}

pub(super) fn is_rms_norm(fields: &ConfigFields<'_>, norm: &str) -> Result<bool> {
    match norm {
        "rms_norm" => Ok(true),
        "layer_norm" => Ok(false),
        found => {
            let problem = format!("must be \"layer_norm\" or \"rms_norm\", found \"{found}\"");
            Err(fields.invalid("norm_type", problem))
        }
    }
}

/// Joins tower, pixel shuffle, projector and token rule.
pub(super) fn compose(
    source: &CheckpointFields<'_>,
    tower: &SquareTower,
    llm: &LlmSpec,
    tiling: &Tiling,
) -> Result<PartialModelSpec> {
    let config = &source.config;
    let ratio = config.number("downsample_ratio", 0.5)?;
    // Truncated: a reciprocal that is not whole has a product below 1 with the ratio, which is an error.
    let merge = (1.0 / ratio) as u32;
    if merge == 0 || f64::from(merge) * ratio < 1.0 || !tower.patches_per_side.is_multiple_of(merge) {
        let problem = format!("= {ratio} does not divide {} patches a side", tower.patches_per_side);
        return Err(config.invalid("downsample_ratio", problem));
    }
    let tokens_per_side = tower.patches_per_side / merge;
    let (key, index) = tiling.feature_layer;
    let layers = tower.encoder.layers;
    let merged_tokens = merge.saturating_mul(merge);
    let projector = projector(tower.encoder.hidden, merged_tokens, llm.hidden);
    let mut encoder = EncoderSpec { projector, ..tower.encoder };
    encoder.details.unused_layers = layers - layers_until(config, key, index, layers)?;
    let square = |side: u32| u16::try_from(side.saturating_mul(side));
    let (Ok(tile_patches), Ok(tile_tokens)) = (square(tower.patches_per_side), square(tokens_per_side))
    else {
        let problem = format!("has {} patches a side, too many", tower.patches_per_side);
        return Err(config.invalid("vision_config", problem));
    };
    let tiles_max = u8::try_from(tiling.tiles_max).map_err(|_| {
        config.invalid("max_patches", format!("= {} tiles are more than {}", tiling.tiles_max, u8::MAX))
    })?;
    let rule = VisionRule::DynamicTiles(DynamicTiles {
        tile_pixels: tower.image_pixels,
        tile_patches,
        tile_tokens,
        tiles_max,
        frames_max: source.frames_max(FRAMES_MAX)?,
        marker_tokens: DynamicTiles::INTERN_VL.marker_tokens,
    });
    let vision = Some(VisionSpec { family: FAMILY, encoder, rule });
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(*llm) })
}
