//! Reads token rules by their settings, as descriptions name them; `docs/any-model.md` lists the settings.

use std::num::{NonZeroU16, NonZeroU32};

use super::super::fixed_resolution::FRAMES_MAX;
use super::required;
use crate::error::Result;
use crate::model::config::ConfigFields;
use crate::tokens::VisionRule;
use crate::tokens::any_res::{AnyRes, VideoNewline};
use crate::tokens::audio::{AudioRule, AudioWindows};
use crate::tokens::dynamic_tiles::DynamicTiles;
use crate::tokens::fitted_tiles::FittedTiles;
use crate::tokens::fixed_tile::FixedTile;
use crate::tokens::listed_grids::{GridList, ListedGrids};
use crate::tokens::longest_edge::LongestEdge;
use crate::tokens::native::{NativeResolution, PixelRange};
use crate::tokens::scaled_tiles::ScaledTiles;

/// Reads a rule from its settings.
type MakeRule = fn(&ConfigFields<'_>) -> Result<MadeRule>;

/// Rules for images.
const VISION_RULES: [(&str, MakeRule); 8] = [
    ("any_res", any_res),
    ("fitted_tiles", fitted_tiles),
    ("listed_grids", listed_grids),
    ("longest_edge", longest_edge),
    ("native", native),
    ("scaled_tiles", scaled_tiles),
    ("square", square),
    ("tiles", tiles),
];

/// Reads a rule for images by its settings.
pub(in crate::model) fn vision_rule(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    let name = rule_name(tokens)?;
    let Some((_, read)) = VISION_RULES.iter().find(|(known, _)| *known == name) else {
        let known = VISION_RULES.map(|(known, _)| known).join(", ");
        return Err(tokens.invalid("rule", format!("= \"{name}\" is unknown, known are {known}")));
    };
    read(tokens)
}

/// Reads a rule for clips by its settings.
pub(in crate::model) fn audio_rule(tokens: &ConfigFields<'_>) -> Result<AudioRule> {
    match rule_name(tokens)? {
        "mel_windows" => {}
        unknown => {
            let problem = format!("= \"{unknown}\" is unknown, known is mel_windows");
            return Err(tokens.invalid("rule", problem));
        }
    }
    tokens.refuse_others(&["rule", "max_windows", "window_tokens", "marker_tokens"])?;
    Ok(AudioRule::Windows(AudioWindows {
        window_tokens: tokens.count("window_tokens", 1500)?,
        windows_max: tokens.count("max_windows", u32::MAX)?,
        marker_tokens: small(tokens, "marker_tokens", Some(0))?,
    }))
}

/// Token rule, with the number of patches along a side that become one token and the number of frames in a
/// patch.
pub(in crate::model) type MadeRule = (VisionRule, u32, u32);

fn native(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&[
        "rule",
        "patch_size",
        "merge_size",
        "temporal_patch_size",
        "min_pixels",
        "max_pixels",
        "min_frame_pixels",
        "max_frame_pixels",
        "max_frames",
        "window_size",
        "marker_tokens",
    ])?;
    let image = PixelRange { min: required(tokens, "min_pixels")?, max: required(tokens, "max_pixels")? };
    let frame = PixelRange {
        min: tokens.count("min_frame_pixels", image.min)?,
        max: tokens.count("max_frame_pixels", image.max)?,
    };
    for (range, min, max) in
        [(image, "min_pixels", "max_pixels"), (frame, "min_frame_pixels", "max_frame_pixels")]
    {
        if range.min > range.max {
            return Err(tokens.invalid(min, format!("= {} is more than `{max}` = {}", range.min, range.max)));
        }
    }
    let [patch_pixels, merge, frames_per_patch] = [
        side(tokens, "patch_size", None)?,
        side(tokens, "merge_size", Some(1))?,
        side(tokens, "temporal_patch_size", Some(1))?,
    ];
    let window = tokens.optional_count("window_size")?.map(|pixels| {
        let patches = pixels / u32::from(patch_pixels.get());
        let window = u16::try_from(patches).ok().and_then(NonZeroU16::new);
        window.ok_or_else(|| {
            tokens.invalid("window_size", format!("= {pixels} pixels make no patch, or too many"))
        })
    });
    let rule = NativeResolution {
        patch_pixels,
        merge,
        window_patches: window.transpose()?,
        frames_per_patch,
        image,
        frame,
        frames_max: tokens.count("max_frames", NativeResolution::QWEN2_VL.frames_max)?,
        marker_tokens: small(tokens, "marker_tokens", Some(0))?,
        ..NativeResolution::QWEN2_VL
    };
    Ok((VisionRule::Native(rule), u32::from(merge.get()), u32::from(frames_per_patch.get())))
}

fn tiles(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&[
        "rule",
        "tile_size",
        "patch_size",
        "merge_size",
        "max_tiles",
        "max_frames",
        "marker_tokens",
    ])?;
    let rule =
        tiles_up_to(tokens, small(tokens, "max_tiles", Some(12))?, small(tokens, "marker_tokens", Some(0))?)?;
    Ok((VisionRule::DynamicTiles(rule), merge(tokens)?, 1))
}

fn tiles_up_to(tokens: &ConfigFields<'_>, tiles_max: u8, marker_tokens: u8) -> Result<DynamicTiles> {
    let (tile_pixels, columns) = tile(tokens)?;
    let merge = merge(tokens)?;
    check_merge(tokens, columns, merge)?;
    let count = |side: u32| {
        u16::try_from(side.saturating_mul(side)).map_err(|_| {
            tokens.invalid("patch_size", format!("makes {side} x {side} patches of a tile, too many"))
        })
    };
    Ok(DynamicTiles {
        tile_pixels,
        tile_patches: count(columns)?,
        tile_tokens: count(columns / merge)?,
        tiles_max,
        frames_max: tokens.count("max_frames", FRAMES_MAX)?,
        marker_tokens,
    })
}

fn any_res(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&[
        "rule",
        "tile_size",
        "patch_size",
        "max_grid_side",
        "max_feature_tiles",
        "max_frames",
    ])?;
    let (tile_pixels, columns) = tile(tokens)?;
    let rule = AnyRes {
        tile_pixels,
        patches_per_side: u16::try_from(columns).unwrap_or(u16::MAX),
        grid_side_max: small(tokens, "max_grid_side", Some(6))?,
        feature_tiles_max: small(tokens, "max_feature_tiles", Some(9))?,
        frames_max: tokens.count("max_frames", FRAMES_MAX)?,
        video_newline: VideoNewline::Once,
    };
    Ok((VisionRule::AnyRes(rule), 1, 1))
}

fn listed_grids(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&["rule", "tile_size", "patch_size", "grids"])?;
    let (tile_pixels, columns) = tile(tokens)?;
    let listed = tokens.value("grids").ok_or_else(|| tokens.invalid("grids", "is missing"))?;
    let grids: GridList = serde_json::from_value(listed.clone())
        .map_err(|error| tokens.invalid("grids", format!("must be a list of rows and columns: {error}")))?;
    let patches_per_side = u16::try_from(columns).unwrap_or(u16::MAX);
    Ok((VisionRule::ListedGrids(ListedGrids { tile_pixels, patches_per_side, grids }), 1, 1))
}

fn scaled_tiles(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&["rule", "tile_size", "patch_size", "merge_size", "longest_edge", "cut"])?;
    let (tile_pixels, tile_patches, tile_tokens) = merged_tile(tokens)?;
    let side_pixels = side(tokens, "longest_edge", Some(u32::from(tile_pixels).saturating_mul(4)))?.get();
    let rule = ScaledTiles {
        tile_pixels,
        tile_patches,
        tile_tokens,
        side_pixels,
        is_cut: tokens.flag("cut", true)?,
    };
    Ok((VisionRule::ScaledTiles(rule), merge(tokens)?, 1))
}

fn fitted_tiles(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&["rule", "tile_size", "patch_size", "merge_size", "max_tiles", "enlarge"])?;
    let (tile_pixels, tile_patches, tile_tokens) = merged_tile(tokens)?;
    let rule = FittedTiles {
        tile_pixels,
        tile_patches,
        tile_tokens,
        tiles_max: small(tokens, "max_tiles", Some(16))?,
        is_enlarged: tokens.flag("enlarge", false)?,
    };
    Ok((VisionRule::FittedTiles(rule), merge(tokens)?, 1))
}

fn longest_edge(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&["rule", "patch_size", "merge_size", "longest_edge"])?;
    let rule = LongestEdge {
        patch_pixels: side(tokens, "patch_size", None)?,
        merge: side(tokens, "merge_size", Some(1))?,
        side_max: side(tokens, "longest_edge", None)?,
    };
    Ok((VisionRule::LongestEdge(rule), merge(tokens)?, 1))
}

fn square(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    tokens.refuse_others(&[
        "rule",
        "tile_size",
        "patch_size",
        "merge_size",
        "crop",
        "max_frames",
        "marker_tokens",
    ])?;
    let ((tile_pixels, columns), merge) = (tile(tokens)?, merge(tokens)?);
    check_merge(tokens, columns, merge)?;
    let rule = FixedTile {
        tile_pixels,
        tile_patches: columns.saturating_mul(columns),
        pooled_patches: NonZeroU32::new(merge.saturating_mul(merge)).unwrap_or(NonZeroU32::MIN),
        marker_tokens: small(tokens, "marker_tokens", Some(0))?,
        is_cropped: tokens.flag("crop", false)?,
        frames_max: tokens.count("max_frames", FRAMES_MAX)?,
    };
    Ok((VisionRule::Fixed(rule), merge, 1))
}

/// Checks that whole squares of patches become tokens.
fn check_merge(tokens: &ConfigFields<'_>, columns: u32, merge: u32) -> Result<()> {
    if columns.is_multiple_of(merge) {
        return Ok(());
    }
    let problem = format!("= {merge} does not divide the {columns} patches along a side of a tile");
    Err(tokens.invalid("merge_size", problem))
}

/// Reads a tile's side in pixels and in patches.
fn tile(tokens: &ConfigFields<'_>) -> Result<(u16, u32)> {
    let pixels = side(tokens, "tile_size", None)?.get();
    let patch = u32::from(side(tokens, "patch_size", None)?.get());
    if patch > u32::from(pixels) {
        return Err(tokens.invalid("patch_size", format!("= {patch} is larger than `tile_size` = {pixels}")));
    }
    Ok((pixels, u32::from(pixels) / patch))
}

/// Reads a tile's side in pixels, its patches, and the tokens that they become.
fn merged_tile(tokens: &ConfigFields<'_>) -> Result<(u16, u32, u32)> {
    let ((pixels, columns), merge) = (tile(tokens)?, merge(tokens)?);
    check_merge(tokens, columns, merge)?;
    let square = |side: u32| side.saturating_mul(side);
    Ok((pixels, square(columns), square(columns / merge)))
}

fn merge(tokens: &ConfigFields<'_>) -> Result<u32> {
    Ok(u32::from(side(tokens, "merge_size", Some(1))?.get()))
}

fn rule_name<'a>(tokens: &ConfigFields<'a>) -> Result<&'a str> {
    tokens.text("rule")?.ok_or_else(|| tokens.invalid("rule", "is missing"))
}

/// Reads a side in pixels or patches.
fn side(fields: &ConfigFields<'_>, key: &str, default: Option<u32>) -> Result<NonZeroU16> {
    let value = fields.optional_count(key)?.or(default).ok_or_else(|| fields.invalid(key, "is missing"))?;
    let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
    side.ok_or_else(|| fields.invalid(key, format!("must be at most {}, found {value}", u16::MAX)))
}

/// Reads a number up to 255, which may be 0.
fn small(fields: &ConfigFields<'_>, key: &str, default: Option<u8>) -> Result<u8> {
    optional_small(fields, key)?.or(default).ok_or_else(|| fields.invalid(key, "is missing"))
}

/// Reads a number up to 255, which may be 0, if it is present.
pub(in crate::model) fn optional_small(fields: &ConfigFields<'_>, key: &str) -> Result<Option<u8>> {
    let Some(value) = fields.value(key) else { return Ok(None) };
    let number = fields.whole_number(key, value, 0)?;
    let small = u8::try_from(number);
    small.map(Some).map_err(|_| fields.invalid(key, format!("must be at most 255, found {number}")))
}
