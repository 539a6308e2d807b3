//! Idefics3 and `SmolVLM`: SigLIP on tiles, with the image's longer side scaled to a fixed length.

use super::clip_siglip::siglip_encoder;
use super::fixed_resolution::{
    PATCH_INPUTS, SquareInput, SquareTower, TowerSize, square_tower_with_defaults,
};
use super::language_models::{self, language_model};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderSpec, FamilyId, LlmSpec, ModelFamily, Preset, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::scaled_tiles::ScaledTiles;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Idefics3::IDEFICS3, &Idefics3::SMOLVLM];

/// Idefics3, or `SmolVLM` and `SmolVLM2`, under this name.
#[derive(Debug)]
struct Idefics3([&'static str; 1], &'static [Preset]);

impl Idefics3 {
    const IDEFICS3: Self = Self(["idefics3"], &[IDEFICS3_8B]);
    const SMOLVLM: Self = Self(["smolvlm"], &[SMOLVLM2]);
}

impl ModelFamily for Idefics3 {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.0[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.0
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files, self.id())
    }

    fn presets(&self) -> &[Preset] {
        self.1
    }
}

/// Llama 3.1 8B with three Idefics3 tokens.
const LLAMA_8B: LlmSpec = language_models::llama(32, 4096, [32, 8, 128], 14_336, 128_259);
/// SmolLM2-1.7B with the `SmolVLM` tokens.
const SMOLLM2: LlmSpec = language_models::llama(24, 2048, [32, 32, 64], 8192, 49_280);

const IDEFICS3_8B: Preset = preset("idefics3-8b", "idefics3", 364, 2, LLAMA_8B);
const SMOLVLM2: Preset = preset("smolvlm2-2.2b", "smolvlm", 384, 3, SMOLLM2);

/// Builds a model with SigLIP-so400m on tiles with this side; an image has four tiles per side.
const fn preset(name: &'static str, family: &str, tile: u16, scale: u32, llm: LlmSpec) -> Preset {
    let side = tile as u32 / 14;
    let (patches, merged) = (side * side, scale * scale);
    let size = TowerSize { layers: 27, hidden: 1152, heads: 16, ffn: 4304 };
    let tower = siglip_encoder(size, SquareInput { patch_inputs: PATCH_INPUTS, patches }, false);
    let encoder = EncoderSpec { projector: Projector::new(merged, size.hidden * merged, None), ..tower };
    let rule = VisionRule::ScaledTiles(ScaledTiles {
        tile_pixels: tile,
        tile_patches: patches,
        tile_tokens: patches / merged,
        side_pixels: 4 * tile,
        is_cut: true,
    });
    let vision = VisionSpec { family: FamilyId::new(family), encoder, rule };
    Preset { name, vision: Some(vision), audio: None, llm }
}

/// # Source
/// `Idefics3Config`, `Idefics3Processor` and `Idefics3ImageProcessor` in transformers 5.24.0, and the
/// `SmolVLM` classes, which are the same for images.
fn read(source: &CheckpointFields<'_>, family: FamilyId) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_model(config, "llama")?;
    let fields = config.child_or_empty("vision_config")?;
    let tower = square_tower_with_defaults(&fields, [12, 1152, 16, 3072], [224, 32], |size, square| {
        siglip_encoder(size, square, false)
    })?;
    let scale = config.count("scale_factor", 2)?;
    if !tower.patches_per_side.is_multiple_of(scale) {
        let problem = format!("= {scale} does not divide {} patches a side", tower.patches_per_side);
        return Err(config.invalid("scale_factor", problem));
    }
    let merged = scale.saturating_mul(scale);
    let projector = Projector::new(merged, tower.encoder.hidden.saturating_mul(merged), None);
    let encoder = EncoderSpec { projector, ..tower.encoder };
    let rule = VisionRule::ScaledTiles(rule(source, &tower, scale)?);
    let vision = Some(VisionSpec { family, encoder, rule });
    Ok(PartialModelSpec { family, vision, audio: None, llm: Some(llm) })
}

fn rule(source: &CheckpointFields<'_>, tower: &SquareTower, scale: u32) -> Result<ScaledTiles> {
    let side = tower.patches_per_side / scale;
    let tile_tokens = side.saturating_mul(side);
    if let Some(tokens) = source.processor.optional_count("image_seq_len")?
        && tokens != tile_tokens
    {
        let problem = format!("= {tokens}, but the vision tower makes {tile_tokens} tokens of a tile");
        return Err(source.processor.invalid("image_seq_len", problem));
    }
    let image = source.image();
    let tile_pixels = tower.image_pixels;
    let tile = longest_edge(&image, "max_image_size", u32::from(tile_pixels))?;
    if tile != tile_pixels {
        let problem = format!("= {tile} pixels, but the vision tower takes {tile_pixels}");
        return Err(image.invalid("max_image_size.longest_edge", problem));
    }
    let side_pixels = longest_edge(&image, "size", u32::from(tile_pixels).saturating_mul(4))?;
    let is_cut = image.flag("do_image_splitting", true)?;
    let tiles = u64::from(side_pixels.min(4096)).div_ceil(u64::from(tile_pixels).max(1));
    if is_cut && tiles > ScaledTiles::GRID_SIDE_MAX {
        let most = ScaledTiles::GRID_SIDE_MAX;
        let problem = format!("= {side_pixels} pixels is {tiles} tiles of {tile_pixels}, more than {most}");
        return Err(image.invalid("size.longest_edge", problem));
    }
    let tile_patches = tower.patches_per_side.saturating_mul(tower.patches_per_side);
    Ok(ScaledTiles { tile_pixels, tile_patches, tile_tokens, side_pixels, is_cut })
}

/// Reads a longest edge in pixels.
fn longest_edge(image: &ConfigFields<'_>, key: &str, default: u32) -> Result<u16> {
    let size = image.child_or_empty(key)?;
    if image.has(key) && !size.has("longest_edge") {
        return Err(image.invalid(key, "must have `longest_edge`"));
    }
    let edge = size.count("longest_edge", default)?;
    u16::try_from(edge).map_err(|_| size.invalid("longest_edge", format!("= {edge} is over 65535 pixels")))
}
