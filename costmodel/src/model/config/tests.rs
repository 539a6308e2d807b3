//! Reads published checkpoint configurations and invalid ones; `costmodel/tests/flops.rs` compares exact
//! counts.

use serde_json::{Value, json};

use super::{ConfigFields, *};
use crate::tokens::VisionRule;
use crate::tokens::any_res::AnyRes;
use crate::tokens::dynamic_tiles::DynamicTiles;
use crate::tokens::native::{NativeResolution, PixelRange};

fn documents(config: Value) -> Documents {
    Documents { config, ..Documents::default() }
}

fn read(config: Value) -> ModelSpec {
    ModelSpec::from_hugging_face("model", &documents(config)).unwrap()
}

fn model_error(documents: &Documents) -> String {
    ModelSpec::from_hugging_face("model", documents).unwrap_err().to_string()
}

fn preset(name: &str) -> ModelSpec {
    ModelSpec { name: "model".to_owned(), ..ModelSpec::preset(name).unwrap() }
}

fn qwen2_5_7b() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064})
}

fn merged(mut config: Value, more: Value) -> Value {
    let (Value::Object(config_fields), Value::Object(more)) = (&mut config, more) else { unreachable!() };
    config_fields.extend(more);
    config
}

/// Returns the released configuration: LLM fields at the top, and many fields that are not read.
fn qwen2_vl_7b() -> Value {
    let vision = json!({"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
        "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2});
    let more = json!({"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"],
        "use_sliding_window": false, "sliding_window": 32768, "max_window_layers": 28, "vision_config": vision});
    merged(qwen2_5_7b(), more)
}

fn qwen2_5_vl_7b() -> Value {
    let vision = json!({"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2});
    merged(qwen2_5_7b(), json!({"model_type": "qwen2_5_vl", "vision_config": vision}))
}

fn internvl_chat() -> Value {
    let vision = json!({"model_type": "intern_vit_6b", "hidden_size": 1024, "image_size": 448,
        "intermediate_size": 4096, "norm_type": "layer_norm", "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14, "qk_normalization": false, "qkv_bias": true});
    json!({"model_type": "internvl_chat", "downsample_ratio": 0.5, "dynamic_image_size": true,
        "force_image_size": 448, "llm_config": qwen2_5_7b(), "max_dynamic_patch": 12, "min_dynamic_patch": 1,
        "select_layer": -1, "use_thumbnail": true, "vision_config": vision})
}

fn qwen3_30b_a3b() -> Value {
    json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
        "vocab_size": 151_936})
}

fn llava_onevision() -> Value {
    let siglip = json!({"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": false});
    json!({"model_type": "llava_onevision", "text_config": qwen2_5_7b(), "vision_config": siglip,
        "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full"})
}

#[test]
fn published_checkpoints_are_the_presets() {
    let qwen2_audio = json!({"model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128},
        "text_config": {"model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 156_032}});
    let nested = |mut flat: Value| {
        let vision = flat["vision_config"].take();
        let model_type = flat["model_type"].take();
        let text_type = format!("{}_text", model_type.as_str().unwrap());
        json!({"model_type": model_type, "vision_config": vision,
            "text_config": merged(flat, json!({"model_type": text_type}))})
    };
    let mut qwen2_5_vl_3b = merged(
        qwen2_5_vl_7b(),
        json!({"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 2, "tie_word_embeddings": true,
            "vocab_size": 151_936}),
    );
    qwen2_5_vl_3b["vision_config"]["out_hidden_size"] = json!(2048);
    for (config, name) in [
        (qwen2_5_vl_3b, "qwen2.5-vl-3b"),
        (qwen2_vl_7b(), "qwen2-vl-7b"),
        (nested(qwen2_vl_7b()), "qwen2-vl-7b"),
        (qwen2_5_vl_7b(), "qwen2.5-vl-7b"),
        (nested(qwen2_5_vl_7b()), "qwen2.5-vl-7b"),
        (internvl_chat(), "internvl3-8b"),
        (merged(internvl_chat(), json!({"llm_config": qwen3_30b_a3b()})), "internvl3.5-30b-a3b"),
        (llava_onevision(), "llava-ov-qwen2.5-7b"),
        (qwen2_audio, "qwen2-audio-7b"),
    ] {
        assert_eq!(read(config), preset(name), "{name}");
    }
}

#[test]
fn both_forms_of_internvl_are_one_model() {
    let vision = json!({"hidden_size": 1024, "num_hidden_layers": 24, "attention_bias": true,
        "image_size": [448, 448], "patch_size": [14, 14]});
    let config = json!({"model_type": "internvl", "vision_config": vision, "text_config": qwen2_5_7b()});
    assert_eq!(read(config), read(internvl_chat()));
}

#[test]
fn encoders_are_joined_with_a_language_model() {
    let part = |config: Value| PartialModelSpec::from_hugging_face(&documents(config)).unwrap();
    let siglip = part(json!({"model_type": "siglip", "vision_config": {"image_size": 384, "patch_size": 14,
        "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27, "intermediate_size": 4304}}));
    let whisper = part(json!({"model_type": "whisper", "d_model": 1280, "encoder_layers": 32,
        "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128}));
    let llm = part(qwen2_5_7b());
    let spec = ModelSpec::compose("mine", &[siglip, whisper, llm]).unwrap();
    let omni = ModelSpec::preset("omni-7b").unwrap();
    assert_eq!((spec.audio, spec.llm), (omni.audio, omni.llm));
    let (mine, theirs) = (spec.vision.unwrap(), omni.vision.unwrap());
    assert!(mine.encoder.details.has_pooling_head);
    assert_eq!(mine.encoder.projector.middle, theirs.encoder.projector.middle);
    let VisionRule::Fixed(rule) = mine.rule else { panic!("{:?}", mine.rule) };
    assert_eq!((rule.tile_pixels, rule.tile_patches, rule.is_cropped), (384, 729, false));

    let clip = part(json!({"model_type": "clip_vision_model", "patch_size": 14, "image_size": 336}));
    for (parts, problem) in [
        (vec![siglip], "it is an encoder; join it with a language model"),
        (vec![llm, siglip, clip], "it has 2 encoders of images"),
        (vec![whisper, llm, whisper], "it has 2 encoders of audio"),
        (vec![llm, llm], "it has 2 language models"),
        (vec![], "it is an encoder; join it with a language model"),
    ] {
        let error = ModelSpec::compose("mine", &parts).unwrap_err().to_string();
        assert_eq!(error, format!("`mine` is not a model: {problem}"));
    }
}

#[test]
fn a_head_may_be_wider_than_its_share() {
    let heads = json!({"model_type": "qwen3", "hidden_size": 1000, "num_attention_heads": 16,
        "num_key_value_heads": 8});
    let spec = read(heads);
    assert_eq!((spec.llm.head_dim, spec.llm.hidden), (128, 1000));
    assert!(spec.llm.details.has_qk_norm && !spec.llm.details.has_tied_embeddings);
}

/// A missing field and `null` differ: `Qwen2Config` has 32 key and value heads, or as many as queries.
#[test]
fn key_value_heads_have_the_defaults_of_their_family() {
    let heads = |config: Value| read(config).llm.kv_heads;
    assert_eq!(heads(json!({"model_type": "qwen2", "num_attention_heads": 64})), 32);
    let none = json!({"model_type": "qwen2", "num_attention_heads": 64, "num_key_value_heads": null});
    assert_eq!(heads(none), 64);
    assert_eq!(heads(json!({"model_type": "llama", "num_attention_heads": 64})), 64);
}

#[test]
fn token_rules_follow_the_files_of_the_processor() {
    let mut qwen = documents(qwen2_vl_7b());
    let rule = |documents: &Documents| {
        ModelSpec::from_hugging_face("model", documents).unwrap().vision.unwrap().rule
    };
    assert_eq!(rule(&qwen), VisionRule::Native(NativeResolution::QWEN2_VL));
    qwen.preprocessor = Some(json!({"min_pixels": 3136, "max_pixels": 50176}));
    let range = PixelRange { min: 3136, max: 50_176 };
    let native = NativeResolution { image: range, frame: range, ..NativeResolution::QWEN2_VL };
    assert_eq!(rule(&qwen), VisionRule::Native(native), "one file for images and videos");
    let size = json!({"min_pixels": 3136, "max_pixels": 50176});
    qwen.preprocessor = Some(json!({"min_pixels": 3136, "max_pixels": 50176, "size": size}));
    assert_eq!(rule(&qwen), VisionRule::Native(native), "limits next to the size of an old processor");
    qwen.video_preprocessor =
        Some(json!({"size": {"shortest_edge": 784, "longest_edge": 7840}, "max_frames": 16}));
    let frame = PixelRange { min: 784, max: 7840 };
    let native = NativeResolution { frame, frames_max: 16, ..native };
    assert_eq!(rule(&qwen), VisionRule::Native(native));
    qwen.preprocessor = Some(json!({}));
    let library = PixelRange { min: 3136, max: 1_003_520 };
    assert_eq!(rule(&qwen), VisionRule::Native(NativeResolution { image: library, ..native }));

    let mut intern = documents(internvl_chat());
    intern.config["max_dynamic_patch"] = json!(4);
    intern.video_preprocessor = Some(json!({"do_sample_frames": true, "num_frames": 8}));
    let tiles = DynamicTiles { tiles_max: 4, frames_max: 8, ..DynamicTiles::INTERN_VL };
    assert_eq!(rule(&intern), VisionRule::DynamicTiles(tiles));
    intern.config["dynamic_image_size"] = json!(false);
    assert_eq!(rule(&intern), VisionRule::DynamicTiles(DynamicTiles { tiles_max: 1, ..tiles }));

    let mut llava = documents(llava_onevision());
    let grids: Vec<[u32; 2]> = (1..=2).flat_map(|r| (1..=2).map(move |c| [384 * r, 384 * c])).collect();
    llava.processor = Some(json!({"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_4",
        "image_processor": {"image_grid_pinpoints": grids, "size": {"height": 384, "width": 384}}}));
    let any_res = AnyRes { grid_side_max: 2, feature_tiles_max: 4, ..AnyRes::LLAVA_ONEVISION };
    assert_eq!(rule(&llava), VisionRule::AnyRes(any_res));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn invalid_fields_are_errors_with_file_and_field() {
    let with = |config: Value, key: &str, value: Value| {
        let mut config = config;
        *config.pointer_mut(key).unwrap_or_else(|| panic!("{key}")) = value;
        documents(config)
    };
    let huge = 1_u64 << 32;
    for (documents, message) in [
        (documents(json!(7)), "`config.json`: `the document` must be an object, found 7"),
        (documents(json!({})), "`config.json`: `model_type` is missing, known are clip, "),
        (
            documents(json!({"model_type": "gpt2"})),
            "`config.json`: `model_type` = \"gpt2\" is unknown: `dflop describe DIRECTORY -o model.json` describes the checkpoint with transformers; known are clip, ",
        ),
        (
            with(qwen2_vl_7b(), "/num_attention_heads", json!(0)),
            "`config.json`: `num_attention_heads` must be at least 1, found 0",
        ),
        (
            with(qwen2_vl_7b(), "/num_attention_heads", json!(27)),
            "`config.json`: `num_attention_heads` = 27 must be a multiple of `num_key_value_heads` = 4",
        ),
        (
            with(qwen2_vl_7b(), "/hidden_size", json!(3585)),
            "`config.json`: `hidden_size` = 3585 must be a multiple of `num_attention_heads` = 28",
        ),
        (
            with(qwen2_vl_7b(), "/hidden_size", json!(7168)),
            "`config.json`: `vision_config.hidden_size` = 3584, but the language model is 7168 wide",
        ),
        (
            with(qwen2_vl_7b(), "/vision_config/depth", json!(-1)),
            "`config.json`: `vision_config.depth` must be positive, found -1",
        ),
        (
            with(qwen2_vl_7b(), "/vision_config/num_heads", json!(7)),
            "`config.json`: `vision_config.embed_dim` = 1280 must be a multiple of `vision_config.num_heads` = 7",
        ),
        (
            with(qwen2_vl_7b(), "/vision_config/patch_size", json!(huge)),
            "`config.json`: `vision_config.patch_size` must be at most 4294967295, found 4294967296",
        ),
        (
            with(qwen2_vl_7b(), "/vision_config/patch_size", json!(65_536)),
            "`config.json`: `vision_config.patch_size` = 65536 is too large",
        ),
        (
            with(qwen2_vl_7b(), "/vision_config", json!([])),
            "`config.json`: `vision_config` must be an object, found []",
        ),
        (
            with(qwen2_vl_7b(), "/use_sliding_window", json!("yes")),
            "`config.json`: `use_sliding_window` must be true or false, found \"yes\"",
        ),
        (
            with(qwen2_5_vl_7b(), "/vision_config/window_size", json!(27)),
            "`config.json`: `vision_config.window_size` = 27 pixels make windows of 0 patches",
        ),
        (
            with(qwen2_5_vl_7b(), "/vision_config/fullatt_block_indexes", json!([1, "x"])),
            "`config.json`: `vision_config.fullatt_block_indexes` must be a whole number, found \"x\"",
        ),
        (
            with(internvl_chat(), "/llm_config/model_type", json!("mamba")),
            "`config.json`: `llm_config.model_type` = \"mamba\" is not a known language model: `dflop describe ",
        ),
        (with(internvl_chat(), "/vision_config", json!(null)), "`config.json`: `vision_config` is missing"),
        (
            with(internvl_chat(), "/downsample_ratio", json!(0.3)),
            "`config.json`: `downsample_ratio` = 0.3 does not divide 32 patches a side",
        ),
        (
            with(internvl_chat(), "/select_layer", json!(-26)),
            "`config.json`: `select_layer` = -26 is not one of 25 states of 24 layers",
        ),
        (with(internvl_chat(), "/max_dynamic_patch", json!(300)), "`config.json`: `max_patches` = 300 tiles"),
        (
            with(internvl_chat(), "/force_image_size", json!(224)),
            "`config.json`: `force_image_size` = 224, but",
        ),
        (
            with(llava_onevision(), "/vision_aspect_ratio", json!("anyres")),
            "`config.json`: `vision_aspect_ratio` must be \"anyres_max_\" and 1 to 255, found \"anyres\"",
        ),
        (
            with(llava_onevision(), "/vision_feature_select_strategy", json!("default")),
            "`config.json`: `vision_feature_select_strategy` = \"default\", but the vision tower has no class token",
        ),
        (
            with(llava_onevision(), "/vision_config/model_type", json!("dinov2")),
            "`config.json`: `vision_config.model_type` = \"dinov2\" is unknown",
        ),
        (
            with(llava_onevision(), "/vision_config/patch_size", json!(500)),
            "`config.json`: `vision_config.patch_size` = 500 is larger than `image_size` = 384",
        ),
        (
            with(llava_onevision(), "/vision_config/image_size", json!(70_000)),
            "`config.json`: `vision_config.image_size` = 70000 is over 65535 pixels",
        ),
    ] {
        let found = model_error(&documents);
        assert!(found.starts_with(message), "{found}\n{message}");
    }
}

#[test]
fn files_that_disagree_are_errors() {
    let with = |config: Value, preprocessor: Value, processor: Value| Documents {
        config,
        preprocessor: Some(preprocessor),
        processor: Some(processor),
        video_preprocessor: None,
    };
    let audio = json!({"model_type": "qwen2_audio"});
    for (documents, message) in [
        (
            with(qwen2_vl_7b(), json!({"merge_size": 4}), json!({})),
            "`preprocessor_config.json`: `merge_size` = 4, but the vision tower takes 2",
        ),
        (
            with(qwen2_vl_7b(), json!({"min_pixels": 9, "max_pixels": 3}), json!({})),
            "`preprocessor_config.json`: `min_pixels` = 9 is more than the most pixels, 3",
        ),
        (
            with(qwen2_vl_7b(), json!({"size": {"min_pixels": 9, "max_pixels": 90}}), json!({})),
            "`preprocessor_config.json`: `size` must have `shortest_edge`, or `min_pixels` must be given next to it",
        ),
        (
            with(qwen2_vl_7b(), json!({"size": {"shortest_edge": 9}}), json!({})),
            "`preprocessor_config.json`: `size` must have `longest_edge`, or `max_pixels` must be given next to it",
        ),
        (
            with(llava_onevision(), json!({"size": {"height": 336, "width": 336}}), json!({})),
            "`preprocessor_config.json`: `size` = 336 pixels, but the vision tower takes 384",
        ),
        (
            with(llava_onevision(), json!({"image_grid_pinpoints": [[384, 768], [768, 384]]}), json!({})),
            "`preprocessor_config.json`: `image_grid_pinpoints` is not every grid of 1 to n tiles",
        ),
        (
            with(llava_onevision(), json!({}), json!({"num_image_tokens": 576})),
            "`processor_config.json`: `num_image_tokens` = 576, but the vision tower makes 729 patches",
        ),
        (
            with(audio.clone(), json!({"feature_size": 80}), json!({})),
            "`preprocessor_config.json`: `feature_size` = 80, but the encoder takes 128 mel bins",
        ),
        (
            with(audio.clone(), json!({"feature_size": 128, "chunk_length": 10}), json!({})),
            "`preprocessor_config.json`: `chunk_length` = 10 s do not fill the encoder's 1500 positions",
        ),
        (
            with(audio, json!({"feature_size": 128, "sampling_rate": 24_000}), json!({})),
            "`preprocessor_config.json`: `sampling_rate` must be 16000, found 24000",
        ),
    ] {
        let found = model_error(&documents);
        assert!(found.starts_with(message), "{found}\n{message}");
    }
}

/// Reading ends with a model or an error whatever a field holds, never with a panic.
#[test]
fn any_value_in_any_field_is_read_or_an_error() {
    let values = [
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(u32::MAX),
        json!(0.5),
        json!(1e300),
        json!(""),
        json!("x"),
        json!([]),
        json!([0]),
        json!([1, 2]),
        json!({}),
        json!(true),
    ];
    for config in [qwen2_vl_7b(), qwen2_5_vl_7b(), internvl_chat(), llava_onevision()] {
        for pointer in pointers(&config, "") {
            for value in &values {
                let mut changed = config.clone();
                *changed.pointer_mut(&pointer).unwrap() = value.clone();
                if let Ok(spec) = ModelSpec::from_hugging_face("model", &documents(changed)) {
                    assert!(spec.parameters() > 0);
                    let model = crate::CostModel::new(spec, crate::DeviceRate::preset("h100").unwrap());
                    let images = vec![crate::ImageSize { width: 640, height: 480 }];
                    let _ = model.predict(&crate::SampleShape { images, ..Default::default() });
                }
            }
        }
    }
}

fn pointers(value: &Value, at: &str) -> Vec<String> {
    let Value::Object(fields) = value else { return Vec::new() };
    let inner = |(key, value): (&String, &Value)| {
        let at = format!("{at}/{key}");
        let mut all = pointers(value, &at);
        all.push(at);
        all
    };
    fields.iter().flat_map(inner).collect()
}

#[test]
fn words_of_python_are_numbers_outside_strings_only() {
    let text = r#"{"a": [0.0, Infinity, -Infinity], "b": NaN, "Infinity": "NaN \"Infinity\\", "c": "é", "d": Infinity}"#;
    let expected = json!({"a": [0.0, f64::MAX, f64::MIN], "b": null, "Infinity": "NaN \"Infinity\\", "c": "é",
            "d": f64::MAX});
    assert_eq!(parse_json(text).unwrap(), expected);
    let document = parse_json(r#"{"max_pixels": Infinity, "scale": Infinity, "layers": NaN}"#).unwrap();
    let fields = ConfigFields::new("config.json", &document).unwrap();
    assert_eq!(fields.count("max_pixels", 1), Ok(u32::MAX));
    assert_eq!(fields.number("scale", 1.0), Ok(f64::MAX));
    assert_eq!(fields.count("layers", 7), Ok(7));
}

#[test]
fn other_faults_stay_faults() {
    for text in ["{", r#"{"a": Infinite}"#, r#"{"a": nan}"#, r#"{"a": "\"#, "NaNNaN", ""] {
        assert!(parse_json(text).is_err(), "{text}");
    }
    assert_eq!(parse_json(r#"{"a": [1, "NaN"]}"#).unwrap(), json!({"a": [1, "NaN"]}));
}
