//! Reads image processors from published checkpoints, and invalid image processors.

use dflop_costmodel::ModelSpec;
use dflop_costmodel::tokens::VisionRule;
use serde_json::json;

use super::*;
use crate::family::Square;

/// Tests the settings in published checkpoints, including settings that the files omit.
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
        assert_eq!(read.settings(), known.settings(), "{preset}");
        assert_eq!(with_frames_max(&read, u32::MAX), with_frames_max(&known, u32::MAX), "{preset}");
    }
}

fn with_frames_max(processor: &ImageProcessor, frames_max: u32) -> Option<VisionRule> {
    let mut rule = processor.rule()?;
    match &mut rule {
        VisionRule::AnyRes(rule) => rule.frames_max = frames_max,
        VisionRule::DynamicTiles(rule) => rule.frames_max = frames_max,
        VisionRule::Native(rule) => rule.frames_max = frames_max,
        VisionRule::Fixed(rule) => rule.frames_max = frames_max,
        VisionRule::PanAndScan(rule) => rule.tile.frames_max = frames_max,
        VisionRule::ListedGrids(_)
        | VisionRule::ScaledTiles(_)
        | VisionRule::FittedTiles(_)
        | VisionRule::LongestEdge(_)
        | VisionRule::Table(_) => {}
    }
    Some(rule)
}

#[test]
fn pixel_limits_are_edges_of_a_size_or_keys_next_to_it() {
    let read = |size: Value, more: Value| {
        let mut config = json!({"image_processor_type": "Qwen2VLImageProcessor", "size": size});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let processor =
            ImageProcessor::from_preprocessor_config(&config).map_err(|error| error.to_string())?;
        let Some(VisionRule::Native(rule)) = processor.rule() else { panic!("{processor:?}") };
        Ok::<_, String>((rule.image.min, rule.image.max))
    };
    let edges = json!({"shortest_edge": 3136, "longest_edge": 50_176});
    let limits = json!({"min_pixels": 3136, "max_pixels": 50_176});
    let expected = Ok((3136, 50_176));
    assert_eq!(read(edges, json!({})), expected);
    assert_eq!(read(Value::Null, limits.clone()), expected);
    // Format of older processors.
    assert_eq!(read(limits.clone(), limits.clone()), expected);
    // transformers raises an error here; the default limits would differ from the limits in the file.
    let refused = read(limits, json!({})).unwrap_err();
    assert!(refused.contains("`size` must have `shortest_edge`, or `min_pixels`"), "{refused}");
    assert!(read(json!({"shortest_edge": 3136}), json!({})).unwrap_err().contains("`longest_edge`"));
}

#[test]
fn clip_and_siglip_sizes_are_read_in_every_spelling() {
    let clip = |config: Value| format!("{:?}", ImageProcessor::from_preprocessor_config(&config).unwrap());
    let of = |square: Square| format!("{:?}", ImageProcessor::new(square));
    let expected = of(Square::CLIP_336);
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
        clip(json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384},
            "image_mean": 0.5, "image_std": 0.5})),
        of(Square::SIGLIP_384)
    );
}

#[test]
fn what_has_no_counterpart_is_refused_by_name() {
    for (config, word) in [
        (json!({}), "image_processor_type"),
        (json!({"image_processor_type": "MllamaImageProcessor"}), "MllamaImageProcessor"),
        (json!({"image_processor_type": "SiglipImageProcessor", "do_rescale": false}), "do_rescale"),
        (json!({"image_processor_type": "SiglipImageProcessor", "resample": 0}), "resample"),
        (json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 1, "width": 2}}), "size"),
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
