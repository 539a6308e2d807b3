//! InternVL: `InternViT` on tiles in the grid with the nearest aspect ratio, in the transformers form;
//! [`super::intern_vl_chat`] reads the original repositories' form.

use super::fixed_resolution::{
    PATCH_INPUTS, SquareInput, SquareTower, TowerSize, check_processor_side, dimensions, square,
};
use super::intern_vit::{FAMILY, InternVitOptions, Tiling, compose, encoder, is_rms_norm, projector};
use super::intern_vl_chat;
use super::language_models::{
    self, QWEN2_5_7B, QWEN2_5_72B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, QWEN3_235B_A22B,
};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderSpec, FamilyId, LlmSpec, ModelFamily, Preset, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&InternVl];

/// InternVL.
#[derive(Debug)]
struct InternVl;

impl ModelFamily for InternVl {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["internvl", "internvl_chat"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        if files.config.text("model_type")? == Some("internvl_chat") {
            return intern_vl_chat::read(files);
        }
        read(files)
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

const PRESETS: [Preset; 6] = [
    Preset {
        name: "internvl2.5-qwen2.5-72b",
        vision: Some(intern_vit_6b(&QWEN2_5_72B)),
        audio: None,
        llm: QWEN2_5_72B,
    },
    Preset { name: "internvl3-8b", vision: Some(intern_vit_300m(&QWEN2_5_7B)), audio: None, llm: QWEN2_5_7B },
    Preset { name: "internvl3.5-8b", vision: Some(intern_vit_300m(&QWEN3_8B)), audio: None, llm: QWEN3_8B },
    Preset {
        name: "internvl3.5-30b-a3b",
        vision: Some(intern_vit_300m(&QWEN3_30B_A3B)),
        audio: None,
        llm: QWEN3_30B_A3B,
    },
    Preset { name: "internvl3.5-38b", vision: Some(intern_vit_6b(&QWEN3_32B)), audio: None, llm: QWEN3_32B },
    Preset {
        name: "internvl3.5-241b-a28b",
        vision: Some(intern_vit_6b(&QWEN3_235B_A22B)),
        audio: None,
        llm: QWEN3_235B_A22B,
    },
];

const TILE: SquareInput = SquareInput { patch_inputs: PATCH_INPUTS, patches: 1024 };

const fn intern_vit_300m(llm: &LlmSpec) -> VisionSpec {
    let size = TowerSize { layers: 24, hidden: 1024, heads: 16, ffn: 4096 };
    vision(encoder(size, TILE, InternVitOptions::SMALL), projector(1024, 4, llm.hidden))
}

const fn intern_vit_6b(llm: &LlmSpec) -> VisionSpec {
    let size = TowerSize { layers: 45, hidden: 3200, heads: 25, ffn: 12_800 };
    vision(encoder(size, TILE, InternVitOptions::LARGE), projector(3200, 4, llm.hidden))
}

const fn vision(encoder: EncoderSpec, projector: Projector) -> VisionSpec {
    let encoder = EncoderSpec { projector, ..encoder };
    VisionSpec { family: FAMILY, encoder, rule: VisionRule::DynamicTiles(DynamicTiles::INTERN_VL) }
}

/// # Source
/// `InternVLConfig`, `InternVLVisionConfig`, `InternVLProcessor` and `GotOcr2ImageProcessor` in transformers
/// 4.57.1. The processor cuts images into tiles even if the image processor's file sets `crop_to_patches` to
/// false.
fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_models::text_config(&config.child_or_empty("text_config")?, "qwen2")?;
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

fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
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
    let encoder = encoder(dimensions, square, parts);
    Ok(SquareTower { encoder, image_pixels, patches_per_side })
}
