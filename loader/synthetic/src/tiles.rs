//! Generates images for which only the size matters: one-color squares in brightness steps.

use std::io;

use jpeg_encoder::ColorType;

use crate::jpeg::encode_jpeg;
use crate::rng::Rng;

/// JPEG quality, up to 100.
const QUALITY: u8 = 85;

/// Generates an image with shaded squares as a JPEG file.
///
/// - `width`, `height`: in pixels, at least 1
///
/// # Errors
/// If a side is over 65,535 pixels.
pub fn tiles_jpeg(width: usize, height: usize, rng: &mut Rng) -> io::Result<Vec<u8>> {
    let base: [usize; 3] = [0; 3].map(|_| rng.below(200));
    let mut pixels = Vec::with_capacity(3 * width * height);
    for row in 0..height {
        for column in 0..width {
            let shade = 8 * (row / 8 + column / 8) % 56;
            pixels.extend(base.map(|color| (color + shade).min(255) as u8));
        }
    }
    encode_jpeg(&pixels, width, height, ColorType::Rgb, QUALITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_samples::media::{ImageLimits, decode_rgb};

    #[test]
    fn an_image_has_the_size_that_was_asked_for() {
        let file = tiles_jpeg(96, 40, &mut Rng::new(0, 0)).unwrap();
        let image = decode_rgb(&file, &ImageLimits::default()).unwrap();
        assert_eq!((image.width, image.height), (96, 40));
        assert!(tiles_jpeg(70_000, 1, &mut Rng::new(0, 0)).is_err(), "JPEG has 16 bits for a side");
    }
}
