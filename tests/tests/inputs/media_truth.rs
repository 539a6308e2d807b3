//! Compares a complete path with recorded truth: sample images and clips to packed microbatch tensors.

use std::ops::Range;

use dflop_costmodel::ModelSpec;
use dflop_loader::inputs::{ModelInputs, TensorValues};
use dflop_loader::media::Media;
use dflop_loader::processors::{Preparer, Tokenizer};
use dflop_loader::sample::{Field, Sample};
use dflop_tests::media::{chirp, image, recorded};
use serde_json::{Value, json};

use super::processors::{checksum, numbers, samples};

fn preparer(family: &str) -> Preparer {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
    let model = ModelSpec::preset(family).unwrap();
    Preparer::builder(&model).tokenizer(Tokenizer::open(directory).unwrap()).build().unwrap()
}

/// Packs samples with these media, each before a question.
fn packed(preparer: &Preparer, samples: Vec<Vec<Field>>) -> ModelInputs {
    let turns = json!([{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a kite"}]);
    let sample = |media: Vec<Field>| {
        let said = Field { extension: "json".into(), media: Media::Json(json!({"messages": turns})) };
        preparer.prepare(&Sample::new("key", [vec![said], media].concat())).unwrap()
    };
    preparer.pack(samples.into_iter().map(sample).collect()).unwrap()
}

fn floats<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [f32] {
    match &inputs.tensor(name).unwrap().values {
        TensorValues::F32(values) => values,
        _ => panic!("`{name}` is not in single precision"),
    }
}

fn ints(inputs: &ModelInputs, name: &str) -> Vec<i64> {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::I64(values)) => values.clone(),
        _ => Vec::new(),
    }
}

/// Returns the recorded cases with these seeds, each as the media of one sample.
fn images(recorded: &Value, seeds: &[u32]) -> (Vec<Vec<Field>>, Vec<Value>) {
    let (mut media, mut made) = (Vec::new(), Vec::new());
    for seed in seeds {
        let cases = recorded["cases"].as_array().unwrap().iter();
        let case = cases.clone().find(|case| case["seed"] == *seed && case["images"].is_array()).unwrap();
        let sizes: Vec<[u32; 2]> = numbers(&case["images"]);
        let field = |(at, [width, height]): (u32, [u32; 2])| Field {
            extension: format!("{at}.png").into(),
            media: Media::Image(image(width, height, seed + at)),
        };
        media.push((0..).zip(sizes).map(field).collect());
        made.extend(case["made"].as_array().unwrap().iter().cloned());
    }
    (media, made)
}

/// Returns the value ranges of each recorded image in the joined tensor: padded images have rows of equal
/// length.
fn places(made: &[Value], row: Option<usize>) -> Vec<Range<usize>> {
    let mut next = 0;
    let place = |made: &Value| {
        let values: usize = numbers::<Vec<usize>>(&made["shape"]).iter().product();
        let start = next;
        next += row.unwrap_or(values);
        start..start + values
    };
    made.iter().map(place).collect()
}

fn check(name: &str, family: &str, seeds: &[u32], placeholder: &str) {
    let (media, made) = images(&recorded(name), seeds);
    let preparer = preparer(family);
    let inputs = packed(&preparer, media);
    let pixels = inputs.tensor("pixel_values").unwrap();
    let row = (name == "llava_onevision").then(|| pixels.shape[1..].iter().product());
    let values = floats(&inputs, "pixel_values");
    for (place, made) in places(&made, row).into_iter().zip(&made) {
        let expected: Vec<f32> = numbers(&made["samples"]);
        assert_eq!(samples(&values[place.clone()], expected.len()), expected, "{family}");
        assert_eq!(checksum(&values[place]), made["checksum"], "{family}");
    }
    let integers = |name: &str| -> Vec<i64> {
        let of = |made: &Value| numbers::<Option<Vec<i64>>>(&made[name]).unwrap_or_default();
        made.iter().flat_map(of).collect()
    };
    assert_eq!(ints(&inputs, "image_grid_thw"), integers("grid_thw"), "{family}");
    assert_eq!(ints(&inputs, "image_sizes"), integers("image_size"), "{family}");
    let id = i64::from(preparer.tokenizer().id(placeholder).unwrap());
    let placeholders = ints(&inputs, "input_ids").iter().filter(|&&found| found == id).count() as u64;
    assert_eq!(placeholders, made.iter().map(|made| made["tokens"].as_u64().unwrap()).sum::<u64>());
}

#[test]
fn pixels_in_a_microbatch_are_the_recorded_ones() {
    check("qwen_vl", "qwen2-vl-7b", &[4, 44, 13], "<|image_pad|>");
    check("qwen_vl", "qwen2.5-vl-7b", &[4, 44, 13], "<|image_pad|>");
    check("llava_onevision", "llava-ov-qwen2.5-7b", &[5, 47, 13], "<image>");
    check("intern_vl", "internvl3-8b", &[5, 47, 9], "<IMG_CONTEXT>");
}

#[test]
fn mel_values_in_a_microbatch_are_the_recorded_ones() {
    let recorded = recorded("audio");
    let is_wanted = |case: &&Value| case["kind"] == "clip" && case["mels"] == 128 && case["seed"] != 1;
    let cases: Vec<&Value> = recorded["cases"].as_array().unwrap().iter().filter(is_wanted).collect();
    assert!(cases.len() >= 5);
    let clip = |case: &&Value| {
        let clip = chirp(numbers(&case["samples"]), numbers(&case["seed"]));
        vec![Field { extension: "wav".into(), media: Media::Audio(clip) }]
    };
    let preparer = preparer("qwen2-audio-7b");
    let inputs = packed(&preparer, cases.iter().map(clip).collect());
    let mut windows = floats(&inputs, "input_features").chunks(128 * 3_000);
    let mask = ints(&inputs, "feature_attention_mask");
    let mut masks = mask.chunks(3_000);
    let mut tokens = 0;
    for made in cases.iter().flat_map(|case| case["made"].as_array().unwrap()) {
        let expected: Vec<f32> = numbers(&made["samples"]);
        let found = samples(windows.next().unwrap(), expected.len());
        assert!(found.iter().zip(&expected).all(|(one, other)| (one - other).abs() <= 1e-6));
        assert_eq!(masks.next().unwrap().iter().sum::<i64>(), numbers::<i64>(&made["frames"]));
        tokens += numbers::<usize>(&made["tokens"]);
    }
    assert!(windows.next().is_none() && masks.next().is_none());
    let id = i64::from(preparer.tokenizer().id("<|AUDIO|>").unwrap());
    assert_eq!(ints(&inputs, "input_ids").iter().filter(|&&found| found == id).count(), tokens);
}
