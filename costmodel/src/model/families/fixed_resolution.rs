//! Encoder sizes from which families build an [`EncoderSpec`], and the fields of encoders with fixed-size
//! squares.
//!
//! A family expands a few sizes to every matrix, vector and extra token in its encoder; presets and readers
//! share these functions, so both count the same parameters and FLOPs. Towers have no projector; the caller
//! adds it.
//!
//! # Source
//! The modules in transformers 4.57.1; parameter counts are compared with them in `costmodel/tests/flops.rs`.

use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec, excerpt};
use crate::model::{EncoderDetails, EncoderSpec, FamilyId, Mlp, Projector, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::fixed_tile::FixedTile;
use serde_json::Value;
use std::num::NonZeroU32;

/// Number of frames that a video is sampled down to, if neither a file nor the family sets a different
/// number.
pub(super) const FRAMES_MAX: u32 = 32;
/// Maximum side of an image or a patch in pixels.
const SIDE_MAX: u32 = u16::MAX as u32;

/// Tower with square inputs.
#[derive(Debug)]
pub(super) struct SquareTower {
    /// Encoder, whose projector is set by the caller.
    pub(super) encoder: EncoderSpec,
    /// Square side in pixels.
    pub(super) image_pixels: u16,
    /// Number of patches along the side.
    pub(super) patches_per_side: u32,
}

/// Returns the vision tower's fields: in `vision_config` in a checkpoint of both towers, else at the top.
pub(super) fn vision_fields<'a>(config: &ConfigFields<'a>) -> Result<ConfigFields<'a>> {
    match config.text("model_type")? {
        Some("siglip" | "clip") => config.child_or_empty("vision_config"),
        _ => Ok(config.clone()),
    }
}

/// Reads an encoder with square inputs; `patch_default` is a patch's side in pixels.
pub(super) fn square_tower(
    fields: &ConfigFields<'_>,
    patch_default: u32,
    make: impl FnOnce(TowerSize, SquareInput) -> EncoderSpec,
) -> Result<SquareTower> {
    square_tower_with_defaults(fields, [12, 768, 12, 3072], [224, patch_default], make)
}

/// Reads an encoder with square inputs and other defaults: layers, width, heads and MLP width; image and
/// patch sides.
pub(super) fn square_tower_with_defaults(
    fields: &ConfigFields<'_>,
    size: [u32; 4],
    [image, patch]: [u32; 2],
    make: impl FnOnce(TowerSize, SquareInput) -> EncoderSpec,
) -> Result<SquareTower> {
    let dimensions = dimensions(fields, size)?;
    let (image_pixels, square, patches_per_side) = square(fields, image, patch)?;
    Ok(SquareTower { encoder: make(dimensions, square), image_pixels, patches_per_side })
}

/// Reads layers, width, heads and MLP width under the names that most towers share.
pub(super) fn dimensions(fields: &ConfigFields<'_>, defaults: [u32; 4]) -> Result<TowerSize> {
    let [layers, hidden, heads, ffn] = defaults;
    let hidden = fields.count("hidden_size", hidden)?;
    let heads = fields.count("num_attention_heads", heads)?;
    fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)?;
    Ok(TowerSize {
        layers: fields.count("num_hidden_layers", layers)?,
        hidden,
        heads,
        ffn: fields.count("intermediate_size", ffn)?,
    })
}

/// Reads the side in pixels, the tower input, and the number of patches along the side.
pub(super) fn square(fields: &ConfigFields<'_>, image: u32, patch: u32) -> Result<(u16, SquareInput, u32)> {
    let image_pixels = fields.square_side("image_size", image)?;
    let patch_pixels = fields.square_side("patch_size", patch)?;
    let channels = fields.count("num_channels", 3)?;
    let Ok(side) = u16::try_from(image_pixels) else {
        return Err(fields.invalid("image_size", format!("= {image_pixels} is over {SIDE_MAX} pixels")));
    };
    if patch_pixels > image_pixels {
        let problem = format!("= {patch_pixels} is larger than `image_size` = {image_pixels}");
        return Err(fields.invalid("patch_size", problem));
    }
    let patches_per_side = image_pixels / patch_pixels;
    let patch_inputs = patch_inputs(fields, channels, patch_pixels, 1)?;
    let patches = patches_per_side.saturating_mul(patches_per_side);
    Ok((side, SquareInput { patch_inputs, patches }, patches_per_side))
}

/// Computes the multiply-adds per hidden unit for a patch over some frames.
pub(super) fn patch_inputs(fields: &ConfigFields<'_>, channels: u32, patch: u32, frames: u32) -> Result<u32> {
    let inputs = [channels, patch, patch, frames]
        .into_iter()
        .fold(1_u64, |product, factor| product.saturating_mul(u64::from(factor)));
    u32::try_from(inputs).map_err(|_| fields.invalid("patch_size", format!("= {patch} is too large")))
}

/// Returns the number of layers that run for the hidden state with this index: 0 is before the first layer,
/// -1 after the last.
pub(super) fn layers_until(fields: &ConfigFields<'_>, key: &str, index: i64, layers: u32) -> Result<u32> {
    let states = i64::from(layers) + 1;
    let place = if index < 0 { states.checked_add(index) } else { Some(index) };
    match place {
        Some(place) if (0..states).contains(&place) => Ok(place as u32),
        _ => Err(fields.invalid(key, format!("= {index} is not one of {states} states of {layers} layers"))),
    }
}

/// Reads a separate encoder with square inputs; `key` is the processor field with the square's side.
pub(super) fn alone(
    source: &CheckpointFields<'_>,
    family: FamilyId,
    tower: &SquareTower,
    key: &str,
    is_cropped: bool,
) -> Result<PartialModelSpec> {
    check_processor_side(&source.image(), key, tower.image_pixels)?;
    let patches = tower.patches_per_side.saturating_mul(tower.patches_per_side);
    let rule = VisionRule::Fixed(FixedTile {
        tile_pixels: tower.image_pixels,
        tile_patches: patches,
        pooled_patches: NonZeroU32::MIN,
        marker_tokens: 0,
        is_cropped,
        frames_max: source.frames_max(FRAMES_MAX)?,
    });
    let vision = VisionSpec { family, encoder: tower.encoder, rule };
    Ok(PartialModelSpec { family, vision: Some(vision), ..PartialModelSpec::default() })
}

/// Checks that the processor outputs squares with the tower's size.
pub(super) fn check_processor_side(processor: &ConfigFields<'_>, key: &str, tower_pixels: u16) -> Result<()> {
    let side = match processor.value(key) {
        None => return Ok(()),
        Some(serde_json::Value::Object(_)) => {
            let size = processor.child_or_empty(key)?;
            let shortest = size.optional_count("shortest_edge")?;
            let [height, width] = [size.optional_count("height")?, size.optional_count("width")?];
            if shortest.is_none() && height != width {
                return Err(processor.invalid(key, "must be a square"));
            }
            shortest.or(height)
        }
        Some(side) => Some(processor.whole_number(key, side, 1)?),
    };
    match side {
        Some(side) if side != u32::from(tower_pixels) => {
            let problem = format!("= {side} pixels, but the vision tower takes {tower_pixels}");
            Err(processor.invalid(key, problem))
        }
        _ => Ok(()),
    }
}

/// Returns the number of layers up to the last used output, and the number of used outputs; `default` is the
/// index of the hidden state that is used without the field.
pub(super) fn feature_layers(config: &ConfigFields<'_>, layers: u32, default: i64) -> Result<(u32, u32)> {
    let key = "vision_feature_layer";
    let index = |value: &Value| match value.as_i64() {
        Some(index) => layers_until(config, key, index, layers),
        None => Err(config.invalid(key, format!("must be whole numbers, found {}", excerpt(value)))),
    };
    match config.value(key) {
        None => Ok((layers_until(config, key, default, layers)?, 1)),
        Some(Value::Array(indices)) => {
            let used = indices.iter().map(index).collect::<Result<Vec<u32>>>()?;
            match used.iter().max() {
                Some(last) => Ok((*last, u32::try_from(used.len()).unwrap_or(u32::MAX))),
                None => Err(config.invalid(key, "names no layer")),
            }
        }
        Some(value) => Ok((index(value)?, 1)),
    }
}

/// Checks that the selection strategy fits the tower.
///
/// Only the strategy `default` drops the class token; in a tower without a class token it would drop a patch.
/// `missing` is the strategy without the field.
pub(super) fn check_class_token(config: &ConfigFields<'_>, tower: &SquareTower, missing: &str) -> Result<()> {
    let key = "vision_feature_select_strategy";
    let has_class_token = tower.encoder.details.class_tokens > 0;
    match config.text(key)?.unwrap_or(missing) {
        "default" if has_class_token => Ok(()),
        "full" if !has_class_token => Ok(()),
        strategy => {
            let has = if has_class_token { "has a" } else { "has no" };
            Err(config.invalid(key, format!("= \"{strategy}\", but the vision tower {has} class token")))
        }
    }
}

/// Multiply-adds per hidden unit for a patch with 14 pixels per side in three colors.
pub(crate) const PATCH_INPUTS: u32 = 3 * 14 * 14;

/// Common tower sizes.
#[derive(Clone, Copy)]
pub(crate) struct TowerSize {
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) heads: u32,
    pub(crate) ffn: u32,
}

/// Input to a tower with fixed-size squares.
#[derive(Clone, Copy)]
pub(crate) struct SquareInput {
    /// Multiply-adds per hidden unit and patch: channels * patch².
    pub(crate) patch_inputs: u32,
    /// Number of patches per square.
    pub(crate) patches: u32,
}

/// Builds an encoder without windows and without a projector.
pub(super) const fn bare_tower(
    size: TowerSize,
    mlp: Mlp,
    stem_inputs: u32,
    details: EncoderDetails,
) -> EncoderSpec {
    let TowerSize { layers, hidden, heads, ffn } = size;
    EncoderSpec {
        layers,
        windowed_layers: 0,
        hidden,
        heads,
        ffn,
        mlp,
        stem_inputs,
        projector: Projector::new(1, hidden, None),
        details,
        counts: None,
    }
}

/// Multiplies a vector count by the vector width.
pub(super) const fn product(count: u32, width: u32) -> u64 {
    count as u64 * width as u64
}
