//! Checks the readers for image models: presets against recorded configurations, and errors.

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{Error, ModelSpec, SampleShape, VideoShape};
use serde_json::{Value, json};

fn golden(file: &str) -> Value {
    let path = format!("{}/../tests/golden/{file}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn documents(files: &Value) -> Documents {
    let file = |name: &str| files.get(name).cloned();
    Documents {
        config: file("config").expect("a configuration"),
        preprocessor: file("preprocessor"),
        video_preprocessor: None,
        processor: file("processor"),
    }
}

#[test]
fn presets_are_the_recorded_models() {
    for (preset, script, model) in [
        ("llava-1.5-7b", "llava", "llava"),
        ("pixtral-12b", "llava", "pixtral"),
        ("mistral-small-3.1-24b", "llava", "mistral3"),
        ("llava-next-mistral-7b", "llava_next", "llava_next"),
        ("idefics3-8b", "idefics3", "idefics3"),
        ("smolvlm2-2.2b", "idefics3", "smolvlm"),
        ("glm-4.1v-9b", "glm4v", "glm4v"),
        ("glm-4.5v", "glm4v", "glm4v_moe"),
    ] {
        let files = documents(&golden(&format!("tokens/{script}"))[model]);
        let read = ModelSpec::from_hugging_face(preset, &files).unwrap();
        assert_eq!(read, ModelSpec::preset(preset).unwrap(), "{preset}");
    }
}

/// The zai-org/GLM-4.5V tensors have 107,710,933,120 elements; 45 layers have 128 elements each to balance
/// the expert load, which are no parameters.
#[test]
fn glm_4_5v_has_the_parameters_of_its_checkpoint() {
    let spec = ModelSpec::preset("glm-4.5v").unwrap();
    assert_eq!(spec.parameters(), 107_710_933_120 - 45 * 128);
}

/// Returns a checkpoint's recorded files with a single field replaced.
fn changed(script: &str, model: &str, file: &str, pointer: &str, value: Value) -> Documents {
    let mut files = golden(&format!("tokens/{script}"))[model].clone();
    let at = pointer.rfind('/').unwrap();
    let parent = files[file].pointer_mut(&pointer[..at]).unwrap_or_else(|| panic!("{file} {pointer}"));
    parent[&pointer[at + 1..]] = value;
    documents(&files)
}

#[test]
fn fields_that_do_not_fit_each_other_are_named() {
    for (script, model, file, pointer, value, message) in [
        ("llava", "llava", "config", "/vision_feature_select_strategy", json!("full"), "has a class token"),
        ("llava", "llava", "config", "/vision_feature_layer", json!(-40), "`vision_feature_layer` = -40"),
        ("llava", "llava", "config", "/vision_config/model_type", json!("vit"), "\"vit\" is unknown"),
        ("llava", "llava", "preprocessor", "/crop_size", json!(224), "`crop_size` = 224 pixels"),
        (
            "llava",
            "llava",
            "processor",
            "/patch_size",
            json!(16),
            "`processor_config.json`: `patch_size` = 16",
        ),
        ("llava", "pixtral", "config", "/vision_feature_select_strategy", json!("default"), "no class token"),
        (
            "llava",
            "pixtral",
            "processor",
            "/patch_size",
            json!(14),
            "`patch_size` = 14, but the model takes 16",
        ),
        (
            "llava",
            "pixtral",
            "preprocessor",
            "/size",
            json!({"height": 3, "width": 4}),
            "must have `longest_edge`",
        ),
        ("llava", "mistral3", "processor", "/spatial_merge_size", json!(1), "`spatial_merge_size` = 1"),
        ("llava", "mistral3", "config", "/vision_config/model_type", json!("siglip"), "known is pixtral"),
        ("llava", "mistral3", "config", "/vision_feature_layer", json!([-1, -2]), "several layers"),
        (
            "llava_next",
            "llava_next",
            "config",
            "/image_grid_pinpoints",
            json!([[336, 500]]),
            "multiples of the tile",
        ),
        (
            "llava_next",
            "llava_next",
            "preprocessor",
            "/image_grid_pinpoints",
            json!([[336, 672]]),
            "`preprocessor_config.json`: `image_grid_pinpoints`",
        ),
        ("idefics3", "smolvlm", "config", "/scale_factor", json!(4), "does not divide 27 patches"),
        ("idefics3", "smolvlm", "processor", "/image_seq_len", json!(64), "makes 81 tokens"),
        ("idefics3", "smolvlm", "preprocessor", "/max_image_size/longest_edge", json!(512), "= 512 pixels"),
        (
            "idefics3",
            "smolvlm",
            "preprocessor",
            "/size/longest_edge",
            json!(3000),
            "8 tiles of 384, more than 6",
        ),
        ("glm4v", "glm4v", "config", "/vision_config/out_hidden_size", json!(4000), "is 4096 wide"),
        ("glm4v", "glm4v", "preprocessor", "/size/shortest_edge", json!(12_545), "must be a multiple of 2"),
        ("glm4v", "glm4v", "preprocessor", "/merge_size", json!(3), "the vision tower takes 2"),
    ] {
        let files = changed(script, model, file, pointer, value);
        let error = PartialModelSpec::from_hugging_face(&files).expect_err(message).to_string();
        assert!(error.contains(message), "{error}, expected {message}");
        assert!(error.contains(".json`: `"), "{error}");
    }
}

#[test]
fn videos_are_refused_by_models_of_images() {
    let video = VideoShape { frames: 8, width: 640, height: 480 };
    for name in [
        "llava-1.5-7b",
        "pixtral-12b",
        "mistral-small-3.1-24b",
        "llava-next-mistral-7b",
        "smolvlm2-2.2b",
        "glm-4.1v-9b",
    ] {
        let rule = ModelSpec::preset(name).unwrap().vision.unwrap().rule;
        assert_eq!(rule.frames_max(), 0, "{name}");
        assert_eq!(rule.video(video), Err(Error::Video { frames: 8 }), "{name}");
        assert!(rule.video(VideoShape { frames: 0, ..video }).is_ok(), "{name}");
    }
}

/// Without a native-resolution tower, a planner counts tiles; with such a tower, patches and their pairs.
#[test]
fn pixtral_counts_patches_and_pairs() {
    let spec = ModelSpec::preset("pixtral-12b").unwrap();
    assert!(matches!(spec.vision.unwrap().rule, VisionRule::LongestEdge(_)));
    let images = vec![dflop_costmodel::ImageSize { width: 640, height: 480 }];
    let units =
        dflop_costmodel::model::SampleUnits::new(&spec, &SampleShape { images, ..SampleShape::default() });
    let encoder = units.unwrap().encoders[0];
    assert_eq!((encoder.units, encoder.pairs), (1200, 1200 * 1200));
    let patches = dflop_costmodel::model::MediaUnits::from_patches(&spec, 1200, 1200 * 1200, None);
    assert_eq!(patches, encoder);
}
