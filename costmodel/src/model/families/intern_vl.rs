//! InternVL: `InternViT` on tiles in the grid with the nearest aspect ratio, in the transformers form;
//! [`super::intern_vl_chat`] reads the original repositories' form.

use super::intern_vl_chat;
use super::language_models::{
    self, QWEN2_5_7B, QWEN2_5_72B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, QWEN3_235B_A22B,
};
use super::squares::{FRAMES_MAX, SquareTower, check_processor_side, dimensions, layers_until, square};
use super::tower::{PATCH_INPUTS, SquareInput, TowerSize, product, tower as bare_tower};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, ModelFamily, Preset, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

pub(crate) const FAMILY: FamilyId = FamilyId::new("internvl");

/// InternVL.
#[derive(Debug)]
pub(super) struct InternVl;

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

/// Options in which the InternVL towers differ.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the published configuration")]
pub(crate) struct InternVitOptions {
    pub(crate) has_qkv_bias: bool,
    pub(crate) has_qk_norm: bool,
    /// Whether norms have no bias.
    pub(crate) has_rms_norm: bool,
    /// Whether a layer norm follows the layers; it is absent if tokens are averaged.
    pub(crate) has_last_norm: bool,
    pub(crate) has_positions: bool,
    pub(crate) has_mask_token: bool,
}

impl InternVitOptions {
    /// InternViT-300M options.
    pub(crate) const SMALL: Self = Self {
        has_qkv_bias: true,
        has_qk_norm: false,
        has_rms_norm: false,
        has_last_norm: false,
        has_positions: true,
        has_mask_token: false,
    };
    /// InternViT-6B options.
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
    // Stem bias and class token; mask token; last norm.
    let vectors = 2 + options.has_mask_token as u32 + if options.has_last_norm { 2 } else { 0 };
    let details = EncoderDetails {
        class_tokens: 1,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        // 2 layer scales, attention output and MLP biases.
        layer_vectors: 4 + norms + qkv_biases + qk_norms,
        layer_ffn_vectors: 1,
        outside_parameters: product(square.patch_inputs, hidden)
            .saturating_add(product(vectors, hidden))
            .saturating_add(positions),
    };
    bare_tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Builds the InternVL projector: a norm, then two matrices with biases over `merged_tokens` concatenated
/// tokens.
pub(crate) const fn projector(hidden: u32, merged_tokens: u32, llm_hidden: u32) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let vectors = product(2, width).saturating_add(product(2, llm_hidden));
    Projector::new(merged_tokens, width, Some(llm_hidden)).vectors(vectors)
}

/// Settings with different names in the two forms.
pub(super) struct Tiling {
    /// Index of the used hidden state, and the field that states it.
    pub(super) feature_layer: (&'static str, i64),
    pub(super) tiles_max: u32,
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
