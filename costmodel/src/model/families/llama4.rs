//! Llama 4: a CLIP-like encoder on tiles, in the grid that changes an image least.

use super::clip_siglip::clip_encoder;
use super::fixed_resolution::{SquareTower, check_processor_side, square_tower_with_defaults};
use super::language_models::language_model;
use crate::error::Result;
use crate::model::config::{CheckpointFields, PartialModelSpec};
use crate::model::{EncoderSpec, FamilyId, ModelFamily, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::fitted_tiles::FittedTiles;

const FAMILY: FamilyId = FamilyId::new("llama4");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Llama4];

/// Llama 4.
#[derive(Debug)]
struct Llama4;

impl ModelFamily for Llama4 {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["llama4"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files)
    }
}

/// # Source
/// `Llama4Config`, `Llama4Processor` and `Llama4ImageProcessor` in transformers 5.24.0.
fn read(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_model(config, "llama4_text")?;
    let fields = config.child_or_empty("vision_config")?;
    let tower = square_tower_with_defaults(&fields, [34, 768, 16, 5632], [448, 14], clip_encoder)?;
    let ratio = fields.number("pixel_shuffle_ratio", 0.5)?;
    // A reciprocal that is not whole has a product, rounded down, below 1 with the ratio, which is an error.
    let merge = (1.0 / ratio) as u32;
    if merge == 0 || f64::from(merge) * ratio < 1.0 || !tower.patches_per_side.is_multiple_of(merge) {
        let problem = format!("= {ratio} does not divide {} patches a side", tower.patches_per_side);
        return Err(fields.invalid("pixel_shuffle_ratio", problem));
    }
    let merged = merge.saturating_mul(merge);
    let width = tower.encoder.hidden.saturating_mul(merged);
    if tower.encoder.ffn != width {
        let problem = format!("= {}, but {merged} patches side by side are {width} wide", tower.encoder.ffn);
        return Err(fields.invalid("intermediate_size", problem));
    }
    let middle = fields.count("projector_input_dim", 4096)?;
    for (key, default) in [("projector_output_dim", 4096), ("vision_output_dim", 7680)] {
        let found = fields.count(key, default)?;
        if found != middle {
            return Err(fields.invalid(key, format!("= {found} must equal `projector_input_dim` = {middle}")));
        }
    }
    let further = u64::from(middle).saturating_mul(u64::from(middle));
    let projector = Projector::new(merged, width, Some(middle)).further(further);
    let encoder = EncoderSpec { projector, ..tower.encoder };
    let rule = VisionRule::FittedTiles(rule(source, &tower, merged)?);
    let vision = Some(VisionSpec { family: FAMILY, encoder, rule });
    Ok(PartialModelSpec { family: FAMILY, vision, audio: None, llm: Some(llm) })
}

fn rule(source: &CheckpointFields<'_>, tower: &SquareTower, merged: u32) -> Result<FittedTiles> {
    let image = source.image();
    check_processor_side(&image, "size", tower.image_pixels)?;
    let most = image.count("max_patches", 16)?;
    let tiles_max = u8::try_from(most)
        .map_err(|_| image.invalid("max_patches", format!("= {most} tiles are more than 255")))?;
    let tile_patches = tower.patches_per_side.saturating_mul(tower.patches_per_side);
    Ok(FittedTiles {
        tile_pixels: tower.image_pixels,
        tile_patches,
        tile_tokens: tile_patches / merged,
        tiles_max,
        is_enlarged: image.flag("resize_to_max_canvas", false)?,
    })
}
