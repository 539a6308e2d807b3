//! Creates media by integer arithmetic, as `tests/record/processors.py` does, and reads the recorded results.

use dflop_loader::media::{Audio, RgbImage};
use serde_json::Value;

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
