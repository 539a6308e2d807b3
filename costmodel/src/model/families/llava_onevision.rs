//! LLaVA-OneVision: SigLIP or CLIP on tiles, in the grid that wastes least.

use super::clip_siglip::{siglip_encoder, tower};
use super::fixed_resolution::{
    FRAMES_MAX, PATCH_INPUTS, SquareInput, SquareTower, TowerSize, check_class_token, check_processor_side,
    feature_layers, product,
};
use super::language_models::{self, LLAMA3_8B, LLAMA3_70B, QWEN2_5_7B, QWEN2_5_32B, QWEN2_5_72B};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderSpec, FamilyId, LlmSpec, ModelFamily, Preset, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::any_res::{AnyRes, VideoNewline};

pub(crate) const FAMILY: FamilyId = FamilyId::new("llava_onevision");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&LlavaOneVision];

/// LLaVA-OneVision.
#[derive(Debug)]
struct LlavaOneVision;

impl ModelFamily for LlavaOneVision {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["llava_onevision"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files)
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

const PRESETS: [Preset; 5] = [
    preset("llava-ov-qwen2.5-7b", QWEN2_5_7B),
    preset("llava-ov-qwen2.5-32b", QWEN2_5_32B),
    preset("llava-ov-qwen2.5-72b", QWEN2_5_72B),
    preset("llava-ov-llama3-8b", LLAMA3_8B),
    preset("llava-ov-llama3-70b", LLAMA3_70B),
];

const fn preset(name: &'static str, llm: LlmSpec) -> Preset {
    Preset { name, vision: Some(siglip_so400m(llm)), audio: None, llm }
}

/// Builds SigLIP-so400m as in LLaVA-OneVision, whose projector is as wide as the LLM and has a newline
/// embedding.
pub(super) const fn siglip_so400m(llm: LlmSpec) -> VisionSpec {
    let dimensions = TowerSize { layers: 27, hidden: 1152, heads: 16, ffn: 4304 };
    let tower = siglip_encoder(dimensions, SquareInput { patch_inputs: PATCH_INPUTS, patches: 729 }, false);
    let mut projector = projector(1152, llm.hidden, true);
    projector.vector_parameters += llm.hidden as u64;
    let encoder = EncoderSpec { projector, ..tower };
    VisionSpec { family: FAMILY, encoder, rule: VisionRule::AnyRes(AnyRes::LLAVA_ONEVISION) }
}

/// Builds LLaVA's projector: two matrices, as wide as the LLM.
pub(crate) const fn projector(input: u32, llm_hidden: u32, has_bias: bool) -> Projector {
    let biases = if has_bias { product(2, llm_hidden) } else { 0 };
    Projector::new(1, input, Some(llm_hidden)).vectors(biases)
}

/// Maximum grid side in the published checkpoints, in tiles.
const GRID_SIDE: u8 = 6;

/// # Source
/// `LlavaOnevisionConfig`, `LlavaOnevisionImageProcessor` and `LlavaOnevisionProcessor` in transformers
/// 4.57.1.
fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let text = config.child_or_empty("text_config")?;
    let llm = language_models::text_config(&text, "qwen2")?;
    let tower = match config.child("vision_config")? {
        Some(fields) => tower(&fields)?,
        None => default_tower(),
    };
    let (used_layers, features) = feature_layers(config, tower.encoder.layers, -1)?;
    check_class_token(config, &tower, "full")?;
    let input = tower.encoder.hidden.saturating_mul(features);
    let has_bias = config.flag("multimodal_projector_bias", true)?;
    let mut projector = projector(input, llm.hidden, has_bias);
    projector.vector_parameters = projector.vector_parameters.saturating_add(u64::from(llm.hidden));
    let mut encoder = EncoderSpec { projector, ..tower.encoder };
    encoder.details.unused_layers = encoder.layers - used_layers;
    let rule = VisionRule::AnyRes(rule(source, &tower)?);
    let vision = Some(VisionSpec { family: FAMILY, encoder, rule });
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(llm) })
}

/// Builds the default tower: SigLIP-so400m without the last layer and the head.
fn default_tower() -> SquareTower {
    let dimensions = TowerSize { layers: 26, hidden: 1152, heads: 16, ffn: 4304 };
    let square = SquareInput { patch_inputs: 3 * 14 * 14, patches: 729 };
    let encoder = siglip_encoder(dimensions, square, false);
    SquareTower { encoder, image_pixels: 384, patches_per_side: 27 }
}

fn rule(source: &CheckpointFields<'_>, tower: &SquareTower) -> Result<AnyRes> {
    let image = source.image();
    check_processor_side(&image, "size", tower.image_pixels)?;
    let patches = tower.patches_per_side.saturating_mul(tower.patches_per_side);
    if let Some(tokens) = source.processor.optional_count("num_image_tokens")? {
        // With a class token the processor counts it, and subtracts it again.
        let class_tokens = tower.encoder.details.class_tokens;
        if tokens != patches.saturating_add(class_tokens) {
            let problem = format!("= {tokens}, but the vision tower makes {patches} patches of a tile");
            return Err(source.processor.invalid("num_image_tokens", problem));
        }
    }
    let of_model = grid_side(&source.config, tower.image_pixels)?;
    let of_processor = grid_side(&image, tower.image_pixels)?;
    if let (Some(model), Some(processor)) = (of_model, of_processor)
        && model != processor
    {
        let problem =
            format!("has grids up to {processor} x {processor}, `config.json` up to {model} x {model}");
        return Err(image.invalid("image_grid_pinpoints", problem));
    }
    Ok(AnyRes {
        tile_pixels: tower.image_pixels,
        patches_per_side: u16::try_from(tower.patches_per_side).unwrap_or(u16::MAX),
        grid_side_max: of_processor.or(of_model).unwrap_or(GRID_SIDE),
        feature_tiles_max: feature_tiles_max(source)?,
        frames_max: source.frames_max(FRAMES_MAX)?,
        video_newline: VideoNewline::Once,
    })
}

/// Reads the `9` in `anyres_max_9`: the number of tiles that the feature map is scaled down to.
fn feature_tiles_max(source: &CheckpointFields<'_>) -> Result<u8> {
    let key = "vision_aspect_ratio";
    let fields = if source.processor.value(key).is_some() { &source.processor } else { &source.config };
    let Some(text) = fields.text(key)? else { return Ok(AnyRes::LLAVA_ONEVISION.feature_tiles_max) };
    let tiles = text.strip_prefix("anyres_max_").and_then(|tiles| tiles.parse().ok());
    match tiles {
        Some(tiles) if tiles > 0 => Ok(tiles),
        _ => Err(fields.invalid(key, format!("must be \"anyres_max_\" and 1 to 255, found \"{text}\""))),
    }
}

/// Reads the maximum grid side.
///
/// The rule allows grids of 1 to n columns and as many rows; the file lists them all, height first.
fn grid_side(fields: &ConfigFields<'_>, tile_pixels: u16) -> Result<Option<u8>> {
    let key = "image_grid_pinpoints";
    let Some(value) = fields.value(key) else { return Ok(None) };
    let listed: Vec<[u64; 2]> = serde_json::from_value(value.clone())
        .map_err(|error| fields.invalid(key, format!("must be a list of heights and widths: {error}")))?;
    let tile = u64::from(tile_pixels);
    let side = listed.len().isqrt() as u64;
    let every = (1..=side).flat_map(|rows| (1..=side).map(move |columns| [rows * tile, columns * tile]));
    match u8::try_from(side) {
        Ok(1..) if every.eq(listed) => Ok(Some(side as u8)),
        _ => {
            let problem = format!("is not every grid of 1 to n tiles of {tile} pixels a side, in order");
            Err(fields.invalid(key, problem))
        }
    }
}
