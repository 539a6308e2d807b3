//! Pictures to square, normalised tensors: the input of most vision encoders.
//!
//! Full decode, shorter side to the side of the square by antialiased bilinear resampling, centre crop, then
//! `(value / 255 - mean) / deviation` with the `ImageNet` statistics, channels first. Only the part of the
//! picture that survives the crop is resampled; a turned picture is turned as a square, after the resampling.

use std::num::NonZeroU32;

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use image::metadata::Orientation;

use super::DecodeError;
use super::image::{RgbImage, decode_stored_into};
use super::limits::ImageLimits;

/// Mean of the `ImageNet` pixels: red, green, blue, on a scale of 0 to 1.
pub const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// Standard deviation of the `ImageNet` pixels: red, green, blue, on a scale of 0 to 1.
pub const IMAGENET_DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// Decodes pictures to `[3, side, side]` tensors; keeps its buffers, so each worker thread has one of its
/// own.
#[derive(Debug)]
pub struct Rgb224 {
    side: NonZeroU32,
    limits: ImageLimits,
    resizer: Resizer,
    stored: RgbImage,
    square: Vec<U8x3>,
    turned: Vec<U8x3>,
    tables: Box<[[f32; 256]; 3]>,
}

impl Rgb224 {
    /// Makes a decoder to 224 x 224.
    #[must_use]
    pub fn new(limits: ImageLimits) -> Self {
        const SIDE: NonZeroU32 = NonZeroU32::new(224).unwrap();
        Self::with_side(SIDE, limits)
    }

    /// Makes a decoder to `side` x `side` pixels.
    #[must_use]
    pub fn with_side(side: NonZeroU32, limits: ImageLimits) -> Self {
        let pixels = side.get() as usize * side.get() as usize;
        Self {
            side,
            limits,
            resizer: Resizer::new(),
            stored: RgbImage::default(),
            square: vec![U8x3::default(); pixels],
            turned: Vec::new(),
            tables: Box::new(normalisation_tables()),
        }
    }

    /// Returns the number of values of one tensor: `3 * side * side`.
    #[must_use]
    pub fn values(&self) -> usize {
        3 * self.square.len()
    }

    /// Decodes one picture.
    ///
    /// - `out`: `[3, side, side]` f32, overwritten: red, green, blue plane; rows from top to bottom
    /// - returns whether the file was truncated, which only lenient limits let pass
    ///
    /// # Errors
    /// As [`decode_rgb`](super::decode_rgb); `out` is then untouched.
    ///
    /// # Panics
    /// If `out` does not have [`values`](Self::values) elements.
    pub fn decode_into(&mut self, bytes: &[u8], out: &mut [f32]) -> Result<bool, DecodeError> {
        assert_eq!(out.len(), self.values(), "the output holds one square");
        let orientation = decode_stored_into(bytes, &self.limits, &mut self.stored)?;
        self.resample()?;
        let square = if orientation == Orientation::NoTransforms {
            &self.square
        } else {
            turn_square(&self.square, self.side.get() as usize, orientation, &mut self.turned);
            &self.turned
        };
        for ((plane, table), channel) in out.chunks_exact_mut(square.len()).zip(self.tables.iter()).zip(0..) {
            normalise(square, channel, table, plane);
        }
        Ok(self.stored.is_truncated)
    }

    fn resample(&mut self) -> Result<(), DecodeError> {
        let refusal = |error: &dyn std::fmt::Display| DecodeError::codec("picture", error.to_string());
        let (width, height) = (self.stored.width, self.stored.height);
        let side = self.side.get();
        let source = TypedImageRef::<U8x3>::from_buffer(width, height, &self.stored.pixels)
            .map_err(|error| refusal(&error))?;
        let mut target =
            TypedImage::from_pixels_slice(side, side, &mut self.square).map_err(|error| refusal(&error))?;
        let [left, top, box_width, box_height] = crop_box(width, height, side);
        let options = ResizeOptions::new()
            .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
            .crop(left, top, box_width, box_height);
        self.resizer.resize_typed(&source, &mut target, &options).map_err(|error| refusal(&error))
    }
}

/// Returns left, top, width and height of the part of the picture that becomes the square.
///
/// The picture would be resized to whole pixels with the shorter side at `side`, then cropped around its
/// centre.
fn crop_box(width: u32, height: u32, side: u32) -> [f64; 4] {
    let scale = f64::from(side) / f64::from(width.min(height));
    let [(left, box_width), (top, box_height)] = [width, height].map(|length| {
        let length = f64::from(length);
        let resized = (length * scale).round_ties_even().max(f64::from(side));
        let margin = (resized - f64::from(side)) / 2.0;
        let start = margin / resized * length;
        let end = ((margin + f64::from(side)) / resized * length).min(length);
        (start, end - start)
    });
    [left, top, box_width, box_height]
}

fn normalisation_tables() -> [[f32; 256]; 3] {
    std::array::from_fn(|channel| {
        let scale = 1.0 / (255.0 * IMAGENET_DEVIATION[channel]);
        let bias = -IMAGENET_MEAN[channel] / IMAGENET_DEVIATION[channel];
        std::array::from_fn(|value| value as f32 * scale + bias)
    })
}

fn normalise(square: &[U8x3], channel: usize, table: &[f32; 256], plane: &mut [f32]) {
    for (value, pixel) in plane.iter_mut().zip(square) {
        *value = table[usize::from(pixel.0[channel])];
    }
}

/// Turns a square picture of `side` x `side` pixels into `turned`.
fn turn_square(square: &[U8x3], side: usize, orientation: Orientation, turned: &mut Vec<U8x3>) {
    let last = side - 1;
    turned.clear();
    for y in 0..side {
        turned.extend((0..side).map(|x| {
            let (row, column) = match orientation {
                Orientation::NoTransforms => (y, x),
                Orientation::FlipHorizontal => (y, last - x),
                Orientation::Rotate180 => (last - y, last - x),
                Orientation::FlipVertical => (last - y, x),
                Orientation::Rotate90 => (last - x, y),
                Orientation::Rotate270 => (x, last - y),
                Orientation::Rotate90FlipH => (x, y),
                Orientation::Rotate270FlipH => (last - x, last - y),
            };
            square[row * side + column]
        }));
    }
}

#[cfg(test)]
mod tests {
    use image::ImageFormat as Encoding;

    use super::*;
    use crate::decode::fixtures::{encode, exif_body, gradient, with_segment};

    fn square_of(bytes: &[u8]) -> Vec<f32> {
        let mut kernel = Rgb224::new(ImageLimits::default());
        let mut out = vec![f32::NAN; kernel.values()];
        assert!(!kernel.decode_into(bytes, &mut out).unwrap());
        out
    }

    fn normalised(value: u8, channel: usize) -> f32 {
        (f32::from(value) / 255.0 - IMAGENET_MEAN[channel]) / IMAGENET_DEVIATION[channel]
    }

    #[test]
    fn picture_of_the_right_size_is_only_normalised() {
        let picture = gradient(224, 224);
        let out = square_of(&encode(picture.clone(), Encoding::Png));
        for (channel, plane) in out.chunks(224 * 224).enumerate() {
            for (actual, pixel) in plane.iter().zip(picture.pixels()) {
                assert!((actual - normalised(pixel.0[channel], channel)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn crop_keeps_the_centre_of_the_longer_side() {
        for (width, height) in [(448, 224), (224, 448), (3, 1000), (1, 1), (301, 299)] {
            let out = square_of(&encode(gradient(width, height), Encoding::Png));
            let plane_mean = |channel: usize| {
                let plane = &out[channel * 224 * 224..(channel + 1) * 224 * 224];
                plane.iter().sum::<f32>() / plane.len() as f32
            };
            assert!((plane_mean(2) - normalised(128, 2)).abs() < 0.01);
            if width > 1 {
                assert!((plane_mean(0) - normalised(127, 0)).abs() < 0.05, "{width} x {height}");
            }
        }
        assert_eq!(crop_box(448, 224, 224).map(|length| length as u32), [112, 0, 224, 224]);
    }

    #[test]
    fn turned_pictures_equal_pictures_that_were_stored_turned() {
        let plain = encode(gradient(300, 260), Encoding::Jpeg);
        for value in 1..=8 {
            let file = with_segment(&plain, 0xE1, &exif_body(value));
            let shown = crate::decode::decode_rgb(&file, &ImageLimits::default()).unwrap();
            let shown = image::RgbImage::from_raw(shown.width, shown.height, shown.pixels).unwrap();
            let expected = square_of(&encode(shown, Encoding::Png));
            for (actual, expected) in square_of(&file).iter().zip(&expected) {
                assert!((actual - expected).abs() < 0.04, "orientation {value}: {actual} for {expected}");
            }
        }
    }

    #[test]
    fn any_side_can_be_asked_for() {
        let mut kernel = Rgb224::with_side(NonZeroU32::new(7).unwrap(), ImageLimits::default());
        let mut out = vec![0.0; kernel.values()];
        kernel.decode_into(&encode(gradient(50, 40), Encoding::Png), &mut out).unwrap();
        assert_eq!(kernel.values(), 147);
        assert!(kernel.decode_into(b"not a picture at all", &mut out).is_err());
    }
}
