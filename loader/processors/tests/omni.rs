//! Compares model inputs for Qwen2.5-Omni and Qwen3-Omni with the Hugging Face processors, as recorded by
//! `tests/record/families/qwen2_5_omni.py` and `qwen3_omni.py`, and with the plans.

use dflop_costmodel::tokens::audio::AudioChunks;
use dflop_costmodel::{AudioLength, ImageSize, ModelSpec, SampleShape, VideoShape};
use dflop_processors::audio::ClipProcessor;
use dflop_processors::{Preparer, PreparerBuilder, Tokenizer};
use dflop_samples::inputs::{ModelInputs, TensorValues, TextCounter};
use dflop_samples::media::{Audio, Media, RgbImage, Video};
use dflop_samples::sample::{BatchLayout, Field, PaddingSide, Sample};
use serde_json::Value;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
const FAMILIES: [Family; 2] = [
    Family {
        name: "qwen2_5_omni",
        model: "qwen2.5-omni-7b",
        renamed: &[
            ("image_pad", "IMAGE"),
            ("video_pad", "VIDEO"),
            ("vision_start", "vision_bos"),
            ("vision_end", "vision_eos"),
        ],
        deviation: 0.224,
    },
    Family {
        name: "qwen3_omni_moe",
        model: "qwen3-omni-30b-a3b",
        renamed: &[("AUDIO", "audio_pad"), ("audio_bos", "audio_start"), ("audio_eos", "audio_end")],
        deviation: 0.5,
    },
];
/// Maximum difference between video pixels, which the processor resizes with torch: two of 255 steps.
const STEPS_APART: f32 = 2.01 / 255.0;
/// Maximum difference between spectrogram values, and between mel bin means.
const MEL_APART: [f64; 2] = [1e-6, 1e-7];

/// Family with recorded reference values.
struct Family {
    name: &'static str,
    model: &'static str,
    /// Special tokens in the small tokenizer, and the family's token names.
    renamed: &'static [(&'static str, &'static str)],
    /// Minimum deviation that pixels are divided by.
    deviation: f32,
}

impl Family {
    fn recorded(&self) -> Value {
        let text = std::fs::read(format!("{GOLDEN}/families/{}/inputs.json", self.name)).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn spec(&self) -> ModelSpec {
        ModelSpec::preset(self.model).unwrap()
    }

    /// Returns the small `ChatML` tokenizer with this family's special token names.
    fn builder(&self) -> PreparerBuilder {
        let path = format!("{GOLDEN}/model_inputs/chatml/tokenizer.json");
        let mut text = std::fs::read_to_string(path).unwrap();
        for (old, new) in self.renamed {
            text = text.replace(&format!("<|{old}|>"), &format!("<|{new}|>"));
        }
        let tokenizer = Tokenizer::from_json(text.as_bytes()).unwrap();
        Preparer::builder(&self.spec()).tokenizer(tokenizer.special_token("eos_token", "<|im_end|>"))
    }
}

fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// Returns values spread over the tensor, at the recorded positions.
fn samples(values: &[f32], count: usize) -> Vec<f32> {
    let mix = |mut at: u32| {
        at = (at ^ (at >> 15)).wrapping_mul(0x2C1B_3C6D);
        at = (at ^ (at >> 12)).wrapping_mul(0x297A_2D39);
        at ^ (at >> 15)
    };
    (0..count as u32).map(|at| values[mix(at) as usize % values.len()]).collect()
}

fn noise(count: usize, seed: u32) -> impl Iterator<Item = u8> {
    let first = seed.wrapping_mul(7919);
    (0..count as u32).map(move |at| (first.wrapping_add(at).wrapping_mul(2_654_435_761) >> 13) as u8)
}

fn picture(width: u32, height: u32, seed: u32) -> RgbImage {
    let pixels = noise(3 * width as usize * height as usize, seed).collect();
    RgbImage { width, height, pixels, is_truncated: false }
}

fn clip(count: usize, seed: u32) -> Audio {
    let sample = |(at, noise): (usize, u8)| {
        let tooth = (at % 73) as i32 * 3 - 108;
        (tooth + i32::from(noise >> 2) - 32) as f32 / 256.0
    };
    let samples = noise(count, seed).enumerate().map(sample).collect();
    Audio { sample_rate_hz: 16_000, channels: 1, samples, is_truncated: false }
}

fn video(of: &Value) -> Video {
    let [frames, width, height, seed] =
        ["frames", "width", "height", "seed"].map(|name| numbers::<u32>(&of[name]));
    let frames_per_second = of["fps"].as_f64().unwrap();
    Video {
        width,
        height,
        times_seconds: (0..frames).map(|frame| f64::from(frame) / frames_per_second).collect(),
        frames_per_second,
        pixels: (0..frames).flat_map(|frame| picture(width, height, seed + frame).pixels).collect(),
    }
}

/// Returns the sample for a recorded case, as the decoders deliver it, and the media shape without text.
fn sample(case: &Value) -> (Sample, SampleShape) {
    let field = |extension: String, media| Field { extension: extension.into(), media };
    let mut fields = vec![field("json".to_owned(), Media::Json(case["json"].clone()))];
    let mut shape = SampleShape::default();
    for (at, of) in case["images"].as_array().unwrap().iter().enumerate() {
        let [width, height, seed] = ["width", "height", "seed"].map(|name| numbers::<u32>(&of[name]));
        fields.push(field(format!("{at}.png"), Media::Image(picture(width, height, seed))));
        shape.images.push(ImageSize { width, height });
    }
    for (at, of) in case["clips"].as_array().unwrap().iter().enumerate() {
        let [count, seed] = ["samples", "seed"].map(|name| numbers::<u32>(&of[name]));
        fields.push(field(format!("{at}.wav"), Media::Audio(clip(count as usize, seed))));
        shape.audio.push(AudioLength { frames: count.into(), sample_rate_hz: 16_000 });
    }
    for (at, of) in case["videos"].as_array().unwrap().iter().enumerate() {
        let video = video(of);
        let frames = video.frames() as u32;
        shape.videos.push(VideoShape { frames, width: video.width, height: video.height });
        fields.push(field(format!("{at}.mp4"), Media::Video(video)));
    }
    (Sample::new("key", fields), shape)
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
        Some(_) => panic!("`{name}` is not in single precision"),
        None => &[],
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

fn check_positions(case: &Value, inputs: &ModelInputs, note: &str) {
    let positions = ints(inputs, "position_ids");
    let tokens = positions.len() / 4;
    let axes: Vec<&[i64]> = positions.chunks(tokens).skip(1).collect();
    for (axis, sums) in axes.iter().zip(numbers::<Vec<[i64; 3]>>(&case["position_sums"])) {
        assert_eq!([axis.iter().sum(), *axis.iter().max().unwrap(), axis[tokens - 1]], sums, "{note}");
    }
    for (axis, exact) in axes.iter().zip(case["positions"].as_array().into_iter().flatten()) {
        assert_eq!(*axis, flat(exact), "{note}");
    }
}

fn check_pixels(case: &Value, inputs: &ModelInputs, deviation: f32, note: &str) {
    for (name, apart) in [("pixel_values", 0.0), ("pixel_values_videos", STEPS_APART / deviation)] {
        assert_eq!(inputs.tensor(name).is_some(), case.get(name).is_some(), "{note}: {name}");
        let Some(tensor) = inputs.tensor(name) else { continue };
        assert_eq!(tensor.shape, numbers::<Vec<usize>>(&case[name]["shape"]), "{note}: {name}");
        let expected: Vec<f32> = numbers(&case[name]["samples"]);
        for (made, expected) in samples(floats(inputs, name), expected.len()).iter().zip(expected) {
            assert!((made - expected).abs() <= apart, "{note}: {name}: {made} for {expected}");
        }
    }
}

/// Compares `input_features [clips, mels, longest]`, whose padding the mask excludes.
fn check_features(case: &Value, inputs: &ModelInputs, note: &str) {
    let expected = case["features"].as_array().cloned().unwrap_or_default();
    let lengths: Vec<usize> = expected.iter().map(|clip| numbers(&clip["frames"])).collect();
    let Some(longest) = lengths.iter().max().copied() else {
        assert!(inputs.tensor("input_features").is_none(), "{note}");
        return;
    };
    assert_eq!(inputs.tensor("input_features").unwrap().shape, [expected.len(), 128, longest], "{note}");
    let mask = ints(inputs, "feature_attention_mask");
    let clips = floats(inputs, "input_features").chunks(128 * longest).zip(mask.chunks(longest));
    for ((values, mask), (frames, expected)) in clips.zip(lengths.iter().zip(&expected)) {
        let frames = *frames;
        assert!((0..longest).all(|frame| mask[frame] == i64::from(frame < frames)), "{note}");
        let own: Vec<f32> = values.chunks(longest).flat_map(|row| row[..frames].to_vec()).collect();
        let expected_samples: Vec<f32> = numbers(&expected["samples"]);
        for (made, expected) in samples(&own, expected_samples.len()).iter().zip(expected_samples) {
            assert!(f64::from((made - expected).abs()) <= MEL_APART[0], "{note}: {made} for {expected}");
        }
        for (row, expected) in own.chunks(frames).zip(numbers::<Vec<f64>>(&expected["means"])) {
            let mean = row.iter().map(|value| f64::from(*value)).sum::<f64>() / frames as f64;
            assert!((mean - expected).abs() <= MEL_APART[1], "{note}: mean {mean} for {expected}");
        }
    }
}

#[test]
fn inputs_are_those_of_the_processor_and_of_the_plan() {
    FAMILIES.iter().for_each(check_family);
}

fn check_family(family: &Family) {
    let recorded = family.recorded();
    let builder = || family.builder();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    let template = recorded["template"].as_str().unwrap().replace("{% generation %}", "");
    let template = template.replace("{% endgeneration %}", "");
    let preparers = [builder().build().unwrap(), builder().chat_template(template).build().unwrap()];
    let spec = family.spec();
    for (number, case) in cases.iter().enumerate() {
        let (sample, shape) = sample(case);
        for (preparer, form) in preparers.iter().zip(["built in", "recorded"]) {
            let note = format!("{} case {number}, template {form}", family.name);
            let prepared = preparer.prepare(&sample).unwrap_or_else(|error| panic!("{note}: {error}"));
            let inputs = preparer.pack(vec![prepared.clone()]).unwrap();
            assert_eq!(ints(&inputs, "input_ids"), flat(&case["input_ids"]), "{note}");
            assert_eq!(ints(&inputs, "labels"), flat(&case["labels"]), "{note}");
            for name in ["image_grid_thw", "video_grid_thw"] {
                let expected = case.get(name).map(numbers::<Vec<[i64; 3]>>).unwrap_or_default();
                assert_eq!(ints(&inputs, name), expected.concat(), "{note}: {name}");
            }
            let seconds: Vec<f32> = case.get("video_second_per_grid").map(numbers).unwrap_or_default();
            assert_eq!(floats(&inputs, "video_second_per_grid"), seconds, "{note}");
            assert!(inputs.tensor("mm_token_type_ids").is_none(), "{note}");
            check_positions(case, &inputs, &note);
            check_pixels(case, &inputs, family.deviation, &note);
            check_features(case, &inputs, &note);
            let text = preparer.text_counter();
            let counted = text.count(&sample).unwrap();
            let media: u64 = spec.encoders().map(|(_, _, rule)| rule.work(&shape).unwrap().tokens).sum();
            assert_eq!(u64::from(counted.tokens) + media, prepared.input_ids.len() as u64, "{note}");
        }
    }
}

/// A stage with only the language model has the same ids and positions without media tensors.
#[test]
fn media_that_are_only_counted_leave_the_text_as_it_is() {
    for family in &FAMILIES {
        let builders = [family.builder(), family.builder().counted_media()];
        let [made, counted] = builders.map(|builder| builder.build().unwrap());
        for case in family.recorded()["cases"].as_array().unwrap() {
            let (sample, _) = sample(case);
            let inputs = [&made, &counted].map(|preparer| {
                let prepared = preparer.prepare(&sample).unwrap();
                preparer.pack(vec![prepared]).unwrap()
            });
            for name in ["input_ids", "labels", "position_ids", "image_grid_thw", "video_grid_thw"] {
                assert_eq!(ints(&inputs[0], name), ints(&inputs[1], name), "{name}");
            }
            let media = ["input_features", "pixel_values"];
            assert!(media.iter().all(|name| inputs[1].tensor(name).is_none()));
        }
    }
}

#[test]
fn rows_of_a_padded_batch_have_no_kinds_of_tokens() {
    let layout = BatchLayout::Padded { side: PaddingSide::Right };
    for family in &FAMILIES {
        let preparer = family.builder().layout(layout).build().unwrap();
        let recorded = family.recorded();
        let cases = recorded["cases"].as_array().unwrap();
        let samples = cases.iter().map(|case| preparer.prepare(&sample(case).0).unwrap()).collect();
        let inputs = preparer.pack(samples).unwrap();
        assert!(inputs.tensor("mm_token_type_ids").is_none() && inputs.tensor("position_ids").is_none());
        assert_eq!(inputs.tensor("video_second_per_grid").unwrap().shape, [4]);
    }
}

/// A clip longer than the published five minutes continues in another spectrogram.
#[test]
fn a_clip_of_ten_minutes_has_two_spectrograms() {
    let processor = ClipProcessor { mels: 1, rule: AudioChunks::QWEN2_5_OMNI };
    let features = processor.clip(&clip(9_600_000, 3)).unwrap();
    assert_eq!((features.shape, features.tokens), (vec![2, 1, 30_000], 15_000));
}
