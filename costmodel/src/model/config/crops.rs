//! Reads the pan-and-scan crops in Gemma 3 files.

use std::num::NonZeroU32;

use super::ConfigFields;
use crate::error::Result;
use crate::tokens::VisionRule;
use crate::tokens::fixed_tile::FixedTile;
use crate::tokens::pan_and_scan::{AspectRatio, PanAndScan};

/// Reads the rule for an image processor that may cut images into crops; `tile` is the square that an image
/// or a crop becomes. Missing settings have the processor's defaults.
///
/// # Errors
/// [`Error::Configuration`](crate::Error::Configuration) that names the field.
///
/// # Source
/// `Gemma3Processor` in transformers 5.24.0. There the setting in the file does not count: only the argument
/// `do_pan_and_scan` in a processor call cuts images.
pub fn pan_and_scan(fields: &ConfigFields<'_>, tile: FixedTile) -> Result<VisionRule> {
    if !fields.flag("do_pan_and_scan", false)? {
        return Ok(VisionRule::Fixed(tile));
    }
    let count = |key, default: NonZeroU32| {
        fields.count(key, default.get()).map(|count| NonZeroU32::new(count).unwrap_or(default))
    };
    let key = "pan_and_scan_min_ratio_to_activate";
    let aspect = fields.number(key, PanAndScan::ASPECT_MIN.get())?;
    Ok(VisionRule::PanAndScan(PanAndScan {
        tile,
        crop_pixels_min: count("pan_and_scan_min_crop_size", PanAndScan::CROP_PIXELS_MIN)?,
        crops_max: count("pan_and_scan_max_num_crops", PanAndScan::CROPS_MAX)?,
        aspect_min: AspectRatio::new(aspect).unwrap_or(PanAndScan::ASPECT_MIN),
    }))
}
