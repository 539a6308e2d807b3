//! Compares Qwen2.5-Omni and Qwen3-Omni with transformers, as recorded by
//! `tests/record/families/qwen2_5_omni.py` and `qwen3_omni.py`: media tokens, parameters and FLOPs for all
//! parts, and the errors from their files.

use std::io::Read;

use dflop_costmodel::config::Documents;
use dflop_costmodel::flops::{Attention, EncoderFlops, Gradients, LlmFlops, Recomputation};
use dflop_costmodel::tokens::audio::{AudioChunks, AudioRule};
use dflop_costmodel::{AudioLength, Error, ImageSize, ModelSpec, SampleShape, VideoShape};
use serde_json::{Value, json};

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/families");
const FAMILIES: [&str; 2] = ["qwen2_5_omni", "qwen3_omni_moe"];
/// Maximum relative FLOP difference: the product that computes the rotary position angles is visible.
const TOLERANCE: f64 = 0.000_2;

fn recorded(family: &str, name: &str) -> Value {
    let path = format!("{DIRECTORY}/{family}/{name}.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn model(files: &Value) -> dflop_costmodel::Result<ModelSpec> {
    let documents = Documents {
        config: files["config"].clone(),
        preprocessor: files.get("preprocessor").cloned(),
        processor: files.get("processor").cloned(),
        ..Documents::default()
    };
    ModelSpec::from_hugging_face("recorded", &documents)
}

/// Parses `image WxH`, `video FRAMES WxH` or `audio SAMPLES`.
fn shape(medium: &str) -> SampleShape {
    let words: Vec<&str> = medium.split(' ').collect();
    let number = |word: &str| word.parse().unwrap();
    let size = |word: &str| {
        let (width, height) = word.split_once('x').unwrap();
        ImageSize { width: number(width), height: number(height) }
    };
    let mut shape = SampleShape::default();
    match words[..] {
        ["image", image] => shape.images.push(size(image)),
        ["video", frames, frame] => {
            let ImageSize { width, height } = size(frame);
            shape.videos.push(VideoShape { frames: number(frames), width, height });
        }
        ["audio", samples] => {
            shape.audio.push(AudioLength { frames: number(samples).into(), sample_rate_hz: 16_000 });
        }
        _ => panic!("{medium}"),
    }
    shape
}

#[test]
fn every_recorded_medium_has_the_tokens_of_its_processor() {
    for family in FAMILIES {
        check_tokens(family);
    }
}

fn check_tokens(family: &str) {
    let spec = model(&recorded(family, "tokens")).unwrap();
    let mut lines = String::new();
    let file = std::fs::File::open(format!("{DIRECTORY}/{family}/tokens.csv.gz")).unwrap();
    flate2::read::GzDecoder::new(file).read_to_string(&mut lines).unwrap();
    assert!(lines.lines().count() >= 2_000);
    for line in lines.lines() {
        let (medium, counted) = line.split_once(',').unwrap();
        let shape = shape(medium);
        let works: Result<Vec<_>, Error> = spec.encoders().map(|(_, _, rule)| rule.work(&shape)).collect();
        let made = match works {
            Err(Error::AspectRatio { .. }) => "refused".to_owned(),
            works => {
                let works = works.unwrap();
                let encoder: u64 = works.iter().map(|work| work.encoder_tokens).sum();
                let tokens: u64 = works.iter().map(|work| work.tokens).sum();
                format!("{encoder},{tokens}")
            }
        };
        assert_eq!(made, counted, "{family} {medium}");
    }
}

/// Returns the media in a recorded count.
fn media(counted: &Value) -> SampleShape {
    let rows = |key: &str| counted[key].as_array().cloned().unwrap_or_default();
    let number = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    let image = |row: &Value| ImageSize { width: number(&row[0]), height: number(&row[1]) };
    let video =
        |row: &Value| VideoShape { frames: number(&row[0]), width: number(&row[1]), height: number(&row[2]) };
    let clip = |row: &Value| AudioLength { frames: row.as_u64().unwrap(), sample_rate_hz: 16_000 };
    SampleShape {
        images: rows("images").iter().map(image).collect(),
        videos: rows("videos").iter().map(video).collect(),
        audio: rows("audio").iter().map(clip).collect(),
        ..SampleShape::default()
    }
}

/// Returns a part's forward and backward FLOPs by the cost model.
fn predicted(spec: &ModelSpec, counted: &Value) -> [u128; 2] {
    let Some((module, part)) = counted["part"].as_str().unwrap().split_once('.') else {
        let tokens = u32::try_from(counted["tokens"].as_u64().unwrap()).unwrap();
        let flops = LlmFlops::new(&spec.llm).training(&[tokens], Attention::Full, Recomputation::None);
        return [flops.forward, flops.backward];
    };
    let (_, encoder, rule) = spec.encoders().find(|(encoder, ..)| encoder.name() == module).unwrap();
    let work = rule.work(&media(counted)).unwrap();
    let flops = EncoderFlops::new(&encoder, spec.llm.hidden).gradients(Gradients::All, Gradients::All);
    let passes = [flops.forward_pass(&work), flops.backward_pass(&work)];
    passes.map(|pass| if part == "tower" { pass.tower } else { pass.projector })
}

#[test]
fn flops_agree_with_the_counter_and_parameters_are_exact() {
    for family in FAMILIES {
        let figures = check_flops(family);
        assert!(figures >= 30, "{family}: {figures} figures");
    }
}

/// Returns the number of compared figures.
fn check_flops(family: &str) -> usize {
    let cases = recorded(family, "flops");
    let mut compared = 0;
    for case in cases.as_array().unwrap() {
        let spec = model(&case["documents"]).unwrap();
        for counted in case["flops"].as_array().unwrap() {
            let recorded = ["forward", "backward"].map(|pass| counted[pass].as_u64().unwrap());
            for (predicted, recorded) in predicted(&spec, counted).into_iter().zip(recorded) {
                let difference = (predicted as f64 / recorded as f64 - 1.0).abs();
                assert!(difference <= TOLERANCE, "{}: {counted}: {predicted}", case["name"]);
                compared += 1;
            }
        }
        for (module, parameters) in spec.encoder_parameters() {
            let of = |part: &str| case["parameters"][format!("{module}.{part}")].as_u64();
            let found = [Some(parameters.tower()), Some(parameters.projector)];
            assert_eq!(found, [of("tower"), of("projector")], "{} {module}", case["name"]);
        }
        assert_eq!(Some(spec.llm_parameters().total()), case["parameters"]["llm"].as_u64());
    }
    compared
}

#[test]
fn presets_are_the_published_checkpoints() {
    for (family, name, rule) in [
        ("qwen2_5_omni", "qwen2.5-omni-7b", AudioChunks::QWEN2_5_OMNI),
        ("qwen3_omni_moe", "qwen3-omni-30b-a3b", AudioChunks::QWEN3_OMNI),
    ] {
        let files = recorded(family, "flops")[0]["documents"].clone();
        let read = model(&files).unwrap();
        let preset = ModelSpec::preset(name).unwrap();
        assert_eq!(ModelSpec { name: preset.name.clone(), ..read }, preset);
        let thinker =
            json!({"config": files["config"]["thinker_config"], "preprocessor": files["preprocessor"]});
        assert_eq!(ModelSpec { name: preset.name.clone(), ..model(&thinker).unwrap() }, preset);
        assert_eq!(preset.audio.unwrap().rule, AudioRule::Chunks(rule));
        let json = serde_json::to_string(&preset).unwrap();
        assert_eq!(serde_json::from_str::<ModelSpec>(&json).unwrap(), preset);
    }
}

/// Rules saved without spectrogram padding are Qwen2.5-Omni's.
#[test]
fn older_rules_of_chunks_are_padded() {
    let mut json = serde_json::to_value(AudioChunks::QWEN2_5_OMNI).unwrap();
    assert_eq!(json.as_object_mut().unwrap().remove("is_padded"), Some(json!(true)));
    assert_eq!(serde_json::from_value::<AudioChunks>(json).unwrap(), AudioChunks::QWEN2_5_OMNI);
}

#[test]
fn invalid_fields_are_named() {
    let config = |section: &str, key: &str, value: Value| {
        let mut config = json!({"model_type": "qwen2_5_omni",
            "thinker_config": {"vision_config": {"hidden_size": 1280}, "audio_config": {}, "text_config": {}}});
        config["thinker_config"][section][key] = value;
        json!({"config": config})
    };
    let audio = |key: &str, value: Value| {
        let mut files = config("audio_config", "n_window", json!(100));
        files["preprocessor"] = json!({"feature_size": 128, "chunk_length": 300});
        files["preprocessor"][key] = value;
        files
    };
    for (files, problem) in [
        (
            config("audio_config", "output_dim", json!(64)),
            "`config.json`: `thinker_config.audio_config.output_dim` = 64, but the language model is 3584 wide",
        ),
        (
            config("audio_config", "n_window", json!(1501)),
            "`config.json`: `thinker_config.audio_config.n_window` = 1501 tokens, but there are 1500 positions",
        ),
        (
            config("audio_config", "encoder_attention_heads", json!(7)),
            "`thinker_config.audio_config.d_model` = 1280 must be a multiple of",
        ),
        (
            config("vision_config", "out_hidden_size", json!(64)),
            "`thinker_config.vision_config.out_hidden_size` = 64, but the language model is 3584 wide",
        ),
        (
            config("text_config", "model_type", json!("opt")),
            "`thinker_config.text_config.model_type` = \"opt\" is not a known language model",
        ),
        (
            audio("feature_size", json!(80)),
            "`preprocessor_config.json`: `feature_size` = 80, but the encoder takes 128 mel bins",
        ),
        (
            audio("chunk_length", json!(15)),
            "`preprocessor_config.json`: `chunk_length` = 15 s must be a multiple of the 200 frames of a chunk",
        ),
        (
            json!({"config": {"model_type": "qwen2_5_omni_thinker", "position_id_per_seconds": 13}}),
            "`config.json`: `position_id_per_seconds` must be 25, found 13",
        ),
        (
            json!({"config": {"model_type": "qwen2_5_omni"}, "processor": {"load_audio_from_video": true}}),
            "`processor_config.json`: `load_audio_from_video` must be false",
        ),
        (audio("hop_length", json!(200)), "`preprocessor_config.json`: `hop_length` must be 160, found 200"),
    ] {
        let error = model(&files).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn invalid_fields_of_qwen3_omni_are_named() {
    let config = |section: &str, key: &str, value: Value| {
        let mut config = recorded("qwen3_omni_moe", "tokens")["config"].clone();
        config["thinker_config"][section][key] = value;
        json!({"config": config})
    };
    let audio = |key: &str, value: Value| config("audio_config", key, value);
    let mut whole = config("audio_config", "n_window", json!(50));
    whole["config"]["thinker_config"]["position_id_per_seconds"] = json!(25);
    let mut other_rate = audio("n_window", json!(50));
    other_rate["preprocessor"] = json!({"feature_size": 128, "patch_size": 16, "sampling_rate": 8_000});
    for (files, problem) in [
        (
            audio("output_dim", json!(64)),
            "`thinker_config.audio_config.output_dim` = 64, but the language model is 2048 wide",
        ),
        (
            audio("n_window", json!(60)),
            "`thinker_config.audio_config.n_window` = 60 makes chunks of 15 tokens, the processor counts 13",
        ),
        (
            audio("n_window_infer", json!(99)),
            "`thinker_config.audio_config.n_window_infer` = 99 frames, but a chunk has 100",
        ),
        (
            audio("num_mel_bins", json!(80)),
            "`thinker_config.audio_config.num_mel_bins` must be 128, found 80",
        ),
        (
            audio("max_source_positions", json!(12)),
            "`thinker_config.audio_config.max_source_positions` = 12, but a chunk has 13 tokens",
        ),
        (
            config("vision_config", "deepstack_visual_indexes", json!([8, 16, 27])),
            "has layer 27, but the encoder has 27 layers",
        ),
        (whole, "`thinker_config.position_id_per_seconds` must be 13, found 25"),
        (other_rate, "`preprocessor_config.json`: `sampling_rate` must be 16000, found 8000"),
        (
            json!({"config": {"model_type": "qwen3_omni_moe_thinker", "position_id_per_seconds": 13},
                "processor": {"load_audio_from_video": true}}),
            "`processor_config.json`: `load_audio_from_video` must be false",
        ),
    ] {
        let error = model(&files).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}
