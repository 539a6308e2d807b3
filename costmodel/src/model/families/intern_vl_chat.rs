//! Reads InternVL 2, 2.5 and 3 in the original repositories' form, `model_type` `internvl_chat`.

use super::fixed_resolution::{SquareTower, dimensions, square};
use super::intern_vit::{InternVitOptions, Tiling, compose, encoder, is_rms_norm};
use super::language_models;

use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};

/// # Source
/// `InternVLChatConfig` and `InternVisionConfig` as published with InternVL 2.5: Chen et al., "Expanding
/// Performance Boundaries of Open-Source Multimodal Models", 2024, arXiv:2412.05271.
pub(super) fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let (Some(vision), Some(text)) = (config.child("vision_config")?, config.child("llm_config")?) else {
        let missing = if config.value("llm_config").is_none() { "llm_config" } else { "vision_config" };
        return Err(config.invalid(missing, "is missing"));
    };
    if text.value("model_type").is_none() {
        return Err(text.invalid("model_type", "is missing"));
    }
    let llm = language_models::text_config(&text, "")?;
    let tower = tower(&vision)?;
    if let Some(side) = config.optional_count("force_image_size")?
        && side != u32::from(tower.image_pixels)
    {
        let problem = format!("= {side}, but the vision tower takes {} pixels", tower.image_pixels);
        return Err(config.invalid("force_image_size", problem));
    }
    let tiling = Tiling { feature_layer: select_layer(config)?, tiles_max: tiles_max(config)? };
    compose(source, &tower, &llm, &tiling)
}

/// Reads `InternVisionConfig`; the defaults are InternViT-6B's sizes.
fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    let dimensions = dimensions(fields, [48, 3200, 25, 12_800])?;
    let (image_pixels, square, patches_per_side) = square(fields, 224, 14)?;
    let norm = fields.text("norm_type")?.unwrap_or("rms_norm");
    let parts = InternVitOptions {
        has_qkv_bias: fields.flag("qkv_bias", false)?,
        has_qk_norm: fields.flag("qk_normalization", true)?,
        has_rms_norm: is_rms_norm(fields, norm)?,
        ..InternVitOptions::SMALL
    };
    let encoder = encoder(dimensions, square, parts);
    Ok(SquareTower { encoder, image_pixels, patches_per_side })
}

fn select_layer(config: &ConfigFields<'_>) -> Result<(&'static str, i64)> {
    let key = "select_layer";
    match config.value(key) {
        None => Ok((key, -1)),
        Some(value) => match value.as_i64() {
            Some(index) => Ok((key, index)),
            None => Err(config.invalid(key, format!("must be a whole number, found {value}"))),
        },
    }
}

/// Reads the maximum number of tiles per image; the training scripts set it, together with a thumbnail.
fn tiles_max(config: &ConfigFields<'_>) -> Result<u32> {
    if let Some(least) = config.optional_count("min_dynamic_patch")?.filter(|least| *least != 1) {
        return Err(config.invalid("min_dynamic_patch", format!("must be 1, found {least}")));
    }
    let tiles_max = config.count("max_dynamic_patch", 6)?;
    if !config.flag("dynamic_image_size", false)? {
        return Ok(1);
    }
    if tiles_max > 1 && !config.flag("use_thumbnail", false)? {
        return Err(config.invalid("use_thumbnail", "must be true, tiles go with a thumbnail"));
    }
    Ok(tiles_max)
}
