//! Encodes small real media; creates media by integer arithmetic, as `tests/record/processors.py` does, and
//! reads the recorded results.

use std::io::Cursor;

use dflop_loader::media::{Audio, RgbImage};
use image::{ImageFormat, Rgb};
use serde_json::Value;

/// Encodes a JPEG with this size and a gradient that depends on `seed`.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn jpeg(width: u32, height: u32, seed: u32) -> Vec<u8> {
    gradient(width, height, seed, ImageFormat::Jpeg)
}

/// Encodes a JPEG with this size that does not compress well: the gradient with noise.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn noisy_jpeg(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let noise = |x: u32, y: u32| {
        let mixed = (x ^ (y << 12) ^ seed.wrapping_mul(0x9E37)).wrapping_mul(0x85EB_CA6B);
        ((mixed ^ (mixed >> 13)).wrapping_mul(0xC2B2_AE35) >> 26) as u8
    };
    let pixel = |x: u32, y: u32| {
        let gray = noise(x, y);
        Rgb([(x * 190 / width) as u8 + gray, (y * 190 / height) as u8 + gray, (seed * 37 % 190) as u8 + gray])
    };
    let mut bytes = Cursor::new(Vec::new());
    image::RgbImage::from_fn(width, height, pixel)
        .write_to(&mut bytes, ImageFormat::Jpeg)
        .expect("memory can be written");
    bytes.into_inner()
}

/// Encodes a PNG with this size and the same gradient.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn png(width: u32, height: u32, seed: u32) -> Vec<u8> {
    gradient(width, height, seed, ImageFormat::Png)
}

/// Encodes a color gradient.
fn gradient(width: u32, height: u32, seed: u32, format: ImageFormat) -> Vec<u8> {
    let pixel =
        |x: u32, y: u32| Rgb([(x * 255 / width) as u8, (y * 255 / height) as u8, (seed * 37 % 256) as u8]);
    let mut bytes = Cursor::new(Vec::new());
    image::RgbImage::from_fn(width, height, pixel)
        .write_to(&mut bytes, format)
        .expect("memory can be written");
    bytes.into_inner()
}

/// Encodes a tone as a mono 16-bit WAV.
///
/// # Panics
/// Never: writes to memory succeed.
#[must_use]
pub fn wav(frames: u32, sample_rate_hz: u32) -> Vec<u8> {
    let spec = hound::WavSpec {
        channels: 1,
        sample_rate: sample_rate_hz,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut bytes = Cursor::new(Vec::new());
    let mut writer = hound::WavWriter::new(&mut bytes, spec).expect("memory can be written");
    for frame in 0..frames {
        let phase = f64::from(frame) * 440.0 / f64::from(sample_rate_hz) * std::f64::consts::TAU;
        writer.write_sample((phase.sin() * 8_000.0) as i16).expect("memory can be written");
    }
    writer.finalize().expect("memory can be written");
    bytes.into_inner()
}

/// Reads a file with recorded cases.
///
/// # Panics
/// If the file is missing or not JSON.
#[must_use]
pub fn recorded(name: &str) -> Value {
    let path = format!("{}/golden/processors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).expect("recorded cases are JSON")
}

/// Hashes 32 bits to 32 bits.
#[must_use]
pub const fn mix(mut value: u32) -> u32 {
    value = (value ^ (value >> 15)).wrapping_mul(0x2C1B_3C6D);
    value = (value ^ (value >> 12)).wrapping_mul(0x297A_2D39);
    value ^ (value >> 15)
}

/// Draws an image: red grows to the right, green downwards, blue is a chessboard with 16-pixel squares; a
/// quarter is noise.
#[must_use]
pub fn image(width: u32, height: u32, seed: u32) -> RgbImage {
    let mut pixels = Vec::with_capacity(3 * width as usize * height as usize);
    for y in 0..height {
        for x in 0..width {
            let plain =
                [x * 255 / (width - 1).max(1), y * 255 / (height - 1).max(1), (x / 16 + y / 16) % 2 * 255];
            for (channel, value) in (0_u32..).zip(plain) {
                let key = x
                    .wrapping_mul(0x9E37_79B1)
                    .wrapping_add(y.wrapping_mul(0x85EB_CA77))
                    .wrapping_add(channel.wrapping_mul(0xC2B2_AE3D))
                    .wrapping_add(seed.wrapping_mul(0x27D4_EB2F));
                pixels.push(((3 * value + (mix(key) & 255)) >> 2) as u8);
            }
        }
    }
    RgbImage { width, height, pixels, is_truncated: false }
}

/// Creates a rising triangle wave with an eighth of noise, mono at 16 kHz.
#[must_use]
pub fn chirp(samples: u32, seed: u32) -> Audio {
    let sample = |index: u32| {
        let wide = u64::from(index);
        let phase = wide * 11_000_000 + wide * (wide + 1) / 2 * u64::from(7 + seed);
        let triangle = ((i64::from(phase as u32 >> 16)) - 32_768).abs() * 2 - 32_768;
        let noise = i64::from(mix(index.wrapping_add(seed * 7_919)) >> 16) - 32_768;
        (triangle * 7 + noise) as f32 / 262_144.0
    };
    clip((0..samples).map(sample).collect(), 16_000)
}

/// Creates five tones below 3.5 kHz, faded in and out over 50 ms.
#[must_use]
pub fn tones(samples: u32, sample_rate_hz: u32) -> Audio {
    let rate = f64::from(sample_rate_hz);
    let length = f64::from(samples) / rate;
    let sample = |index: u32| {
        let time = f64::from(index) / rate;
        let fade = (time.min(length - time) / 0.05).clamp(0.0, 1.0);
        let envelope = 0.5 - 0.5 * (std::f64::consts::PI * fade).cos();
        let tone = |hertz: f64| 0.15 * (std::f64::consts::TAU * hertz * time).sin();
        (envelope * [220.0, 437.0, 1_009.0, 2_003.0, 3_301.0].map(tone).iter().sum::<f64>()) as f32
    };
    clip((0..samples).map(sample).collect(), sample_rate_hz)
}

/// Creates silence, mono at 16 kHz.
#[must_use]
pub fn silence(samples: u32) -> Audio {
    clip(vec![0.0; samples as usize], 16_000)
}

fn clip(samples: Vec<f32>, sample_rate_hz: u32) -> Audio {
    Audio { sample_rate_hz, channels: 1, samples, is_truncated: false }
}
