//! Models without a family that the user describes: module sizes, a token rule for each encoder.
//!
//! A description is a JSON document with the `model_type` "described". Sizes have the same names as in
//! transformers' `config.json` files; an encoder's `tokens` names a known rule, `native`, `tiles`, `any_res`,
//! `square` or `mel_windows`, with the rule's settings, which `docs/any-model.md` lists. dflop neither
//! prepares nor trains such a model, whose processor and blocks are the user's.

use std::num::{NonZeroU16, NonZeroU32};

use super::fixed_resolution::{FRAMES_MAX, bare_tower, dimensions, patch_inputs, product};
use super::language_models::text_config;
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, DESCRIBED, PartialModelSpec};
use crate::model::{
    AudioSpec, EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelFamily, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::any_res::{AnyRes, VideoNewline};
use crate::tokens::audio::{AudioRule, AudioWindows};
use crate::tokens::dynamic_tiles::DynamicTiles;
use crate::tokens::fixed_tile::FixedTile;
use crate::tokens::native::{NativeResolution, PixelRange};

const FAMILY: FamilyId = FamilyId::new(DESCRIBED);

/// Encoder fields in addition to projector fields.
const ENCODER: [&str; 9] = [
    "tokens",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "gated",
    "class_tokens",
    "windowed_layers",
    "projector_size",
];

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Described];

/// Models described by the user.
#[derive(Debug)]
struct Described;

impl ModelFamily for Described {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &[DESCRIBED]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let config = &files.config;
        config.refuse_others(&["model_type", "name", "vision", "audio", "llm"])?;
        let Some(llm) = config.child("llm")? else {
            return Err(config.invalid("llm", "is missing: the fields of the language model's `config.json`"));
        };
        let llm = text_config(&llm, "llama")?;
        let vision = config.child("vision")?.map(|fields| vision(&fields, llm.hidden)).transpose()?;
        let audio = config.child("audio")?.map(|fields| audio(&fields, llm.hidden)).transpose()?;
        Ok(PartialModelSpec { family: FAMILY, vision, audio, llm: Some(llm) })
    }
}

fn vision(fields: &ConfigFields<'_>, llm_hidden: u32) -> Result<VisionSpec> {
    let tokens = token_fields(fields)?;
    let (rule, merge, frames) = vision_rule(&tokens)?;
    let stem = patch_inputs(&tokens, 3, required(&tokens, "patch_size")?, frames)?;
    let merged = merge.saturating_mul(merge);
    Ok(VisionSpec { family: FAMILY, encoder: encoder(fields, stem, merged, llm_hidden)?, rule })
}

/// Reads a rule for images by its settings.
pub(in crate::model) fn vision_rule(tokens: &ConfigFields<'_>) -> Result<MadeRule> {
    match rule_name(tokens)? {
        "native" => native(tokens),
        "tiles" => tiles(tokens),
        "any_res" => any_res(tokens),
        "square" => square(tokens),
        unknown => {
            let problem = format!("= \"{unknown}\" is unknown, known are any_res, native, square, tiles");
            Err(tokens.invalid("rule", problem))
        }
    }
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

fn audio(fields: &ConfigFields<'_>, llm_hidden: u32) -> Result<AudioSpec> {
    let rule = audio_rule(&token_fields(fields)?)?;
    // Two convolutions with width 3 and total stride 2, over 128 mel bins, as in Whisper.
    let hidden = fields.count("hidden_size", 768)?;
    let stem = hidden.saturating_add(2 * 128).saturating_mul(3);
    Ok(AudioSpec { family: FAMILY, encoder: encoder(fields, stem, 1, llm_hidden)?, rule })
}

/// Reads encoder and projector sizes; the default projector has two matrices as wide as the LLM.
fn encoder(fields: &ConfigFields<'_>, stem: u32, merged: u32, llm_hidden: u32) -> Result<EncoderSpec> {
    fields.refuse_others(&ENCODER)?;
    for key in &ENCODER[1..5] {
        required(fields, key)?;
    }
    let size = dimensions(fields, [1; 4])?;
    let mlp = if fields.flag("gated", false)? { Mlp::Gated } else { Mlp::Plain };
    let details = EncoderDetails {
        class_tokens: optional_whole(fields, "class_tokens")?,
        stem_medium_inputs: stem,
        outside_parameters: product(stem, size.hidden),
        ..EncoderDetails::default()
    };
    let windowed_layers = optional_whole(fields, "windowed_layers")?;
    if windowed_layers > size.layers {
        let problem = format!("= {windowed_layers} is more than the {} layers", size.layers);
        return Err(fields.invalid("windowed_layers", problem));
    }
    let middle = fields.count("projector_size", llm_hidden)?;
    let projector = Projector::new(merged, size.hidden.saturating_mul(merged), Some(middle));
    Ok(EncoderSpec { windowed_layers, projector, ..bare_tower(size, mlp, stem, details) })
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

fn merge(tokens: &ConfigFields<'_>) -> Result<u32> {
    Ok(u32::from(side(tokens, "merge_size", Some(1))?.get()))
}

fn token_fields<'a>(encoder: &ConfigFields<'a>) -> Result<ConfigFields<'a>> {
    let missing =
        || encoder.invalid("tokens", "is missing: the token rule, such as {\"rule\": \"native\", …}");
    encoder.child("tokens")?.ok_or_else(missing)
}

fn rule_name<'a>(tokens: &ConfigFields<'a>) -> Result<&'a str> {
    tokens.text("rule")?.ok_or_else(|| tokens.invalid("rule", "is missing"))
}

fn required(fields: &ConfigFields<'_>, key: &str) -> Result<u32> {
    fields.optional_count(key)?.ok_or_else(|| fields.invalid(key, "is missing"))
}

/// Reads a number that may be 0; a missing number counts as 0.
fn optional_whole(fields: &ConfigFields<'_>, key: &str) -> Result<u32> {
    fields.value(key).map_or(Ok(0), |value| fields.whole_number(key, value, 0))
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::ModelSpec;
    use crate::model::config::Documents;
    use crate::{AudioLength, ImageSize, SampleShape, VideoShape};

    fn read(vision: &Value, audio: &Value) -> Result<ModelSpec> {
        let llm = json!({"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
            "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152_064});
        let config = json!({"model_type": "described", "vision": vision, "audio": audio, "llm": llm});
        ModelSpec::from_hugging_face("kite", &Documents { config, ..Documents::default() })
    }

    fn encoder(tokens: &Value) -> Value {
        json!({"num_hidden_layers": 32, "hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120,
            "tokens": tokens})
    }

    /// Described by settings, Qwen2-VL has the preset's tokens, and the preset's FLOPs except for norms.
    #[test]
    fn a_known_model_that_is_described_costs_the_same() {
        let tokens = json!({"rule": "native", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
            "min_pixels": 3136, "max_pixels": 12_845_056, "min_frame_pixels": 100_352, "max_frame_pixels": 602_112,
            "marker_tokens": 2});
        let mut vision = encoder(&tokens);
        vision["projector_size"] = json!(5120);
        let described = read(&vision, &Value::Null).unwrap();
        let preset = ModelSpec::preset("qwen2-vl-7b").unwrap();
        assert_eq!(described.vision.unwrap().rule, preset.vision.unwrap().rule);
        assert_eq!(described.llm, preset.llm);
        let [own, known] = [described, preset].map(|spec| {
            let encoder = spec.vision.unwrap().encoder;
            EncoderSpec { details: EncoderDetails::default(), ..encoder }
        });
        let known = EncoderSpec { projector: known.projector.vectors(0), ..known };
        assert_eq!(own, known);
    }

    #[test]
    fn every_rule_counts_by_its_settings() {
        let shape = SampleShape {
            images: vec![ImageSize { width: 640, height: 480 }],
            videos: vec![VideoShape { frames: 3, width: 64, height: 64 }],
            audio: vec![AudioLength { frames: 16_000, sample_rate_hz: 16_000 }],
            ..SampleShape::default()
        };
        let native = json!({"rule": "native", "patch_size": 16, "min_pixels": 256, "max_pixels": 1_048_576});
        let tiles =
            json!({"rule": "tiles", "tile_size": 448, "patch_size": 14, "merge_size": 2, "max_tiles": 1});
        let square = json!({"rule": "square", "tile_size": 224, "patch_size": 16});
        let pooled = json!({"rule": "square", "tile_size": 224, "patch_size": 16, "merge_size": 2});
        let any_res = json!({"rule": "any_res", "tile_size": 384, "patch_size": 14});
        for (tokens, image, frame) in
            [(native, 40 * 30, 16), (tiles, 256, 256), (square, 196, 196), (pooled, 49, 49), (any_res, 0, 0)]
        {
            let spec = read(&encoder(&tokens), &encoder(&json!({"rule": "mel_windows", "marker_tokens": 2})))
                .unwrap();
            let rules: Vec<_> = spec.encoders().collect();
            assert_eq!(rules[1].2.work(&shape).unwrap().tokens, 25 + 2);
            let rule = spec.vision.unwrap().rule;
            if let VisionRule::AnyRes(rule) = rule {
                assert_eq!(rule, AnyRes::LLAVA_ONEVISION);
                continue;
            }
            assert_eq!(rule.images(&shape.images).unwrap().tokens, image, "{tokens}");
            // The tile rule counts the frame labels as well.
            let labels = if matches!(rule, VisionRule::DynamicTiles(_)) { 14 } else { 0 };
            assert_eq!(rule.video(shape.videos[0]).unwrap().tokens, 3 * frame + labels, "{tokens}");
        }
    }

    #[test]
    fn faults_are_named_by_field_and_value() {
        let native = json!({"rule": "native", "patch_size": 16, "min_pixels": 256, "max_pixels": 4096});
        let with = |key: &str, value: Value| {
            let mut tokens = native.clone();
            tokens[key] = value;
            encoder(&tokens)
        };
        let mut unsized_ = encoder(&native);
        unsized_.as_object_mut().unwrap().remove("hidden_size");
        let mut typo = encoder(&native);
        typo["hidden_sizes"] = json!(3);
        for (vision, expected) in [
            (
                with("rule", json!("patches")),
                "`vision.tokens.rule` = \"patches\" is unknown, known are any_res",
            ),
            (
                with("min_pixels", json!(9999)),
                "`vision.tokens.min_pixels` = 9999 is more than `max_pixels` = 4096",
            ),
            (with("patch", json!(9)), "`vision.tokens.patch` is unknown, known are rule, patch_size"),
            (
                with("patch_size", json!(70_000)),
                "`vision.tokens.patch_size` must be at most 65535, found 70000",
            ),
            (with("patch_size", Value::Null), "`vision.tokens.patch_size` is missing"),
            (unsized_, "`vision.hidden_size` is missing"),
            (typo, "`vision.hidden_sizes` is unknown, known are tokens, num_hidden_layers"),
            (json!({"tokens": 3}), "`vision.tokens` must be an object, found 3"),
        ] {
            let error = read(&vision, &Value::Null).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`the description`: {expected}")), "{error}");
        }
        let config = json!({"model_type": "described"});
        let documents = Documents { config, ..Documents::default() };
        let error = ModelSpec::from_hugging_face("kite", &documents).unwrap_err().to_string();
        assert!(error.contains("`llm` is missing"), "{error}");
    }
}
