//! Creates images that cost about as much to decode as photos.

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

use crate::random::Random;

/// JPEG quality, out of 100, at which the texture needs about as many bytes per pixel as photos.
const QUALITY: u8 = 80;
/// Pixels between the random texture values, and the amplitude of the values.
const OCTAVES: [(usize, f64); 3] = [(48, 60.0), (12, 24.0), (3, 12.0)];

/// Encodes a textured color gradient as a baseline JPEG, color at half the resolution.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let light = texture(width.into(), height.into());
    let shade = |position: usize, length: u16| 60.0 + 120.0 * position as f64 / f64::from(length);
    let mut pixels = Vec::with_capacity(3 * light.len());
    for (row, y) in light.chunks_exact(width.into()).zip(0..) {
        for (light, x) in row.iter().zip(0..) {
            let color = [shade(x, width), shade(y, height), 110.0];
            pixels.extend(color.map(|channel| (channel + light) as u8));
        }
    }
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, QUALITY);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    encoder.encode(&pixels, width, height, ColorType::Rgb).expect("the image has pixels");
    file
}

/// Sums octaves of random values, interpolated linearly along a row.
fn texture(width: usize, height: usize) -> Vec<f64> {
    let mut random = Random::new(31);
    let mut light = vec![0.0; width * height];
    for (cell, amplitude) in OCTAVES {
        let columns = width / cell + 2;
        let mut knots = Vec::new();
        for (y, row) in light.chunks_exact_mut(width).enumerate() {
            if y % cell == 0 {
                knots = (0..columns).map(|_| amplitude * (2.0 * random.fraction() - 1.0)).collect();
            }
            for (x, light) in row.iter_mut().enumerate() {
                let (knot, part) = (x / cell, (x % cell) as f64 / cell as f64);
                *light += knots[knot] * (1.0 - part) + knots[knot + 1] * part;
            }
        }
    }
    light
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::media::{ImageLimits, decode_rgb};

    #[test]
    fn images_decode_and_compress_as_photos_do() {
        let file = jpeg(587, 520);
        let image = decode_rgb(&file, &ImageLimits::default()).unwrap();
        assert_eq!((image.width, image.height), (587, 520));
        let bits_per_pixel = file.len() as f64 * 8.0 / (587.0 * 520.0);
        assert!((1.0..2.5).contains(&bits_per_pixel), "{bits_per_pixel} bits a pixel");
    }
}
