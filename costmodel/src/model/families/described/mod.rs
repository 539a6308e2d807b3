//! Models without a family that the user describes: module sizes, a token rule for each encoder.
//!
//! A description is a JSON document with the `model_type` "described". Sizes have the same names as in
//! transformers' `config.json` files; an encoder's `tokens` names a known rule, such as `native`, with the
//! rule's settings. dflop neither prepares nor trains such a model, whose processor and blocks are the
//! user's.

mod rules;

pub(in crate::model) use self::rules::{audio_rule, optional_small, vision_rule};

use super::fixed_resolution::{bare_tower, dimensions, patch_inputs, product};
use super::language_models::text_config;
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, DESCRIBED, PartialModelSpec};
use crate::model::{
    AudioSpec, EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelFamily, Projector, VisionSpec,
};

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

fn token_fields<'a>(encoder: &ConfigFields<'a>) -> Result<ConfigFields<'a>> {
    let missing =
        || encoder.invalid("tokens", "is missing: the token rule, such as {\"rule\": \"native\", …}");
    encoder.child("tokens")?.ok_or_else(missing)
}

fn required(fields: &ConfigFields<'_>, key: &str) -> Result<u32> {
    fields.optional_count(key)?.ok_or_else(|| fields.invalid(key, "is missing"))
}

/// Reads a number that may be 0; a missing number counts as 0.
fn optional_whole(fields: &ConfigFields<'_>, key: &str) -> Result<u32> {
    fields.value(key).map_or(Ok(0), |value| fields.whole_number(key, value, 0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::ModelSpec;
    use crate::model::config::Documents;
    use crate::tokens::VisionRule;
    use crate::tokens::any_res::AnyRes;
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
    fn rules_without_videos_count_images_by_their_settings() {
        let images = [ImageSize { width: 640, height: 480 }];
        for (tokens, expected) in [
            // 2 x 2 tiles, less padding: 36 x 48 patches
            (
                json!({"rule": "listed_grids", "tile_size": 336, "patch_size": 14, "grids": [[1, 2], [2, 2]]}),
                576 + 36 * 49,
            ),
            // 4 x 3 tiles
            (
                json!({"rule": "scaled_tiles", "tile_size": 384, "patch_size": 14, "merge_size": 3}),
                3 * (4 * 83 + 1) + 84,
            ),
            // 2 x 2 tiles
            (
                json!({"rule": "fitted_tiles", "tile_size": 336, "patch_size": 14, "merge_size": 2}),
                4 * 145 + 147,
            ),
            (json!({"rule": "longest_edge", "patch_size": 16, "longest_edge": 1024}), 41 * 30),
        ] {
            let rule = read(&encoder(&tokens), &Value::Null).unwrap().vision.unwrap().rule;
            assert_eq!(rule.images(&images).unwrap().tokens, expected, "{tokens}");
            assert!(rule.video(VideoShape { frames: 3, width: 64, height: 64 }).is_err(), "{tokens}");
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
            (
                encoder(
                    &json!({"rule": "listed_grids", "tile_size": 336, "patch_size": 14, "grids": [[1, 0]]}),
                ),
                "`vision.tokens.grids` must be a list of rows and columns: expected 1 to 48 grids",
            ),
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
