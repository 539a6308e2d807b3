//! Compares model inputs for Qwen3-VL with the Hugging Face processor, as recorded by
//! `tests/record/families/qwen3_vl.py`, and with the plans.

use dflop_costmodel::{ImageSize, ModelSpec, SampleShape, VideoShape};
use dflop_processors::{Preparer, Tokenizer};
use dflop_samples::inputs::{ModelInputs, TensorValues, TextCounter};
use dflop_samples::media::{Media, RgbImage, Video};
use dflop_samples::sample::{Field, Sample};
use serde_json::Value;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/model_inputs");
const MODELS: [&str; 2] = ["qwen3-vl-8b", "qwen3-vl-30b-a3b"];
/// Maximum difference between video pixels, which torch resizes in bytes: two of 255 steps, and rounding.
const PIXELS_APART: f32 = 2.01 / 255.0 / 0.5;

fn preparer(model: &str) -> Preparer {
    let tokenizer = Tokenizer::open(format!("{GOLDEN}/chatml")).unwrap();
    Preparer::builder(&ModelSpec::preset(model).unwrap()).tokenizer(tokenizer).build().unwrap()
}

fn cases() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/qwen3_vl.json")).unwrap()).unwrap()
}

fn number(of: &Value, name: &str) -> u32 {
    u32::try_from(of[name].as_u64().unwrap()).unwrap()
}

/// Creates the recorded pixels.
fn pattern(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let first = seed.wrapping_mul(7919);
    let value = |at: u32| (first.wrapping_add(at).wrapping_mul(2_654_435_761) >> 13) as u8;
    (0..3 * width * height).map(value).collect()
}

fn video(frames: u32, [width, height]: [u32; 2], seed: u32, frames_per_second: f64) -> Video {
    Video {
        width,
        height,
        times_seconds: (0..frames).map(|frame| f64::from(frame) / frames_per_second).collect(),
        frames_per_second,
        pixels: (0..frames).flat_map(|frame| pattern(width, height, seed + frame)).collect(),
    }
}

fn field(extension: &str, media: Media) -> Field {
    Field { extension: extension.into(), media }
}

/// Returns the sample for a case, as the decoders deliver it.
fn sample(case: &Value) -> Sample {
    let mut fields = vec![field("json", Media::Json(case["json"].clone()))];
    for (at, of) in case["images"].as_array().unwrap().iter().enumerate() {
        let [width, height, seed] = ["width", "height", "seed"].map(|name| number(of, name));
        let pixels = pattern(width, height, seed);
        let image = RgbImage { width, height, pixels, is_truncated: false };
        fields.push(field(&format!("{at}.png"), Media::Image(image)));
    }
    for (at, of) in case["videos"].as_array().unwrap().iter().enumerate() {
        let size = ["width", "height"].map(|name| number(of, name));
        let made = video(number(of, "frames"), size, number(of, "seed"), of["fps"].as_f64().unwrap());
        fields.push(field(&format!("{at}.mp4"), Media::Video(made)));
    }
    Sample::new("key", fields)
}

fn ints(inputs: &ModelInputs, name: &str) -> Vec<i64> {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::I64(values)) => values.clone(),
        Some(_) => panic!("`{name}` is not an integer tensor"),
        None => Vec::new(),
    }
}

fn floats<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [f32] {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::F32(values)) => values,
        _ => panic!("`{name}` is not in single precision"),
    }
}

/// Expands recorded run lengths.
fn flat(values: &Value) -> Vec<i64> {
    let run = |value: &Value| match value {
        Value::Array(run) => vec![run[0].as_i64().unwrap(); run[1].as_u64().unwrap() as usize],
        value => vec![value.as_i64().unwrap()],
    };
    values.as_array().unwrap().iter().flat_map(run).collect()
}

/// Hashes all bits in all values, as the record does.
fn checksum(values: &[f32]) -> String {
    let hash = |(at, value): (u64, &f32)| u64::from(value.to_bits()).wrapping_mul(2 * at + 1);
    format!("{:016x}", (0..).zip(values).map(hash).fold(0_u64, u64::wrapping_add))
}

fn check_positions(case: &Value, inputs: &ModelInputs, note: &str) {
    let positions = ints(inputs, "position_ids");
    let tokens = positions.len() / 4;
    let axes: Vec<&[i64]> = positions.chunks(tokens).skip(1).collect();
    let sums: Vec<[i64; 3]> = serde_json::from_value(case["position_sums"].clone()).unwrap();
    for (axis, sums) in axes.iter().zip(sums) {
        assert_eq!([axis.iter().sum(), *axis.iter().max().unwrap(), axis[tokens - 1]], sums, "{note}");
    }
    if let Some(exact) = case.get("positions") {
        assert_eq!(axes, serde_json::from_value::<Vec<Vec<i64>>>(exact.clone()).unwrap(), "{note}");
    }
}

#[test]
fn inputs_are_those_of_the_processor() {
    let cases = cases();
    assert!(cases.len() >= 7);
    for (number, case) in cases.iter().enumerate() {
        for model in MODELS {
            let (preparer, note) = (preparer(model), format!("case {number} of {model}"));
            let prepared = preparer.prepare(&sample(case)).unwrap_or_else(|error| panic!("{note}: {error}"));
            let inputs = preparer.pack(vec![prepared]).unwrap();
            for name in ["input_ids", "labels", "mm_token_type_ids"] {
                assert_eq!(ints(&inputs, name), flat(&case[name]), "{note}: {name}");
            }
            for name in ["image_grid_thw", "video_grid_thw"] {
                let grids =
                    case.get(name).map(|grids| serde_json::from_value::<Vec<[i64; 3]>>(grids.clone()));
                assert_eq!(
                    ints(&inputs, name),
                    grids.transpose().unwrap().unwrap_or_default().concat(),
                    "{note}"
                );
            }
            check_positions(case, &inputs, &note);
            if let Some(expected) = case.get("pixels") {
                assert_eq!(checksum(floats(&inputs, "pixel_values")), *expected, "{note}");
            }
            if let Some(expected) = case.get("video_samples") {
                let made = floats(&inputs, "pixel_values_videos");
                assert_eq!(made.len() as u64, case["video_values"].as_u64().unwrap(), "{note}");
                for (at, expected) in expected.as_array().unwrap().iter().enumerate() {
                    let made = made[at * (made.len() - 1) / 63];
                    let apart = (made - expected.as_f64().unwrap() as f32).abs();
                    assert!(apart <= PIXELS_APART, "{note}: value {at} of the videos is off by {apart}");
                }
            }
        }
    }
}

/// Counted texts and the token rule together are the length of the prepared sample, with and without video
/// pixels. Frames at all rates have times with one to four digits.
#[test]
fn planned_tokens_are_delivered() {
    let preparer = preparer("qwen3-vl-8b");
    let rule = ModelSpec::preset("qwen3-vl-8b").unwrap().vision.unwrap().rule;
    let counter = preparer.text_counter();
    assert!(counter.reads_video_times());
    let of_rates = [(24.0, 7), (2.0, 40), (0.1, 30), (0.01, 12)].map(|(rate, frames)| {
        let turns = serde_json::json!({"messages": [
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "a kite"},
        ]});
        let made = Media::Video(video(frames, [48, 40], 1, rate));
        Sample::new("key", vec![field("json", Media::Json(turns)), field("mp4", made)])
    });
    for sample in cases().iter().map(sample).chain(of_rates) {
        let mut shape = SampleShape::default();
        let mut timed = sample.clone();
        for field in &mut timed.fields {
            match &mut field.media {
                Media::Image(image) => {
                    shape.images.push(ImageSize { width: image.width, height: image.height });
                    field.media = Media::Opaque(bytes::Bytes::new());
                }
                Media::Video(video) => {
                    let (frames, width, height) = (video.frames() as u32, video.width, video.height);
                    shape.videos.push(VideoShape { frames, width, height });
                    video.pixels = Vec::new();
                }
                _ => {}
            }
        }
        let text = counter.count(&timed).unwrap();
        assert_eq!(text, counter.count(&sample).unwrap());
        let mut work = rule.images(&shape.images).unwrap();
        for &video in &shape.videos {
            work += rule.video(video).unwrap();
        }
        let prepared = preparer.prepare(&sample).unwrap();
        assert_eq!(u64::from(text.tokens) + work.tokens, prepared.tokens() as u64);
        assert_eq!(text.target_tokens as usize, prepared.target_tokens());
    }
}

/// Without times, as for an undecoded video, the count leaves all labels to the token rule.
#[test]
fn videos_of_unknown_times_are_counted_by_the_token_rule() {
    let preparer = preparer("qwen3-vl-8b");
    let mut undecoded = sample(&cases()[4]);
    undecoded.fields[1].media = Media::Opaque(bytes::Bytes::new());
    let text = preparer.text_counter().count(&undecoded).unwrap();
    let mut without = cases()[4].clone();
    let parts = without["json"]["messages"][0]["content"].as_array_mut().unwrap();
    parts.remove(0);
    without["videos"] = serde_json::json!([]);
    let alone = preparer.text_counter().count(&sample(&without)).unwrap();
    assert_eq!(text.tokens, alone.tokens);
}
