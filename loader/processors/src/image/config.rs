//! Reads the settings that all families' image processors share from a `preprocessor_config.json`.

use dflop_costmodel::Result;
use dflop_costmodel::config::ConfigFields;
use serde_json::Value;

use super::Normalization;
use super::filter::Filter;

/// Patch size in pixels for encoders whose configuration does not declare it.
pub(crate) const PATCH_PIXELS: u64 = 14;
/// Maximum side of a square in pixels; a file comes with a model and must not cause an allocation of
/// gigabytes.
const SIDE_MAX: u16 = 8_192;

/// Returns the side length of a square: a number, `{"shortest_edge"}` or equal `{"height", "width"}`.
pub(crate) fn square_side(fields: &ConfigFields<'_>, key: &str, default: u16) -> Result<u16> {
    let Some(size) = fields.value(key) else { return Ok(default) };
    let side = match size {
        Value::Number(_) => size.as_u64(),
        _ if size.get("shortest_edge").is_some() => size["shortest_edge"].as_u64(),
        _ if size.get("height").is_some() && size.get("height") == size.get("width") => {
            size["height"].as_u64()
        }
        _ => None,
    };
    let side = side.and_then(|side| u16::try_from(side).ok()).filter(|side| (1..=SIDE_MAX).contains(side));
    side.ok_or_else(|| {
        fields.invalid(key, format!("= {size} must be a square of at most {SIDE_MAX} pixels a side"))
    })
}

/// Reads the resampling filter. Default: bicubic.
pub(crate) fn filter(fields: &ConfigFields<'_>) -> Result<Filter> {
    filter_or(fields, Filter::Bicubic)
}

/// Reads the resampling filter.
pub(crate) fn filter_or(fields: &ConfigFields<'_>, default: Filter) -> Result<Filter> {
    let key = "resample";
    let Some(value) = fields.value(key) else { return Ok(default) };
    let number = fields.whole_number(key, value, 0)?;
    Filter::from_pillow(u64::from(number))
        .ok_or_else(|| fields.invalid(key, format!("= {number} is not supported")))
}

/// Reads the conversion from bytes to values.
pub(crate) fn normalization(fields: &ConfigFields<'_>, default: Normalization) -> Result<Normalization> {
    let scale = fields.number("rescale_factor", default.scale)?;
    let mean = channels(fields, "image_mean", default.mean)?;
    let deviation = channels(fields, "image_std", default.deviation)?;
    if deviation.contains(&0.0) {
        return Err(fields.invalid("image_std", "must not contain zeros"));
    }
    Ok(Normalization { scale, mean, deviation })
}

fn channels(fields: &ConfigFields<'_>, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
    match fields.value(key) {
        None => Ok(default),
        Some(Value::Number(all)) => Ok([all.as_f64().unwrap_or_default(); 3]),
        Some(values) => serde_json::from_value(values.clone())
            .map_err(|error| fields.invalid(key, format!("must be three numbers: {error}"))),
    }
}
