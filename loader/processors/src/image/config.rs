//! Reads an image processor from the `preprocessor_config.json` of Hugging Face.

use std::num::NonZeroU16;

use dflop_costmodel::tokens::any_res::AnyRes;
use dflop_costmodel::tokens::dynamic_tiles::DynamicTiles;
use dflop_costmodel::tokens::native::{NativeResolution, PixelRange};
use dflop_samples::{Error, Result};
use serde_json::Value;

use super::ImageProcessor;
use super::clip::Square;
use super::filter::Filter;
use super::intern_vl::InternVl;
use super::llava_onevision::LlavaOneVision;
use super::normalize::Normalization;
use super::qwen_vl::QwenVl;

/// Patch size of encoders whose configuration does not declare it.
const PATCH_PIXELS: u64 = 14;
/// Longest side of a square; a file comes with a model and must not cause an allocation of gigabytes.
const SIDE_MAX: u16 = 8_192;
/// Largest `max_pixels`.
const PIXELS_MAX: u64 = 1 << 26;
/// Largest `min_pixels`, to which the smallest image is enlarged.
const PIXELS_MIN_MAX: u64 = 1 << 24;

pub(super) fn image_processor(json: &Value) -> Result<ImageProcessor> {
    let named = |key: &str| json.get(key).and_then(Value::as_str);
    let Some(name) = named("image_processor_type").or_else(|| named("feature_extractor_type")) else {
        return Err(refused("`image_processor_type` is required"));
    };
    check_steps(json)?;
    match name.strip_suffix("Fast").unwrap_or(name) {
        "LlavaOnevisionImageProcessor" => llava_onevision(json),
        "GotOcr2ImageProcessor" => intern_vl(json),
        "Qwen2VLImageProcessor" | "Qwen2_5_VLImageProcessor" => qwen_vl(json),
        "CLIPImageProcessor" | "CLIPFeatureExtractor" => clip(json),
        "SiglipImageProcessor" => siglip(json),
        unknown => Err(refused(format!("unknown image processor `{unknown}`"))),
    }
}

/// Checks the steps: every processor here resizes, rescales and normalizes, so none of them may be disabled.
fn check_steps(json: &Value) -> Result<()> {
    for step in ["do_resize", "do_rescale", "do_normalize"] {
        if json.get(step).is_some_and(|value| *value != Value::Bool(true)) {
            return Err(refused(format!("`{step}` must be true")));
        }
    }
    Ok(())
}

fn llava_onevision(json: &Value) -> Result<ImageProcessor> {
    let tile_pixels = square_side(json, "size", 384)?;
    let rule = AnyRes {
        tile_pixels,
        patches_per_side: (u64::from(tile_pixels) / PATCH_PIXELS) as u16,
        grid_side_max: grid_side_max(json, u64::from(tile_pixels))?,
        frames_max: u32::MAX,
        ..AnyRes::LLAVA_ONEVISION
    };
    let normalization = normalization(json, Normalization::CLIP)?;
    Ok(ImageProcessor::LlavaOneVision(LlavaOneVision { rule, filter: filter(json)?, normalization }))
}

/// Returns the longest side of a grid; the rule has all grids of 1 to n columns and rows, so the file must
/// list all.
fn grid_side_max(json: &Value, tile: u64) -> Result<u8> {
    let Some(listed) = json.get("image_grid_pinpoints") else { return Ok(6) };
    let listed: Vec<[u64; 2]> = serde_json::from_value(listed.clone())
        .map_err(|error| refused(format!("`image_grid_pinpoints`: {error}")))?;
    let side = (listed.len() as f64).sqrt() as u64;
    let every = (1..=side).flat_map(|rows| (1..=side).map(move |columns| [rows * tile, columns * tile]));
    if listed.is_empty() || side * side != listed.len() as u64 || !every.eq(listed) {
        return Err(refused(
            "`image_grid_pinpoints` must list every grid of 1 to n tiles per side, in order",
        ));
    }
    u8::try_from(side).map_err(|_| refused("`image_grid_pinpoints` has too many grids"))
}

fn intern_vl(json: &Value) -> Result<ImageProcessor> {
    let tile_pixels = square_side(json, "size", 384)?;
    if number(json, "min_patches")?.is_some_and(|least| least != 1) {
        return Err(refused("`min_patches` must be 1"));
    }
    // A model's own configuration lacks the key; InternVL's processor splits unless the key is false.
    let is_cut = json.get("crop_to_patches").is_none_or(|value| *value != Value::Bool(false));
    let tiles_max = if is_cut { number(json, "max_patches")?.unwrap_or(12) } else { 1 };
    let patches = (u64::from(tile_pixels) / PATCH_PIXELS).pow(2);
    let too_large = |_| refused("`size` or `max_patches` is too large");
    let rule = DynamicTiles {
        tile_pixels,
        tile_patches: u16::try_from(patches).map_err(too_large)?,
        tile_tokens: u16::try_from(patches / 4).map_err(too_large)?,
        tiles_max: u8::try_from(tiles_max).map_err(too_large)?,
        frames_max: u32::MAX,
        ..DynamicTiles::INTERN_VL
    };
    let normalization = normalization(json, Normalization::CLIP)?;
    Ok(ImageProcessor::InternVl(InternVl { rule, filter: filter(json)?, normalization }))
}

fn qwen_vl(json: &Value) -> Result<ImageProcessor> {
    let released = NativeResolution::QWEN2_VL;
    let limit = |key: &str, edge: &str, default: u64| match (number(json, key)?, json.get("size")) {
        (Some(pixels), _) => Ok(pixels),
        (None, None | Some(Value::Null)) => Ok(default),
        (None, Some(size)) => number(size, edge)?.ok_or_else(|| {
            refused(format!("`size` must have `{edge}`, or `{key}` must be given next to it"))
        }),
    };
    let least = limit("min_pixels", "shortest_edge", 56 * 56)?;
    let most = limit("max_pixels", "longest_edge", 28 * 28 * 1280)?;
    let side = |key: &str, default: NonZeroU16| match number(json, key)? {
        None => Ok(default),
        Some(value) => u16::try_from(value)
            .ok()
            .and_then(NonZeroU16::new)
            .ok_or_else(|| refused(format!("`{key}` = {value} is out of range"))),
    };
    if least > most || least > PIXELS_MIN_MAX || most > PIXELS_MAX {
        return Err(refused(format!(
            "expected `min_pixels` of at most {PIXELS_MIN_MAX} and `max_pixels` of at most {PIXELS_MAX} and no less than \
             it, found {least} and {most}"
        )));
    }
    let pixels = |value| u32::try_from(value).map_err(|_| refused("the pixel limit exceeds 32 bits"));
    let rule = NativeResolution {
        patch_pixels: side("patch_size", released.patch_pixels)?,
        merge: side("merge_size", released.merge)?,
        frames_per_patch: side("temporal_patch_size", released.frames_per_patch)?,
        image: PixelRange { min: pixels(least)?, max: pixels(most)? },
        frames_max: u32::MAX,
        ..released
    };
    let normalization = normalization(json, Normalization::CLIP)?;
    Ok(ImageProcessor::QwenVl(QwenVl { rule, filter: filter(json)?, normalization }))
}

fn clip(json: &Value) -> Result<ImageProcessor> {
    let is_cropped = json.get("do_center_crop").is_none_or(|value| *value == Value::Bool(true));
    let shortest_side = match json.get("size") {
        Some(Value::Number(_)) => Some(square_side(json, "size", 224)?),
        Some(size) if size.get("shortest_edge").is_some() => Some(square_side(json, "size", 224)?),
        Some(size) if !size.is_null() => None,
        _ => Some(224),
    };
    let side = match (shortest_side, is_cropped) {
        (Some(_), true) => square_side(json, "crop_size", 224)?,
        (None, false) => square_side(json, "size", 224)?,
        (None, true) => {
            let side = square_side(json, "size", 224)?;
            if square_side(json, "crop_size", 224)? != side {
                return Err(refused("a square `size` must equal `crop_size`"));
            }
            side
        }
        (Some(_), false) => {
            return Err(refused("`do_center_crop` must be true, or images would differ in size"));
        }
    };
    if shortest_side.is_some_and(|shortest| shortest < side) {
        return Err(refused("`crop_size` must not exceed `size`"));
    }
    Ok(ImageProcessor::Clip(square(json, shortest_side, side, Normalization::CLIP)?))
}

fn siglip(json: &Value) -> Result<ImageProcessor> {
    let side = square_side(json, "size", 224)?;
    Ok(ImageProcessor::Siglip(square(json, None, side, Normalization::SIGNED)?))
}

fn square(json: &Value, shortest_side: Option<u16>, side: u16, default: Normalization) -> Result<Square> {
    let tokens = (u32::from(side) / PATCH_PIXELS as u32).pow(2);
    Ok(Square {
        shortest_side,
        side,
        tokens,
        filter: filter(json)?,
        normalization: normalization(json, default)?,
    })
}

/// Returns the side of a square: a number, `{"shortest_edge"}` or equal `{"height", "width"}`.
fn square_side(json: &Value, key: &str, default: u16) -> Result<u16> {
    let size = match json.get(key) {
        None | Some(Value::Null) => return Ok(default),
        Some(size) => size,
    };
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
        refused(format!("`{key}` = {size} must be a square of at most {SIDE_MAX} pixels a side"))
    })
}

fn filter(json: &Value) -> Result<Filter> {
    let number = number(json, "resample")?.unwrap_or(3);
    Filter::from_pillow(number).ok_or_else(|| refused(format!("`resample` = {number} is not supported")))
}

fn normalization(json: &Value, default: Normalization) -> Result<Normalization> {
    let scale = match json.get("rescale_factor") {
        None | Some(Value::Null) => default.scale,
        Some(factor) => factor.as_f64().ok_or_else(|| refused("`rescale_factor` must be a number"))?,
    };
    let mean = channels(json, "image_mean", default.mean)?;
    let deviation = channels(json, "image_std", default.deviation)?;
    if deviation.contains(&0.0) {
        return Err(refused("`image_std` must not contain zeros"));
    }
    Ok(Normalization { scale, mean, deviation })
}

fn channels(json: &Value, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Number(all)) => Ok([all.as_f64().unwrap_or_default(); 3]),
        Some(values) => {
            serde_json::from_value(values.clone()).map_err(|error| refused(format!("`{key}`: {error}")))
        }
    }
}

fn number(json: &Value, key: &str) -> Result<Option<u64>> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(value) => Ok(Some(value)),
            None => Err(refused(format!("`{key}` = {value} must be an integer"))),
        },
    }
}

fn refused(reason: impl Into<String>) -> Error {
    Error::Config { setting: "preprocessor_config", reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::ModelSpec;
    use serde_json::json;

    use super::*;

    /// Tests the settings of published checkpoints, including those that the files omit.
    #[test]
    fn published_configurations_are_those_of_the_presets() {
        let grids: Vec<[u16; 2]> =
            (1..=6).flat_map(|rows| (1..=6).map(move |columns| [384 * rows, 384 * columns])).collect();
        for (preset, config) in [
            (
                "llava-ov-qwen2.5-7b",
                json!({"image_processor_type": "LlavaOnevisionImageProcessor", "do_resize": true, "resample": 3,
                    "image_grid_pinpoints": grids, "size": {"height": 384, "width": 384},
                    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}),
            ),
            (
                "internvl3-8b",
                json!({"image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": true,
                    "min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448},
                    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}),
            ),
            (
                "qwen2-vl-7b",
                json!({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
                    "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
                    "image_mean": [0.481_454_66, 0.457_827_5, 0.408_210_73],
                    "image_std": [0.268_629_54, 0.261_302_58, 0.275_777_11]}),
            ),
        ] {
            let read = ImageProcessor::from_preprocessor_config(&config).unwrap();
            let known = ImageProcessor::for_model(&ModelSpec::preset(preset).unwrap()).unwrap();
            assert_eq!(with_frames_max(read, u32::MAX), with_frames_max(known, u32::MAX), "{preset}");
        }
    }

    fn with_frames_max(mut processor: ImageProcessor, frames_max: u32) -> ImageProcessor {
        match &mut processor {
            ImageProcessor::LlavaOneVision(family) => family.rule.frames_max = frames_max,
            ImageProcessor::InternVl(family) => family.rule.frames_max = frames_max,
            ImageProcessor::QwenVl(family) => family.rule.frames_max = frames_max,
            ImageProcessor::Clip(_) | ImageProcessor::Siglip(_) => {}
        }
        processor
    }

    #[test]
    fn pixel_limits_are_edges_of_a_size_or_keys_next_to_it() {
        let read = |size: Value, more: Value| {
            let mut config = json!({"image_processor_type": "Qwen2VLImageProcessor", "size": size});
            for (key, value) in more.as_object().unwrap() {
                config[key] = value.clone();
            }
            match ImageProcessor::from_preprocessor_config(&config) {
                Ok(ImageProcessor::QwenVl(family)) => Ok((family.rule.image.min, family.rule.image.max)),
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(error.to_string()),
            }
        };
        let edges = json!({"shortest_edge": 3136, "longest_edge": 50_176});
        let limits = json!({"min_pixels": 3136, "max_pixels": 50_176});
        let expected = Ok((3136, 50_176));
        assert_eq!(read(edges, json!({})), expected);
        assert_eq!(read(Value::Null, limits.clone()), expected);
        // As older processors were saved.
        assert_eq!(read(limits.clone(), limits.clone()), expected);
        // transformers raises an error here; the defaults would be other limits than the file's.
        let refused = read(limits, json!({})).unwrap_err();
        assert!(refused.contains("`size` must have `shortest_edge`, or `min_pixels`"), "{refused}");
        assert!(read(json!({"shortest_edge": 3136}), json!({})).unwrap_err().contains("`longest_edge`"));
    }

    #[test]
    fn clip_and_siglip_sizes_are_read_in_every_spelling() {
        let clip = |config: Value| ImageProcessor::from_preprocessor_config(&config).unwrap();
        let expected = ImageProcessor::Clip(Square::CLIP_336);
        assert_eq!(
            clip(json!({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
                "crop_size": {"height": 336, "width": 336}})),
            expected
        );
        assert_eq!(
            clip(json!({"feature_extractor_type": "CLIPFeatureExtractor", "size": 336, "crop_size": 336})),
            expected
        );
        assert_eq!(
            clip(
                json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384},
                "image_mean": 0.5, "image_std": 0.5})
            ),
            ImageProcessor::Siglip(Square::SIGLIP_384)
        );
    }

    #[test]
    fn what_has_no_counterpart_is_refused_by_name() {
        for (config, word) in [
            (json!({}), "image_processor_type"),
            (json!({"image_processor_type": "MllamaImageProcessor"}), "MllamaImageProcessor"),
            (json!({"image_processor_type": "SiglipImageProcessor", "do_rescale": false}), "do_rescale"),
            (json!({"image_processor_type": "SiglipImageProcessor", "resample": 0}), "resample"),
            (
                json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 1, "width": 2}}),
                "size",
            ),
            (json!({"image_processor_type": "SiglipImageProcessor", "image_std": [1, 0, 1]}), "image_std"),
            (json!({"image_processor_type": "CLIPImageProcessor", "size": 100}), "crop_size"),
            (
                json!({"image_processor_type": "LlavaOnevisionImageProcessor",
                    "image_grid_pinpoints": [[384, 768], [768, 384]]}),
                "image_grid_pinpoints",
            ),
            (json!({"image_processor_type": "GotOcr2ImageProcessor", "min_patches": 2}), "min_patches"),
            (json!({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 0}), "patch_size"),
        ] {
            let error = ImageProcessor::from_preprocessor_config(&config).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
