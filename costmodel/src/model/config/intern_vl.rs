//! Reads InternVL in the form of transformers; [`super::intern_vl_chat`] is the form of the original
//! repositories.

use super::vision::{SquareTower, check_processor_side, dimensions, layers_until, square};
use super::{CheckpointFields, FRAMES_MAX, Fields, PartialModelSpec, llm};
use crate::error::Result;
use crate::model::towers::{self, InternVitOptions};
use crate::model::{EncoderSpec, LlmSpec, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

/// Settings that the two forms have under different names.
pub(super) struct Tiling {
    /// Index of the hidden state that is taken, and the field that states it.
    pub(super) feature_layer: (&'static str, i64),
    pub(super) tiles_max: u32,
}

/// # Source
/// `InternVLConfig`, `InternVLVisionConfig`, `InternVLProcessor` and `GotOcr2ImageProcessor` of transformers
/// 4.57.1. The processor cuts images into tiles even if the image processor's file sets `crop_to_patches` to
/// false.
pub(super) fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = llm::text_config(&config.child_or_empty("text_config")?, "qwen2")?;
    let tower = tower(&config.child_or_empty("vision_config")?)?;
    if config.text("vision_feature_select_strategy")?.is_some_and(|strategy| strategy != "default") {
        let problem = "must be \"default\", the class token goes no further";
        return Err(config.invalid("vision_feature_select_strategy", problem));
    }
    let key = "vision_feature_layer";
    let feature_layer = match config.value(key) {
        None => -1,
        Some(value) => value.as_i64().ok_or_else(|| config.invalid(key, "must be a whole number"))?,
    };
    let image = source.image();
    check_processor_side(&image, "size", tower.image_pixels)?;
    if let Some(least) = image.optional_count("min_patches")?.filter(|least| *least != 1) {
        return Err(image.invalid("min_patches", format!("must be 1, found {least}")));
    }
    let tiles_max = image.count("max_patches", u32::from(DynamicTiles::INTERN_VL.tiles_max))?;
    let tiling = Tiling { feature_layer: (key, feature_layer), tiles_max };
    let part = compose(source, &tower, &llm, &tiling)?;
    let tokens = part.vision.map_or(0, |vision| match vision.rule {
        VisionRule::DynamicTiles(rule) => u32::from(rule.tile_tokens),
        _ => 0,
    });
    for fields in [config, &source.processor] {
        if let Some(length) = fields.optional_count("image_seq_length")?.filter(|length| *length != tokens) {
            let problem = format!("= {length}, but the vision tower makes {tokens} tokens of a tile");
            return Err(fields.invalid("image_seq_length", problem));
        }
    }
    Ok(part)
}

fn tower(fields: &Fields<'_>) -> Result<SquareTower> {
    let dimensions = dimensions(fields, [24, 1024, 16, 4096])?;
    let (image_pixels, square, patches_per_side) = square(fields, 448, 14)?;
    let norm = fields.text("norm_type")?.unwrap_or("layer_norm");
    let parts = InternVitOptions {
        has_qkv_bias: fields.flag("attention_bias", false)?,
        has_qk_norm: fields.flag("use_qk_norm", false)?,
        has_rms_norm: is_rms_norm(fields, norm)?,
        has_last_norm: !fields.flag("use_mean_pooling", true)?,
        has_positions: fields.flag("use_absolute_position_embeddings", true)?,
        has_mask_token: fields.flag("use_mask_token", false)?,
    };
    let encoder = towers::intern_vit(dimensions, square, parts);
    Ok(SquareTower { encoder, image_pixels, patches_per_side })
}

pub(super) fn is_rms_norm(fields: &Fields<'_>, norm: &str) -> Result<bool> {
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
    let ratio = config.ratio("downsample_ratio", 0.5)?;
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
    let projector = towers::intern_vl_projector(tower.encoder.hidden, merged_tokens, llm.hidden);
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
    Ok(PartialModelSpec { vision: Some(VisionSpec { encoder, rule }), audio: None, llm: Some(*llm) })
}
