//! Compares videos as model inputs with the Hugging Face processors, and with the plans.
//!
//! Tests create the frames themselves. `tests/record/videos.py` recorded the truth and documents how.

use std::path::{Path, PathBuf};

use dflop_costmodel::tokens::dynamic_tiles::label_tokens;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape, VideoShape};
use dflop_loader::inputs::{ModelInputs, PrepareError, PreparedSample, TensorValues};
use dflop_loader::media::{Media, Video};
use dflop_loader::processors::{Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::sample::{BatchLayout, Field, PaddingSide, Sample};
use dflop_tests::media::image;
use serde_json::{Value, json};

use super::processors::{numbers, samples};

/// Maximum pixel difference. The video processors resize with torch, in bytes, and not with Pillow: recorded
/// pixels differ by at most two out of 255 steps, in one value out of two hundred; divided by the smallest
/// color deviation.
const PIXELS_APART: f32 = 2.01 / 255.0 / 0.224;
/// Models with a vision encoder, each with a different video format.
const SEEING: [&str; 4] = ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-ov-qwen2.5-7b", "internvl3-8b"];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs")
}

fn builder(family: &str) -> PreparerBuilder {
    let tokenizer = Tokenizer::open(golden().join("chatml")).unwrap();
    Preparer::builder(&ModelSpec::preset(family).unwrap()).tokenizer(tokenizer)
}

fn preparer(family: &str) -> Preparer {
    builder(family).build().unwrap()
}

fn field(extension: &str, media: Media) -> Field {
    Field { extension: extension.into(), media }
}

/// Creates frames with the recorded pattern, at this many per second.
fn video(frames: u32, width: u32, height: u32, seed: u32, frames_per_second: f64) -> Video {
    Video {
        width,
        height,
        times_seconds: (0..frames).map(|frame| f64::from(frame) / frames_per_second).collect(),
        frames_per_second,
        pixels: (0..frames).flat_map(|frame| image(width, height, seed + frame).pixels).collect(),
    }
}

fn prepare(preparer: &Preparer, fields: Vec<Field>) -> Result<PreparedSample, PrepareError> {
    preparer.prepare(&Sample::new("key", fields))
}

fn refusal(preparer: &Preparer, fields: Vec<Field>) -> String {
    let error = prepare(preparer, fields).unwrap_err();
    let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
    causes.fold(error.to_string(), |reason, cause| format!("{reason}: {cause}"))
}

fn asked(value: &str) -> Field {
    let turns = json!([{"from": "human", "value": value}, {"from": "gpt", "value": "yes"}]);
    field("json", Media::Json(json!({"conversations": turns})))
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

/// Expands the run lengths in the record.
fn flat(values: &Value) -> Vec<i64> {
    let run = |value: &Value| match value {
        Value::Array(run) => vec![run[0].as_i64().unwrap(); run[1].as_u64().unwrap() as usize],
        value => vec![value.as_i64().unwrap()],
    };
    values.as_array().unwrap().iter().flat_map(run).collect()
}

/// Returns the sample for a recorded case, as the decoders deliver it.
fn recorded_sample(case: &Value) -> Vec<Field> {
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap() as u32;
    let mut fields = vec![field("json", Media::Json(case["json"].clone()))];
    for (at, of) in case["images"].as_array().unwrap().iter().enumerate() {
        let [width, height, seed] = ["width", "height", "seed"].map(|name| number(of, name));
        fields.push(field(&format!("{at}.png"), Media::Image(image(width, height, seed))));
    }
    for (at, of) in case["videos"].as_array().unwrap().iter().enumerate() {
        let [frames, width, height, seed] =
            ["frames", "width", "height", "seed"].map(|name| number(of, name));
        let made = video(frames, width, height, seed, of["fps"].as_f64().unwrap());
        fields.push(field(&format!("{at}.mp4"), Media::Video(made)));
    }
    fields
}

fn check_positions(case: &Value, inputs: &ModelInputs, note: &str) {
    let positions = ints(inputs, "position_ids");
    let tokens = positions.len() / 4;
    let axes: Vec<&[i64]> = positions.chunks(tokens).skip(1).collect();
    for (axis, sums) in axes.iter().zip(numbers::<Vec<[i64; 3]>>(&case["position_sums"])) {
        assert_eq!([axis.iter().sum(), *axis.iter().max().unwrap(), axis[tokens - 1]], sums, "{note}");
    }
    if let Some(exact) = case.get("positions") {
        assert_eq!(axes, numbers::<Vec<Vec<i64>>>(exact), "{note}");
    }
}

/// Returns the largest difference from recorded pixels: torch resizes differently from Pillow, by steps of
/// 1/255.
fn pixel_difference(case: &Value, inputs: &ModelInputs, note: &str) -> f32 {
    let name = if case.get("pixel_values").is_some() { "pixel_values" } else { "pixel_values_videos" };
    let expected: Vec<f32> = numbers(&case[name]["samples"]);
    assert_eq!(inputs.tensor(name).unwrap().shape, numbers::<Vec<usize>>(&case[name]["shape"]), "{note}");
    let made = samples(floats(inputs, name), expected.len());
    made.iter().zip(&expected).map(|(made, expected)| (made - expected).abs()).fold(0.0, f32::max)
}

#[test]
fn ids_labels_grids_times_and_positions_are_those_of_the_processors() {
    let recorded: Value =
        serde_json::from_slice(&std::fs::read(golden().join("videos.json")).unwrap()).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for (number, case) in cases.iter().enumerate() {
        let family = case["family"].as_str().unwrap();
        let note = format!("case {number} of {family}");
        let preparer = preparer(family);
        let prepared = prepare(&preparer, recorded_sample(case));
        let inputs = preparer.pack(vec![prepared.unwrap_or_else(|error| panic!("{note}: {error}"))]).unwrap();
        assert_eq!(ints(&inputs, "input_ids"), flat(&case["input_ids"]), "{note}");
        assert_eq!(ints(&inputs, "labels"), flat(&case["labels"]), "{note}");
        for name in ["image_grid_thw", "video_grid_thw"] {
            let expected = case.get(name).map(numbers::<Vec<[i64; 3]>>).unwrap_or_default();
            assert_eq!(ints(&inputs, name), expected.concat(), "{note}: {name}");
        }
        let seconds: Vec<f32> = case.get("second_per_grid_ts").map(numbers).unwrap_or_default();
        assert_eq!(floats(&inputs, "second_per_grid_ts"), seconds, "{note}");
        assert_eq!(seconds.is_empty(), family != "qwen2.5-vl-7b", "{note}");
        if family.starts_with("qwen") {
            check_positions(case, &inputs, &note);
        }
        let difference = pixel_difference(case, &inputs, &note);
        assert!(difference <= PIXELS_APART, "{note}: pixels differ by {difference}");
    }
}

/// Compares the planned tokens for a sample with one video with the tokens in the prepared sample.
///
/// Frame labels are planned as the tokenizers in the released checkpoints write them; the small test
/// tokenizer has fewer words.
#[test]
fn a_video_has_as_many_tokens_as_were_planned() {
    for family in SEEING {
        let preparer = preparer(family);
        let costs = CostModel::new(ModelSpec::preset(family).unwrap(), DeviceRate::preset("cpu").unwrap());
        for (frames, width, height) in [(1, 60, 40), (2, 40, 60), (5, 64, 64), (12, 200, 120), (35, 30, 30)] {
            let shape = VideoShape { frames, width, height };
            let planned = SampleShape { videos: vec![shape; 2], ..SampleShape::default() };
            let planned = costs.predict(&planned).unwrap().tokens as usize;
            let media = || Media::Video(video(frames, width, height, 1, 2.0));
            let sample = prepare(&preparer, vec![field("0.mp4", media()), field("1.mp4", media())]).unwrap();
            let taken = if family == "internvl3-8b" { frames.min(32) } else { 0 };
            let labels: Vec<String> =
                (1..=taken).map(|frame| format!("Frame{frame}: <IMG_CONTEXT>")).collect();
            let labels = preparer.tokenizer().encode(&labels.join("\n"), false).unwrap().ids.len();
            let known = 2 * label_tokens(u64::from(taken)) as usize;
            let written = 2 * (labels - taken as usize);
            assert_eq!(sample.tokens() + known, planned + written, "{family} {shape:?}");
        }
    }
}

#[test]
fn tensors_of_videos_hold_every_video_of_a_microbatch() {
    for family in SEEING {
        let preparer = preparer(family);
        let sample = |videos: &[(u32, u32, u32)]| {
            let fields = videos.iter().enumerate().map(|(at, &(frames, width, height))| {
                field(&format!("{at}.mp4"), Media::Video(video(frames, width, height, at as u32, 1.0)))
            });
            prepare(&preparer, [vec![asked("what?")], fields.collect()].concat()).unwrap()
        };
        let made = vec![sample(&[(2, 60, 40), (4, 40, 60)]), sample(&[]), sample(&[(3, 56, 56)])];
        let inputs = preparer.pack(made).unwrap();
        let shape = |name| inputs.tensor(name).map(|tensor| tensor.shape.clone()).unwrap_or_default();
        match family {
            "internvl3-8b" => {
                assert_eq!(shape("pixel_values"), [9, 3, 448, 448]);
                assert!(inputs.tensor("pixel_values_videos").is_none());
            }
            "llava-ov-qwen2.5-7b" => {
                assert_eq!(shape("pixel_values_videos"), [3, 4, 3, 384, 384]);
                assert_eq!(ints(&inputs, "num_video_frames"), [2, 4, 3]);
                let values = floats(&inputs, "pixel_values_videos");
                let (first, padding) = values[..values.len() / 3].split_at(values.len() / 6);
                assert!(first.iter().any(|value| *value != 0.0) && padding.iter().all(|value| *value == 0.0));
            }
            _ => {
                let grids = ints(&inputs, "video_grid_thw");
                assert_eq!(grids.iter().step_by(3).copied().collect::<Vec<_>>(), [1, 2, 2], "{family}");
                let patches: i64 = grids.chunks(3).map(|grid| grid.iter().product::<i64>()).sum();
                assert_eq!(shape("pixel_values_videos"), [patches as usize, 1_176]);
                let types = ints(&inputs, "mm_token_type_ids");
                assert_eq!(types.iter().filter(|&&kind| kind == 2).count() as i64, patches / 4);
                let seconds: &[f32] = if family == "qwen2.5-vl-7b" { &[2.0; 3] } else { &[] };
                assert_eq!(floats(&inputs, "second_per_grid_ts"), seconds);
            }
        }
    }
}

/// Checks the token positions in time, row and column for a two-layer video after three words.
#[test]
fn times_of_layers_are_their_positions() {
    for (family, per_second, expected) in [
        ("qwen2-vl-7b", 1.0, 1),
        ("qwen2.5-vl-7b", 1.0, 4),
        ("qwen2.5-vl-7b", 2.0, 2),
        ("qwen2.5-vl-7b", 0.4, 10),
        ("qwen2.5-vl-7b", 4.0, 1),
        ("qwen2.5-vl-7b", 0.8, 5),
    ] {
        let preparer = preparer(family);
        let made = field("mp4", Media::Video(video(4, 56, 56, 0, per_second)));
        let prepared = prepare(&preparer, vec![asked("what?"), made]).unwrap();
        let run = prepared.runs[0].clone();
        let inputs = preparer.pack(vec![prepared]).unwrap();
        let positions = ints(&inputs, "position_ids");
        let axes: Vec<&[i64]> = positions.chunks(positions.len() / 4).skip(1).collect();
        let (first, last) = (run.start, run.start + run.tokens - 1);
        assert_eq!(axes[0][last] - axes[0][first], expected, "{family} at {per_second}");
        let highest = axes.iter().map(|axis| axis[first..=last].iter().max().unwrap()).max().unwrap();
        assert_eq!(axes.iter().map(|axis| axis[last + 1]).collect::<Vec<_>>(), [highest + 1; 3]);
    }
}

#[test]
fn counted_videos_give_the_same_ids_and_grids_without_pixels() {
    let layouts = [BatchLayout::Packed, BatchLayout::Padded { side: PaddingSide::Right }];
    for (family, layout) in SEEING.into_iter().flat_map(|family| layouts.map(|layout| (family, layout))) {
        let fields = || {
            let videos = [(3, 60, 40), (3, 40, 60)].map(|(frames, width, height)| {
                field(&format!("{width}.mp4"), Media::Video(video(frames, width, height, 9, 2.0)))
            });
            let still = field("png", Media::Image(image(50, 70, 3)));
            [vec![asked("<video> or <image> or <video>?"), still], videos.to_vec()].concat()
        };
        let inputs = |builder: PreparerBuilder| {
            let preparer = builder.layout(layout).build().unwrap();
            let sample = prepare(&preparer, fields()).unwrap();
            let bytes = preparer.tensor_bytes(&SampleShape {
                videos: vec![
                    VideoShape { frames: 3, width: 60, height: 40 },
                    VideoShape { frames: 3, width: 40, height: 60 },
                ],
                images: vec![dflop_costmodel::ImageSize { width: 50, height: 70 }],
                ..SampleShape::default()
            });
            (preparer.pack(vec![sample]).unwrap(), bytes)
        };
        let (made, made_bytes) = inputs(builder(family));
        let (counted, counted_bytes) = inputs(builder(family).counted_media());
        let is_pixels = |name: &str| name.starts_with("pixel_values");
        let kept: Vec<_> = made.tensors.iter().filter(|tensor| !is_pixels(tensor.name)).cloned().collect();
        assert_eq!(counted.tensors, kept, "{family}");
        let pixels = made.tensors.iter().filter(|tensor| is_pixels(tensor.name));
        let pixels: u64 = pixels.map(|tensor| 4 * tensor.values.len() as u64).sum();
        assert_eq!((made_bytes, counted_bytes), (pixels, 0), "{family}");
    }
}

#[test]
fn frames_and_images_of_one_sample_keep_the_order_of_the_text() {
    let preparer = preparer("internvl3-8b");
    let red = dflop_loader::media::RgbImage {
        width: 448,
        height: 448,
        pixels: [255, 0, 0].repeat(448 * 448),
        is_truncated: false,
    };
    let black = Video {
        width: 8,
        height: 8,
        times_seconds: vec![0.0, 1.0],
        frames_per_second: 1.0,
        pixels: vec![0; 2 * 192],
    };
    let fields = vec![
        asked("<video>\nthen <image>"),
        field("png", Media::Image(red)),
        field("mp4", Media::Video(black)),
    ];
    let prepared = prepare(&preparer, fields).unwrap();
    let said = preparer.decode(&prepared.input_ids).unwrap();
    let tile = format!("<img>{}</img>", "<IMG_CONTEXT>".repeat(256));
    assert!(said.contains(&format!("Frame1: {tile}\nFrame2: {tile}\nthen {tile}\n")), "{said}");
    let inputs = preparer.pack(vec![prepared]).unwrap();
    let values = floats(&inputs, "pixel_values");
    let firsts: Vec<bool> = values.chunks(3 * 448 * 448).map(|tile| tile[0] > 0.0).collect();
    assert_eq!(firsts, [false, false, true]);
}

#[test]
fn a_caption_is_learned_behind_its_video() {
    for family in SEEING {
        let preparer = preparer(family);
        let fields = vec![
            field("mp4", Media::Video(video(2, 56, 56, 0, 1.0))),
            field("txt", Media::Text("a kite".into())),
        ];
        let prepared = prepare(&preparer, fields).unwrap();
        let learned: Vec<u32> = prepared.labels.iter().filter(|&&id| id >= 0).map(|&id| id as u32).collect();
        assert_eq!(preparer.decode(&learned).unwrap(), "a kite<|im_end|>", "{family}");
    }
}

#[test]
fn videos_that_cannot_be_taken_are_refused_with_their_field() {
    for family in SEEING {
        let preparer = preparer(family);
        let stored = || field("mp4", Media::Opaque("not read".into()));
        let error = prepare(&preparer, vec![asked("what?"), stored()]).unwrap_err();
        assert_eq!(error.field(), Some("mp4"), "{family}");
        let reason = refusal(&preparer, vec![asked("what?"), stored()]);
        assert!(reason.contains("the video is not decoded"), "{reason}");
        assert_eq!(reason.contains("feature `video`"), cfg!(not(feature = "video")), "{reason}");
        let empty = field("mp4", Media::Video(Video::default()));
        assert!(refusal(&preparer, vec![empty]).contains("no frames"));
        let made = || field("0.mp4", Media::Video(video(1, 56, 56, 0, 1.0)));
        let reason = refusal(&preparer, vec![asked("<video><video>"), made()]);
        assert_eq!(reason, "2 video placeholders for 1 videos");
    }
    let deaf =
        prepare(&preparer("qwen2-audio-7b"), vec![asked("what?"), field("mp4", Media::Opaque("".into()))]);
    assert!(deaf.is_ok(), "a model without vision ignores videos");
}

#[test]
fn a_vocabulary_without_the_placeholder_takes_images_and_refuses_videos() {
    let text = std::fs::read(golden().join("chatml/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    json["added_tokens"].as_array_mut().unwrap().retain(|token| token["content"] != "<|video_pad|>");
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    let preparer = Preparer::builder(&ModelSpec::preset("qwen2-vl-7b").unwrap()).tokenizer(tokenizer);
    let preparer = preparer.build().unwrap();
    assert!(prepare(&preparer, vec![asked("what?"), field("png", Media::Image(image(56, 56, 0)))]).is_ok());
    let made = field("mp4", Media::Video(video(1, 56, 56, 0, 1.0)));
    let reason = refusal(&preparer, vec![asked("what?"), made]);
    assert!(reason.contains("the vocabulary has no `<|video_pad|>`"), "{reason}");
}
