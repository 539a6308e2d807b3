//! LLaVA 1.5: CLIP or SigLIP on one square per image; Pixtral 12B, whose checkpoints have the same
//! `model_type`, is in [`super::pixtral`].

use std::num::NonZeroU32;

use super::clip_siglip::{clip_encoder, tower_or};
use super::fixed_resolution::{
    PATCH_INPUTS, SquareInput, SquareTower, TowerSize, check_class_token, check_processor_side,
    feature_layers,
};
use super::llava_onevision::projector;
use super::{language_models, pixtral};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderSpec, FamilyId, LlmSpec, ModelFamily, Preset, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::fixed_tile::FixedTile;

const FAMILY: FamilyId = FamilyId::new("llava");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Llava];

/// LLaVA 1.5.
#[derive(Debug)]
struct Llava;

impl ModelFamily for Llava {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["llava"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let vision = files.config.child_or_empty("vision_config")?;
        match vision.text("model_type")? {
            Some("pixtral") => pixtral::read_llava(files),
            _ => read(files, &vision),
        }
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

/// Vicuna with LLaVA's two extra tokens, padded to a multiple of 64.
pub(super) const VICUNA_7B: LlmSpec = language_models::llama(32, 4096, [32, 32, 128], 11_008, 32_064);
pub(super) const VICUNA_13B: LlmSpec = language_models::llama(40, 5120, [40, 40, 128], 13_824, 32_064);

const PRESETS: [Preset; 2] = [preset("llava-1.5-7b", VICUNA_7B), preset("llava-1.5-13b", VICUNA_13B)];

const fn preset(name: &'static str, llm: LlmSpec) -> Preset {
    let rule = VisionRule::Fixed(tile(336, 576, true));
    let vision = VisionSpec { family: FAMILY, encoder: clip_336(llm), rule };
    Preset { name, vision: Some(vision), audio: None, llm }
}

/// Builds the rule for a square whose patches are a token each; there are no videos.
const fn tile(tile_pixels: u16, tile_patches: u32, is_cropped: bool) -> FixedTile {
    let (pooled_patches, marker_tokens) = (NonZeroU32::MIN, 0);
    FixedTile { tile_pixels, tile_patches, pooled_patches, marker_tokens, is_cropped, frames_max: 0 }
}

/// Builds CLIP ViT-L/14 at 336 pixels with LLaVA's projector; the last layer runs, but the output is unused.
pub(super) const fn clip_336(llm: LlmSpec) -> EncoderSpec {
    let dimensions = TowerSize { layers: 24, hidden: 1024, heads: 16, ffn: 4096 };
    let mut encoder = clip_encoder(dimensions, SquareInput { patch_inputs: PATCH_INPUTS, patches: 576 });
    encoder.details.unused_layers = 1;
    encoder.projector = projector(1024, llm.hidden, true);
    encoder
}

/// Reads a LLaVA-like model's tower and joins it with the projector, which is as wide as the LLM; a missing
/// `vision_config` has the fields of CLIP ViT-L/14 at 336 pixels.
pub(super) fn square_encoder(
    config: &ConfigFields<'_>,
    vision: &ConfigFields<'_>,
    llm: &LlmSpec,
) -> Result<SquareTower> {
    let tower = if config.has("vision_config") {
        tower_or(vision, "clip_vision_model")?
    } else {
        SquareTower { encoder: clip_336(*llm), image_pixels: 336, patches_per_side: 24 }
    };
    let (used_layers, features) = feature_layers(config, tower.encoder.layers, -2)?;
    check_class_token(config, &tower, "default")?;
    let has_bias = config.flag("multimodal_projector_bias", true)?;
    let input = tower.encoder.hidden.saturating_mul(features);
    let mut encoder = EncoderSpec { projector: projector(input, llm.hidden, has_bias), ..tower.encoder };
    encoder.details.unused_layers = encoder.layers - used_layers;
    Ok(SquareTower { encoder, ..tower })
}

/// # Source
/// `LlavaConfig`, `LlavaProcessor`, and `CLIPImageProcessor` or `SiglipImageProcessor` in transformers
/// 5.24.0.
fn read(source: &CheckpointFields<'_>, vision: &ConfigFields<'_>) -> Result<PartialModelSpec> {
    let llm = language_models::language_model(&source.config, "llama")?;
    let tower = square_encoder(&source.config, vision, &llm)?;
    let image = source.image();
    let is_cropped = tower.encoder.details.class_tokens > 0;
    check_processor_side(&image, if is_cropped { "crop_size" } else { "size" }, tower.image_pixels)?;
    let patches = tower.patches_per_side.saturating_mul(tower.patches_per_side);
    check_patch(source, &tower)?;
    let rule = VisionRule::Fixed(tile(tower.image_pixels, patches, is_cropped));
    let vision = Some(VisionSpec { family: FAMILY, encoder: tower.encoder, rule });
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(llm) })
}

/// Checks that the processor counts as many tokens as the tower outputs.
pub(super) fn check_patch(source: &CheckpointFields<'_>, tower: &SquareTower) -> Result<()> {
    let processor = &source.processor;
    if let Some(patch) = processor.optional_count("patch_size")?
        && u32::from(tower.image_pixels) / patch != tower.patches_per_side
    {
        let problem =
            format!("= {patch}, but the vision tower has {} patches a side", tower.patches_per_side);
        return Err(processor.invalid("patch_size", problem));
    }
    let key = "vision_feature_select_strategy";
    let of_model = source.config.text(key)?.unwrap_or("default");
    match processor.text(key)? {
        Some(strategy) if strategy != of_model => {
            let problem = format!("= \"{strategy}\", but \"{of_model}\" in `config.json`");
            Err(processor.invalid(key, problem))
        }
        _ => Ok(()),
    }
}
