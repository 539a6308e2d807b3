//! Encodes small real media.

use std::io::Cursor;

use image::{ImageFormat, Rgb, RgbImage};

/// Encodes a JPEG with this size and a gradient that depends on `seed`.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn jpeg(width: u32, height: u32, seed: u32) -> Vec<u8> {
    image(width, height, seed, ImageFormat::Jpeg)
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
    RgbImage::from_fn(width, height, pixel)
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
    image(width, height, seed, ImageFormat::Png)
}

fn image(width: u32, height: u32, seed: u32, format: ImageFormat) -> Vec<u8> {
    let pixel =
        |x: u32, y: u32| Rgb([(x * 255 / width) as u8, (y * 255 / height) as u8, (seed * 37 % 256) as u8]);
    let mut bytes = Cursor::new(Vec::new());
    RgbImage::from_fn(width, height, pixel).write_to(&mut bytes, format).expect("memory can be written");
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
