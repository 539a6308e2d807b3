//! Compares image, video and audio clip tensors with recordings from the Hugging Face processors.

use dflop_costmodel::{ImageSize, ModelSpec};
use dflop_loader::inputs::PixelValues;
use dflop_loader::media::RgbImage;
use dflop_loader::processors::audio::{AudioProcessor, LongClips};
use dflop_loader::processors::image::ImageProcessor;
use dflop_tests::media::{chirp, image, mix, recorded, silence, tones};
use proptest::prelude::*;
use serde_json::Value;

pub(crate) fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).expect("recorded numbers")
}

/// Computes a checksum over the bits in all values, weighted by position.
pub(crate) fn checksum(values: &[f32]) -> String {
    let weigh = |(index, value): (u64, &f32)| u64::from(value.to_bits()).wrapping_mul(2 * index + 1);
    format!("{:016x}", (0..).zip(values).map(weigh).fold(0, u64::wrapping_add))
}

pub(crate) fn samples(values: &[f32], count: usize) -> Vec<f32> {
    (0..count as u32).map(|sample| values[mix(sample) as usize % values.len()]).collect()
}

/// Compares integers and single values first, because differences are easier to read than a checksum
/// mismatch.
fn assert_made(made: &PixelValues, expected: &Value, case: &str) {
    assert_eq!(made.shape, numbers::<Vec<usize>>(&expected["shape"]), "{case}");
    assert_eq!(made.shape.iter().product::<usize>(), made.values.len(), "{case}");
    assert_eq!(made.grid_thw, numbers(&expected["grid_thw"]), "{case}");
    assert_eq!(made.image_size, numbers(&expected["image_size"]), "{case}");
    assert_eq!(u64::from(made.tokens), expected["tokens"], "{case}");
    let expected_samples: Vec<f32> = numbers(&expected["samples"]);
    assert_eq!(samples(made.values.f32(), expected_samples.len()), expected_samples, "{case}");
    assert_eq!(checksum(made.values.f32()), expected["checksum"], "{case}");
}

fn images(sizes: &Value, seed: u32) -> Vec<RgbImage> {
    let sizes: Vec<[u32; 2]> = numbers(sizes);
    sizes.iter().zip(seed..).map(|([width, height], seed)| image(*width, *height, seed)).collect()
}

/// Compares every recorded case for a processor that is built from the recorded configuration file.
fn assert_recorded(name: &str, cases_least: usize) {
    let recorded = recorded(name);
    let processor = ImageProcessor::from_preprocessor_config(&recorded["config"]).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(cases.len() >= cases_least, "{name} has {} cases", cases.len());
    for case in cases {
        let seed = numbers(&case["seed"]);
        let made = if case["images"].is_array() {
            processor.images(&images(&case["images"], seed)).unwrap()
        } else {
            vec![processor.video(&images(&case["frames"], seed)).unwrap()]
        };
        let expected = case["made"].as_array().unwrap();
        assert_eq!(made.len(), expected.len());
        for (made, expected) in made.iter().zip(expected) {
            let sizes = if case["images"].is_array() { &case["images"] } else { &case["frames"] };
            assert_made(made, expected, &format!("{name} {sizes}"));
        }
    }
}

#[test]
fn llava_onevision_is_recorded_to_the_bit() {
    assert_recorded("llava_onevision", 50);
}

#[test]
fn intern_vl_is_recorded_to_the_bit() {
    assert_recorded("intern_vl", 50);
}

#[test]
fn qwen_vl_is_recorded_to_the_bit() {
    assert_recorded("qwen_vl", 45);
    assert_recorded("qwen_vl_small", 5);
}

#[test]
fn clip_and_siglip_are_recorded_to_the_bit() {
    assert_recorded("clip", 45);
    assert_recorded("siglip", 45);
}

#[test]
fn other_filters_and_statistics_are_recorded_to_the_bit() {
    assert_recorded("clip_lanczos", 5);
    assert_recorded("siglip_bilinear", 5);
}

/// Log-mel values are between -1.5 and about 1.5; at 16 kHz only the last bits differ. Resampled tones have
/// the ripple of the resampler filter.
#[test]
fn log_mel_spectrograms_are_recorded() {
    let recorded = recorded("audio");
    let cases = recorded["cases"].as_array().unwrap();
    assert!(cases.len() >= 8);
    for case in cases {
        let [frames, rate, seed, mels] = ["samples", "rate", "seed", "mels"].map(|key| numbers(&case[key]));
        let clip = match case["kind"].as_str().unwrap() {
            "clip" => chirp(frames, seed),
            "silence" => silence(frames),
            _ => tones(frames, rate),
        };
        let (worst, mean_worst) = if rate == 16_000 { (1e-6, 1e-7) } else { (5e-4, 1e-5) };
        let processor = AudioProcessor { mels: mels as u16, long_clips: LongClips::Windows };
        let made = processor.clip(&clip).unwrap();
        let expected = case["made"].as_array().unwrap();
        let name = format!("{frames} samples at {rate} Hz");
        assert_eq!(made.shape, [expected.len(), mels as usize, 3_000], "{name}");
        let mut tokens = 0;
        let windows = made.values.chunks(mels as usize * 3_000).zip(made.attention_mask.chunks(3_000));
        for ((values, mask), expected) in windows.zip(expected) {
            let frames: usize = numbers(&expected["frames"]);
            assert!(mask[..frames].iter().all(|value| *value == 1), "{name}");
            assert!(mask[frames..].iter().all(|value| *value == 0), "{name}");
            tokens += numbers::<u32>(&expected["tokens"]);
            let expected_samples: Vec<f32> = numbers(&expected["samples"]);
            for (one, other) in samples(values, expected_samples.len()).iter().zip(&expected_samples) {
                assert!((one - other).abs() <= worst, "{name}: {one} for {other}");
            }
            let expected_means: Vec<f64> = numbers(&expected["means"]);
            for (row, expected) in values.chunks(3_000).zip(expected_means) {
                let mean = row.iter().map(|value| f64::from(*value)).sum::<f64>() / 3_000.0;
                assert!((mean - expected).abs() <= mean_worst, "{name}: mean {mean} for {expected}");
            }
        }
        assert_eq!(made.tokens, tokens, "{name}");
        let cut = AudioProcessor { long_clips: LongClips::CutOff, ..processor }.clip(&clip).unwrap();
        assert_eq!(cut.values, made.values[..cut.values.len()], "{name}");
        assert_eq!(u64::from(cut.tokens), expected[0]["tokens"], "{name}");
    }
}

/// Returns the tokens that the cost model adds for the markers around images.
fn marker_tokens(model: &ModelSpec, images: usize) -> u64 {
    u64::from(model.vision.unwrap().rule.marker_tokens()) * images as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn tokens_and_items_are_those_of_the_cost_model(
        preset in prop::sample::select(vec!["llava-ov-qwen2.5-7b", "internvl3-8b", "qwen2-vl-7b", "tiny"]),
        sizes in prop::collection::vec((1u32..1300, 1u32..1300), 1..4),
    ) {
        let model = ModelSpec::preset(preset).unwrap();
        let processor = ImageProcessor::for_model(&model).unwrap();
        let plain = |(width, height): &(u32, u32)| RgbImage {
            width: *width,
            height: *height,
            pixels: vec![77; 3 * (width * height) as usize],
            is_truncated: false,
        };
        let images: Vec<RgbImage> = sizes.iter().map(plain).collect();
        let shapes: Vec<ImageSize> =
            sizes.iter().map(|(width, height)| ImageSize { width: *width, height: *height }).collect();
        let work = model.vision.unwrap().rule.images(&shapes);
        let Ok(made) = processor.images(&images) else {
            prop_assert!(work.is_err());
            return Ok(());
        };
        let work = work.unwrap();
        let tokens: u64 = made.iter().map(|values| u64::from(values.tokens)).sum();
        prop_assert_eq!(tokens + marker_tokens(&model, images.len()), work.tokens);
        prop_assert_eq!(made.iter().map(|values| values.shape[0] as u64).sum::<u64>(), work.items);
    }
}

/// Prints token counts for `processors.py --compare`: `cargo test -p dflop-tests -- --ignored --nocapture
/// prints`.
#[test]
#[ignore = "prints lines for another program"]
#[expect(clippy::print_stdout, reason = "another program reads them")]
fn prints_token_counts_of_random_sizes() {
    for (preset, name) in [
        ("llava-ov-qwen2.5-7b", "llava_onevision"),
        ("internvl3-8b", "intern_vl"),
        ("qwen2-vl-7b", "qwen_vl"),
    ] {
        let model = ModelSpec::preset(preset).unwrap();
        for index in 0..2_000 {
            let length = |key: u32| 1 + mix(index * 2 + key) % (1 << (3 + mix(index * 2 + key + 9) % 11));
            let (width, height) = (length(0), length(1));
            let size = ImageSize { width, height };
            let work = model.vision.unwrap().rule.images(&[size]);
            let tokens = work.map_or(0, |work| work.tokens - marker_tokens(&model, 1));
            println!("{name} {width} {height} {tokens}");
        }
    }
}
