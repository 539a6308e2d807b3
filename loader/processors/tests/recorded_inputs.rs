//! Compares conversations with images with the Hugging Face processors' results, family by family, as
//! recorded by `tests/record/families/`.

use std::path::PathBuf;
use std::sync::Arc;

use dflop_costmodel::config::Documents;
use dflop_costmodel::{ImageSize, ModelFamilies, ModelSpec};
use dflop_processors::image::ImageProcessor;
use dflop_processors::{Preparer, PreparerBuilder, Tokenizer};
use dflop_samples::inputs::{ModelInputs, NamedTensor, TensorValues, TextCounter};
use dflop_samples::media::{Media, RgbImage, Video};
use dflop_samples::sample::{BatchLayout, Field, PaddingSide, Sample};
use serde_json::{Value, json};

fn golden() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/model_inputs"))
}

/// Reads a JSON file in the recorded directory.
fn read(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden().join(path)).unwrap()).unwrap()
}

/// Creates a model's tokenizer: the words in `chatml` with the model's added tokens.
fn tokenizer(model: &Value) -> Tokenizer {
    let mut made = read("chatml/tokenizer.json");
    let first = made["model"]["vocab"].as_object().unwrap().len();
    let added = model["added"].as_array().unwrap();
    let token = |(at, token): (usize, &Value)| {
        json!({"id": first + at, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    made["added_tokens"] = added.iter().enumerate().map(token).collect();
    if let Some(bos) = model["bos"].as_str() {
        let at = added.iter().position(|token| token == bos).unwrap();
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        made["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence("A")],
            "pair": [sequence("A"), sequence("B")],
            "special_tokens": {bos: {"id": bos, "ids": [first + at], "tokens": [bos]}}});
    }
    let made = Tokenizer::from_json(made.to_string().as_bytes()).unwrap();
    let special = model["special"].as_object().unwrap();
    special.iter().fold(made, |made, (name, token)| made.special_token(name, token.as_str().unwrap()))
}

fn spec(model: &Value) -> ModelSpec {
    let file = |name: &str| model["files"].get(name).cloned();
    let documents = Documents {
        config: file("config").expect("a configuration"),
        preprocessor: file("preprocessor"),
        video_preprocessor: file("video_preprocessor"),
        processor: file("processor"),
    };
    ModelFamilies::default().model(model["name"].as_str().unwrap(), &documents).unwrap()
}

/// Creates a preparer as the loader does: tokens from the model, pixels from the processor file.
fn builder(model: &Value) -> PreparerBuilder {
    let spec = spec(model);
    let of_file = ImageProcessor::from_preprocessor_config(&model["files"]["preprocessor"]).unwrap();
    let images = ImageProcessor::for_model(&spec).unwrap().with_pixels_from(&of_file);
    Preparer::builder(&spec).tokenizer(tokenizer(model)).image_processor(Arc::new(images))
}

/// Hashes 32 bits to 32 bits, as the recording script does.
fn mix(value: u32) -> u32 {
    let value = (value ^ (value >> 15)).wrapping_mul(0x2C1B_3C6D);
    let value = (value ^ (value >> 12)).wrapping_mul(0x297A_2D39);
    value ^ (value >> 15)
}

/// Draws an image as in the recording script.
fn image(width: u32, height: u32, seed: u32) -> RgbImage {
    let mut pixels = Vec::with_capacity(3 * (width * height) as usize);
    for y in 0..height {
        for x in 0..width {
            let plain =
                [x * 255 / (width - 1).max(1), y * 255 / (height - 1).max(1), (x / 16 + y / 16) % 2 * 255];
            for (channel, plain) in (0..3_u32).zip(plain) {
                let of_channel =
                    channel.wrapping_mul(0xC2B2_AE3D).wrapping_add(seed.wrapping_mul(0x27D4_EB2F));
                let key = x.wrapping_mul(0x9E37_79B1).wrapping_add(y.wrapping_mul(0x85EB_CA77));
                pixels.push(((3 * plain + (mix(key.wrapping_add(of_channel)) & 255)) >> 2) as u8);
            }
        }
    }
    RgbImage { width, height, pixels, is_truncated: false }
}

fn sizes(case: &Value) -> Vec<ImageSize> {
    let size = |size: &Value| {
        let [width, height] = [0, 1].map(|axis| size[axis].as_u64().unwrap() as u32);
        ImageSize { width, height }
    };
    case["images"].as_array().unwrap().iter().map(size).collect()
}

/// Returns the sample for a case, as the decoders deliver it.
fn sample(case: &Value) -> Sample {
    let field = |extension: &str, media| Field { extension: extension.into(), media };
    let mut fields = vec![field("json", Media::Json(case["json"].clone()))];
    let seed = case["seed"].as_u64().unwrap() as u32;
    for (size, at) in sizes(case).into_iter().zip(0..) {
        let image = image(size.width, size.height, seed + at);
        fields.push(field(&format!("{at}.png"), Media::Image(image)));
    }
    Sample::new("key", fields)
}

/// Expands recorded run lengths.
fn flat(values: &Value) -> Vec<i64> {
    let run = |value: &Value| match value {
        Value::Array(run) => vec![run[0].as_i64().unwrap(); run[1].as_u64().unwrap() as usize],
        value => vec![value.as_i64().unwrap()],
    };
    values.as_array().unwrap().iter().flat_map(run).collect()
}

fn assert_tensor(made: &NamedTensor, expected: &Value, note: &str) {
    let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(made.shape, shape, "{note}");
    match &made.values {
        TensorValues::I64(values) => assert_eq!(*values, flat(&expected["ints"]), "{note}"),
        TensorValues::F32(values) => {
            let samples: Vec<f32> = serde_json::from_value(expected["samples"].clone()).unwrap();
            let found = (0..samples.len() as u32).map(|at| values[mix(at) as usize % values.len()]);
            assert_eq!(found.collect::<Vec<_>>(), samples, "{note}");
            let weigh = |(index, value): (u64, &f32)| u64::from(value.to_bits()).wrapping_mul(2 * index + 1);
            let checksum = (0..).zip(values).map(weigh).fold(0, u64::wrapping_add);
            assert_eq!(format!("{checksum:016x}"), expected["checksum"], "{note}");
        }
        _ => panic!("{note} is of another type"),
    }
}

/// Compares every recorded tensor.
fn assert_inputs(inputs: &ModelInputs, expected: &Value, note: &str) {
    for (name, expected) in expected.as_object().unwrap() {
        let note = format!("{note}: {name}");
        assert_tensor(inputs.tensor(name).unwrap_or_else(|| panic!("no {note}")), expected, &note);
    }
}

/// Checks the inputs for every case, and that the plan has as many tokens as are delivered.
fn check_cases(model: &Value, preparer: &Preparer, note: &str) {
    let rule = spec(model).vision.unwrap().rule;
    let counter = preparer.text_counter();
    for (number, case) in model["cases"].as_array().unwrap().iter().enumerate() {
        let note = format!("case {number} of {}, {note}", model["name"]);
        let sample = sample(case);
        let prepared = preparer.prepare(&sample).unwrap_or_else(|error| panic!("{note}: {error}"));
        let text = u64::from(counter.count(&sample).unwrap().tokens);
        let planned = text + rule.images(&sizes(case)).unwrap().tokens;
        assert_eq!(planned, prepared.tokens() as u64, "{note}");
        let inputs = preparer.pack(vec![prepared]).unwrap();
        assert_inputs(&inputs, &case["tensors"], &note);
        let TensorValues::I64(labels) = &inputs.tensor("labels").unwrap().values else { panic!("{note}") };
        assert_eq!(*labels, flat(&case["labels"]), "{note}");
    }
}

/// Checks that counted media have the same ids as media with pixels.
fn check_counted(model: &Value) {
    let images = ImageProcessor::for_model(&spec(model)).unwrap();
    let counted = builder(model).counted_media().image_processor(Arc::new(images)).build().unwrap();
    for case in model["cases"].as_array().unwrap() {
        let inputs = counted.pack(vec![counted.prepare(&sample(case)).unwrap()]).unwrap();
        assert!(inputs.tensor("pixel_values").is_none());
        let mut expected = case["tensors"].clone();
        expected.as_object_mut().unwrap().retain(|_, tensor| tensor.get("ints").is_some());
        assert_inputs(&inputs, &expected, &format!("{}, counted", model["name"]));
    }
}

fn check_batches(model: &Value) {
    for batch in model["batches"].as_array().unwrap() {
        let side = if batch["side"] == "left" { PaddingSide::Left } else { PaddingSide::Right };
        let preparer = builder(model).layout(BatchLayout::Padded { side }).build().unwrap();
        let cases = batch["cases"].as_array().unwrap().iter();
        let cases = cases.map(|at| &model["cases"][at.as_u64().unwrap() as usize]);
        let samples = cases.map(|case| preparer.prepare(&sample(case)).unwrap()).collect();
        let inputs = preparer.pack(samples).unwrap();
        assert_inputs(&inputs, &batch["tensors"], &format!("{}, padded", model["name"]));
    }
}

/// Checks all models that a script recorded.
fn check(script: &str, models_least: usize) {
    let models = read(&format!("{script}.json"));
    let models = models.as_array().unwrap();
    assert!(models.len() >= models_least);
    for model in models {
        check_cases(model, &builder(model).build().unwrap(), "built-in template");
        let own = builder(model).chat_template(model["template"].as_str().unwrap());
        check_cases(model, &own.build().unwrap(), "own template");
        check_counted(model);
        check_batches(model);
    }
}

#[test]
fn llava_pixtral_and_mistral_small_are_recorded_to_the_bit() {
    check("llava", 4);
}

#[test]
fn llava_next_is_recorded_to_the_bit() {
    check("llava_next", 2);
}

#[test]
fn idefics3_and_smolvlm_are_recorded_to_the_bit() {
    check("idefics3", 5);
}

#[test]
fn glm_4_1v_is_recorded_to_the_bit() {
    check("glm4v", 3);
}

#[test]
fn gemma_3_is_recorded_to_the_bit() {
    check("gemma3", 2);
}

#[test]
fn videos_are_refused_by_name() {
    let model = &read("llava.json")[2];
    let preparer = builder(model).build().unwrap();
    let video = Video { width: 4, height: 4, pixels: vec![0; 48], ..Video::default() };
    let fields = [
        ("json", Media::Json(json!([{"role": "user", "content": "<video>What?"}]))),
        ("mp4", Media::Video(video)),
    ];
    let fields = fields.map(|(extension, media)| Field { extension: extension.into(), media });
    let refused = preparer.prepare(&Sample::new("key", fields.to_vec())).unwrap_err();
    let reason = dflop_samples::error_reason(&refused);
    assert!(reason.contains("the model takes no videos"), "{reason}");
}
