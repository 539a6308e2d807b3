//! LLaVA-NeXT (LLaVA 1.6): CLIP or SigLIP on tiles, in one of a few listed grids.

use super::fixed_resolution::check_processor_side;
use super::language_models;
use super::llava::{VICUNA_7B, VICUNA_13B, check_patch, clip_336, square_encoder};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{FamilyId, LlmSpec, ModelFamily, Preset, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::listed_grids::{GridList, ListedGrids};

const FAMILY: FamilyId = FamilyId::new("llava_next");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&LlavaNext];

/// LLaVA-NeXT.
#[derive(Debug)]
struct LlavaNext;

impl ModelFamily for LlavaNext {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["llava_next"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files)
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

const MISTRAL_7B: LlmSpec = language_models::llama(32, 4096, [32, 8, 128], 14_336, 32_064);

const PRESETS: [Preset; 3] = [
    preset("llava-next-mistral-7b", MISTRAL_7B),
    preset("llava-next-vicuna-7b", VICUNA_7B),
    preset("llava-next-vicuna-13b", VICUNA_13B),
];

const fn preset(name: &'static str, llm: LlmSpec) -> Preset {
    let mut encoder = clip_336(llm);
    encoder.projector.vector_parameters += llm.hidden as u64;
    let rule = VisionRule::ListedGrids(ListedGrids::LLAVA_NEXT);
    Preset { name, vision: Some(VisionSpec { family: FAMILY, encoder, rule }), audio: None, llm }
}

/// # Source
/// `LlavaNextConfig`, `LlavaNextProcessor` and `LlavaNextImageProcessor` in transformers 5.24.0.
fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_models::language_model(config, "llama")?;
    let tower = square_encoder(config, &config.child_or_empty("vision_config")?, &llm)?;
    check_patch(source, &tower)?;
    let image = source.image();
    for key in ["size", "crop_size"] {
        check_processor_side(&image, key, tower.image_pixels)?;
    }
    let of_model = grids(config, tower.image_pixels)?;
    if let Some(of_processor) = grids(&image, tower.image_pixels)?
        && of_processor != of_model.unwrap_or(GridList::LLAVA_NEXT)
    {
        return Err(image.invalid("image_grid_pinpoints", "are other grids than those of `config.json`"));
    }
    let rule = VisionRule::ListedGrids(ListedGrids {
        tile_pixels: tower.image_pixels,
        patches_per_side: u16::try_from(tower.patches_per_side).unwrap_or(u16::MAX),
        grids: of_model.unwrap_or(GridList::LLAVA_NEXT),
    });
    let mut encoder = tower.encoder;
    // The newline embedding.
    let vectors = &mut encoder.projector.vector_parameters;
    *vectors = vectors.saturating_add(u64::from(llm.hidden));
    let vision = Some(VisionSpec { family: FAMILY, encoder, rule });
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(llm) })
}

/// Reads a file's grids, height first; `None` if it lists none.
fn grids(fields: &ConfigFields<'_>, tile_pixels: u16) -> Result<Option<GridList>> {
    let key = "image_grid_pinpoints";
    let Some(value) = fields.value(key) else { return Ok(None) };
    let listed: Vec<[u64; 2]> = serde_json::from_value(value.clone())
        .map_err(|error| fields.invalid(key, format!("must be a list of heights and widths: {error}")))?;
    let tile = u64::from(tile_pixels).max(1);
    let tiles = |pixels: u64| u8::try_from(pixels / tile).ok().filter(|_| pixels.is_multiple_of(tile));
    let grid = |[height, width]: &[u64; 2]| Some([tiles(*height)?, tiles(*width)?]);
    let grids: Option<Vec<[u8; 2]>> = listed.iter().map(grid).collect();
    let grids = grids.and_then(|grids| GridList::new(&grids)).ok_or_else(|| {
        let most = GridList::GRIDS_MAX;
        fields.invalid(key, format!("must be 1 to {most} multiples of the tile of {tile_pixels} pixels"))
    })?;
    Ok(Some(grids))
}
