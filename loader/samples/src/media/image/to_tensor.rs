//! Decodes images to square, normalized tensors, the input for most vision encoders.
//!
//! Decodes in full, resamples the shorter side to the square's side with antialiased bilinear filtering,
//! crops the center, then computes `(value / 255 - mean) / deviation`, by default with the `ImageNet`
//! statistics, channels first. Only the image part inside the crop is resampled; the EXIF orientation is
//! applied to the small square, after resampling. Other value types and orders are written from the same
//! square.

use std::num::NonZeroU32;

use dflop_costmodel::ImageSize;
use fast_image_resize::Resizer;
use half::bf16;
use image::metadata::Orientation;

use super::raster::{CropBox, Pixel, PixelFormat, PixelLayout, PixelType, resize_part};
use super::{Reduction, RgbImage, decode_stored_into, stored_header};
use crate::media::DecodeError;
use crate::media::augment::{ImageAugment, ImageChanges};
use crate::media::shape::ImageLimits;

/// `ImageNet` pixel mean: red, green, blue, on a scale from 0 to 1.
pub const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// `ImageNet` pixel standard deviation: red, green, blue, on a scale from 0 to 1.
pub const IMAGENET_DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

/// Pixel mean and standard deviation by color, on a scale from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PixelStatistics {
    /// Mean, subtracted from red, green and blue.
    pub mean: [f32; 3],
    /// Standard deviation, which divides red, green and blue.
    pub deviation: [f32; 3],
}

/// `ImageNet` pixel statistics.
const IMAGENET: PixelStatistics = PixelStatistics { mean: IMAGENET_MEAN, deviation: IMAGENET_DEVIATION };

impl Default for PixelStatistics {
    /// Returns the `ImageNet` statistics.
    fn default() -> Self {
        IMAGENET
    }
}

/// Image that becomes a square.
enum Source<'a> {
    /// A file.
    Encoded(&'a [u8]),
    /// Pixels that a different codec decoded.
    Decoded(RgbImage),
}

/// Decodes images to `[3, side, side]` tensors; reuses buffers, so each worker thread needs a separate
/// decoder.
#[derive(Debug)]
pub struct ImageTensorDecoder {
    side: NonZeroU32,
    limits: ImageLimits,
    is_scaled: bool,
    resizer: Resizer,
    stored: RgbImage,
    square: Vec<[u8; 3]>,
    turned: Vec<[u8; 3]>,
    tables: Box<[[f32; 256]; 3]>,
}

impl ImageTensorDecoder {
    /// Creates a decoder for 224 x 224 pixels.
    #[must_use]
    pub fn new(limits: ImageLimits) -> Self {
        const SIDE: NonZeroU32 = NonZeroU32::new(224).unwrap();
        Self::with_side(SIDE, limits)
    }

    /// Creates a decoder for `side` x `side` pixels.
    #[must_use]
    pub fn with_side(side: NonZeroU32, limits: ImageLimits) -> Self {
        let pixels = side.get() as usize * side.get() as usize;
        Self {
            side,
            limits,
            is_scaled: false,
            resizer: Resizer::new(),
            stored: RgbImage::default(),
            square: vec![[0; 3]; pixels],
            turned: Vec::new(),
            tables: Box::new(normalization_tables(IMAGENET)),
        }
    }

    /// Sets the statistics for normalization. Default: `ImageNet`.
    #[must_use]
    pub fn statistics(mut self, statistics: PixelStatistics) -> Self {
        self.tables = Box::new(normalization_tables(statistics));
        self
    }

    /// Sets whether a JPEG is decoded at a half, a quarter or an eighth of the full size if the cropped part
    /// then is still at least `side` long. Faster, with slightly different pixels. Default: false.
    #[cfg(feature = "turbojpeg")]
    #[must_use]
    pub fn scaled_decode(mut self, is_scaled: bool) -> Self {
        self.is_scaled = is_scaled;
        self
    }

    /// Returns the number of values per tensor: `3 * side * side`.
    #[must_use]
    pub fn values(&self) -> usize {
        3 * self.square.len()
    }

    /// Decodes an image.
    ///
    /// - `out`: `[3, side, side]` f32, overwritten: red, green, blue plane; rows from top to bottom
    /// - returns whether the file was truncated, which only lenient limits accept
    ///
    /// # Errors
    /// See [`decode_rgb`](crate::media::decode_rgb); `out` is then untouched.
    ///
    /// # Panics
    /// If `out` does not have [`values`](Self::values) elements.
    pub fn decode_into(&mut self, bytes: &[u8], out: &mut [f32]) -> Result<bool, DecodeError> {
        self.decode_augmented_into(bytes, None, out)
    }

    /// Decodes an image with the changes that `augment` draws: a random crop instead of the center crop, then
    /// colors, then the flip.
    ///
    /// # Errors
    /// See [`decode_into`](Self::decode_into).
    ///
    /// # Panics
    /// See [`decode_into`](Self::decode_into).
    pub fn decode_augmented_into(
        &mut self,
        bytes: &[u8],
        augment: Option<&ImageAugment>,
        out: &mut [f32],
    ) -> Result<bool, DecodeError> {
        self.square_as(Source::Encoded(bytes), augment, PixelLayout::ChannelsFirst, out)
    }

    /// Decodes an image to values with any type and order; bytes are not normalized.
    ///
    /// - `out`: values in native byte order, aligned for the value type, overwritten
    ///
    /// # Errors
    /// See [`decode_into`](Self::decode_into).
    ///
    /// # Panics
    /// If `out` does not have [`values`](Self::values) values of the value type, or is not aligned for it.
    pub fn decode_formatted_into(
        &mut self,
        bytes: &[u8],
        augment: Option<&ImageAugment>,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<bool, DecodeError> {
        self.formatted(Source::Encoded(bytes), augment, format, out)
    }

    /// Converts a decoded image as [`decode_formatted_into`](Self::decode_formatted_into) does after
    /// decoding.
    ///
    /// # Errors
    /// [`DecodeError::Malformed`] if the number of pixels does not match the image size.
    ///
    /// # Panics
    /// See [`decode_formatted_into`](Self::decode_formatted_into).
    pub fn convert_formatted_into(
        &mut self,
        image: RgbImage,
        augment: Option<&ImageAugment>,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<bool, DecodeError> {
        self.formatted(Source::Decoded(image), augment, format, out)
    }

    fn formatted(
        &mut self,
        source: Source<'_>,
        augment: Option<&ImageAugment>,
        format: PixelFormat,
        out: &mut [u8],
    ) -> Result<bool, DecodeError> {
        let PixelFormat { pixels, layout } = format;
        match pixels {
            PixelType::Float32 => {
                self.square_as::<f32>(source, augment, layout, bytemuck::cast_slice_mut(out))
            }
            PixelType::BFloat16 => {
                self.square_as::<bf16>(source, augment, layout, bytemuck::cast_slice_mut(out))
            }
            PixelType::UInt8 => self.square_as::<u8>(source, augment, layout, out),
        }
    }

    /// Stores the image, resamples, changes, orients and normalizes it; returns whether the image is
    /// truncated.
    fn square_as<P: Pixel>(
        &mut self,
        source: Source<'_>,
        augment: Option<&ImageAugment>,
        layout: PixelLayout,
        out: &mut [P],
    ) -> Result<bool, DecodeError> {
        assert_eq!(out.len(), self.values(), "`out` must have `values()` elements");
        let draw = |displayed| augment.map_or_else(ImageChanges::default, |augment| augment.draw(displayed));
        let (size, orientation, crop_box, draw) = match source {
            Source::Encoded(bytes) => {
                let header = stored_header(bytes, &self.limits)?;
                let draw = draw(header.display_size());
                let crop_box = self.crop_box(header.stored, header.orientation, &draw);
                let reduction = self.reduction(crop_box);
                decode_stored_into(bytes, &header, reduction, &self.limits, &mut self.stored)?;
                (header.stored, header.orientation, crop_box, draw)
            }
            Source::Decoded(image) => {
                let size = checked_size(&image)?;
                self.stored = image;
                let draw = draw(size);
                (size, Orientation::NoTransforms, self.crop_box(size, Orientation::NoTransforms, &draw), draw)
            }
        };
        self.resample(size, crop_box)?;
        draw.colors.apply(&mut self.square);
        let is_as_stored = orientation == Orientation::NoTransforms && !draw.is_flipped;
        let square = if is_as_stored {
            &self.square
        } else {
            let side = self.side.get() as usize;
            orient_square(&self.square, side, orientation, draw.is_flipped, &mut self.turned);
            &self.turned
        };
        match layout {
            PixelLayout::ChannelsFirst => {
                let planes = out.chunks_exact_mut(square.len());
                for ((plane, table), channel) in planes.zip(self.tables.iter()).zip(0..) {
                    normalize(square, channel, table, plane);
                }
            }
            PixelLayout::ChannelsLast => normalize_by_pixel(square, &self.tables, out),
        }
        Ok(self.stored.is_truncated)
    }

    /// Returns the part of the stored image that becomes the square.
    fn crop_box(&self, size: ImageSize, orientation: Orientation, draw: &ImageChanges) -> CropBox {
        match draw.crop {
            Some(crop) => CropBox::from(crop).to_stored(size, orientation),
            None => CropBox::center(size, self.side.get()),
        }
    }

    #[cfg(feature = "turbojpeg")]
    fn reduction(&self, crop_box: CropBox) -> Reduction {
        let shorter = crop_box.width.min(crop_box.height);
        if self.is_scaled { Reduction::at_least(shorter, self.side.get()) } else { Reduction::NONE }
    }

    #[cfg(not(feature = "turbojpeg"))]
    fn reduction(&self, _part: CropBox) -> Reduction {
        debug_assert!(!self.is_scaled, "only libjpeg-turbo reduces");
        Reduction::NONE
    }

    fn resample(&mut self, size: ImageSize, crop_box: CropBox) -> Result<(), DecodeError> {
        let decoded = ImageSize { width: self.stored.width, height: self.stored.height };
        let target = ImageSize { width: self.side.get(), height: self.side.get() };
        let crop_box = crop_box.in_decoded(size, decoded);
        resize_part(&mut self.resizer, &self.stored, crop_box, target, self.square.as_flattened_mut())
    }
}

/// Returns the size of a decoded image, if the pixels match.
fn checked_size(image: &RgbImage) -> Result<ImageSize, DecodeError> {
    let size = ImageSize { width: image.width, height: image.height };
    let bytes = u64::from(size.width) * u64::from(size.height) * 3;
    if bytes == 0 || image.pixels.len() as u64 != bytes {
        let reason = format!("{} bytes for {} x {} pixels", image.pixels.len(), size.width, size.height);
        return Err(DecodeError::malformed("image", 0, reason));
    }
    Ok(size)
}

fn normalization_tables(statistics: PixelStatistics) -> [[f32; 256]; 3] {
    let PixelStatistics { mean, deviation } = statistics;
    std::array::from_fn(|channel| {
        let scale = 1.0 / (255.0 * deviation[channel]);
        let bias = -mean[channel] / deviation[channel];
        std::array::from_fn(|value| value as f32 * scale + bias)
    })
}

fn normalize<P: Pixel>(square: &[[u8; 3]], channel: usize, table: &[f32; 256], plane: &mut [P]) {
    for (value, pixel) in plane.iter_mut().zip(square) {
        let byte = pixel[channel];
        *value = P::of(byte, table[usize::from(byte)]);
    }
}

/// Normalizes pixel by pixel.
fn normalize_by_pixel<P: Pixel>(square: &[[u8; 3]], tables: &[[f32; 256]; 3], out: &mut [P]) {
    for (values, pixel) in out.chunks_exact_mut(3).zip(square) {
        for ((value, &byte), table) in values.iter_mut().zip(pixel).zip(tables) {
            *value = P::of(byte, table[usize::from(byte)]);
        }
    }
}

/// Applies the orientation to a square image with `side` x `side` pixels and then, if requested, the flip.
fn orient_square(
    square: &[[u8; 3]],
    side: usize,
    orientation: Orientation,
    is_flipped: bool,
    turned: &mut Vec<[u8; 3]>,
) {
    let last = side - 1;
    turned.clear();
    for y in 0..side {
        turned.extend((0..side).map(|x| {
            let x = if is_flipped { last - x } else { x };
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
    use crate::SampleId;
    use crate::media::augment::Augment;
    use crate::media::fixtures::{encode, exif_body, gradient, with_segment};

    fn decoded_square(bytes: &[u8]) -> Vec<f32> {
        let mut kernel = ImageTensorDecoder::new(ImageLimits::default());
        let mut out = vec![f32::NAN; kernel.values()];
        assert!(!kernel.decode_into(bytes, &mut out).unwrap());
        out
    }

    fn normalized(value: u8, channel: usize) -> f32 {
        (f32::from(value) / 255.0 - IMAGENET_MEAN[channel]) / IMAGENET_DEVIATION[channel]
    }

    #[test]
    fn image_of_the_right_size_is_only_normalized() {
        let image = gradient(224, 224);
        let out = decoded_square(&encode(image.clone(), Encoding::Png));
        for (channel, plane) in out.chunks(224 * 224).enumerate() {
            for (actual, pixel) in plane.iter().zip(image.pixels()) {
                assert!((actual - normalized(pixel.0[channel], channel)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn crop_keeps_the_center_of_the_longer_side() {
        for (width, height) in [(448, 224), (224, 448), (3, 1000), (1, 1), (301, 299)] {
            let out = decoded_square(&encode(gradient(width, height), Encoding::Png));
            let plane_mean = |channel: usize| {
                let plane = &out[channel * 224 * 224..(channel + 1) * 224 * 224];
                plane.iter().sum::<f32>() / plane.len() as f32
            };
            assert!((plane_mean(2) - normalized(128, 2)).abs() < 0.01);
            if width > 1 {
                assert!((plane_mean(0) - normalized(127, 0)).abs() < 0.05, "{width} x {height}");
            }
        }
    }

    #[test]
    fn turned_images_equal_images_that_were_stored_turned() {
        let plain = encode(gradient(300, 260), Encoding::Jpeg);
        for value in 1..=8 {
            let file = with_segment(&plain, 0xE1, &exif_body(value));
            let upright = super::super::decode_rgb(&file, &ImageLimits::default()).unwrap();
            let upright = image::RgbImage::from_raw(upright.width, upright.height, upright.pixels).unwrap();
            let expected = decoded_square(&encode(upright, Encoding::Png));
            for (actual, expected) in decoded_square(&file).iter().zip(&expected) {
                assert!((actual - expected).abs() < 0.04, "orientation {value}: {actual} for {expected}");
            }
        }
    }

    #[test]
    fn formats_have_the_same_pixels() {
        let file = encode(gradient(300, 260), Encoding::Jpeg);
        let side = NonZeroU32::new(32).unwrap();
        let mut kernel = ImageTensorDecoder::with_side(side, ImageLimits::default());
        let mut planes = vec![0.0; kernel.values()];
        kernel.decode_into(&file, &mut planes).unwrap();
        for layout in [PixelLayout::ChannelsFirst, PixelLayout::ChannelsLast] {
            let mut of = |pixels: PixelType| {
                let mut out = vec![0.0f32; 3 * 32 * 32];
                let bytes = &mut bytemuck::cast_slice_mut(&mut out)[..3 * 32 * 32 * pixels.bytes() as usize];
                kernel.decode_formatted_into(&file, None, PixelFormat { pixels, layout }, bytes).unwrap();
                bytes.to_vec()
            };
            let (singles, halves, stored) =
                (of(PixelType::Float32), of(PixelType::BFloat16), of(PixelType::UInt8));
            for (at, byte) in stored.into_iter().enumerate() {
                let (pixel, channel) = match layout {
                    PixelLayout::ChannelsFirst => (at % 1024, at / 1024),
                    PixelLayout::ChannelsLast => (at / 3, at % 3),
                };
                let expected = planes[channel * 1024 + pixel];
                let single: f32 = bytemuck::pod_read_unaligned(&singles[4 * at..4 * at + 4]);
                let half: bf16 = bytemuck::pod_read_unaligned(&halves[2 * at..2 * at + 2]);
                assert!((single - expected).abs() == 0.0 && half == bf16::from_f32(expected));
                assert!((expected - normalized(byte, channel)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn any_side_can_be_asked_for() {
        let mut kernel = ImageTensorDecoder::with_side(NonZeroU32::new(7).unwrap(), ImageLimits::default());
        let mut out = vec![0.0; kernel.values()];
        kernel.decode_into(&encode(gradient(50, 40), Encoding::Png), &mut out).unwrap();
        assert_eq!(kernel.values(), 147);
        assert!(kernel.decode_into(b"not an image at all", &mut out).is_err());
    }

    #[test]
    fn an_augmented_square_is_the_decoded_image_augmented() {
        let augment =
            Augment::builder().random_crop(0.3..=0.6, 0.75..=1.3).flip(0.5).seed(5).build().unwrap();
        let plain = encode(gradient(300, 260), Encoding::Jpeg);
        let mut kernel = ImageTensorDecoder::with_side(NonZeroU32::new(64).unwrap(), ImageLimits::default());
        let mut out = vec![0.0; kernel.values()];
        for value in 1..=8 {
            let file = with_segment(&plain, 0xE1, &exif_body(value));
            let upright = super::super::decode_rgb(&file, &ImageLimits::default()).unwrap();
            for number in 0..4 {
                let image =
                    augment.image(SampleId { shard: "s", offset: 0, key: "k" }, 0, &format!("{number}.jpg"));
                kernel.decode_augmented_into(&file, Some(&image), &mut out).unwrap();
                let expected = image.apply(&upright, 64, 64).unwrap().pixels;
                for (at, pixel) in expected.chunks(3).enumerate() {
                    for (channel, expected) in pixel.iter().enumerate() {
                        let actual = out[channel * 64 * 64 + at];
                        let near = (actual - normalized(*expected, channel)).abs() < 0.05;
                        assert!(near, "orientation {value}, image {number}, pixel {at}");
                    }
                }
            }
        }
    }

    #[cfg(feature = "turbojpeg")]
    #[test]
    fn a_scaled_decode_is_near_the_full_one_whatever_the_crop() {
        let augment = Augment::builder().random_crop(0.1..=1.0, 0.75..=1.3).build().unwrap();
        let file = with_segment(&encode(gradient(800, 610), Encoding::Jpeg), 0xE1, &exif_body(6));
        let side = NonZeroU32::new(96).unwrap();
        let mut full = ImageTensorDecoder::with_side(side, ImageLimits::default());
        let mut scaled = ImageTensorDecoder::with_side(side, ImageLimits::default()).scaled_decode(true);
        let (mut expected, mut out) = (vec![0.0; full.values()], vec![0.0; full.values()]);
        let images = (0..12).map(|number| {
            augment.image(SampleId { shard: "s", offset: 0, key: "k" }, 0, &format!("{number}.jpg"))
        });
        for image in std::iter::once(None).chain(images.map(Some)) {
            full.decode_augmented_into(&file, image.as_ref(), &mut expected).unwrap();
            scaled.decode_augmented_into(&file, image.as_ref(), &mut out).unwrap();
            assert!(scaled.stored.width <= 800 && scaled.stored.height <= 610);
            for (actual, expected) in out.iter().zip(&expected) {
                assert!((actual - expected).abs() < 0.06, "{actual} for {expected}");
            }
        }
        scaled.decode_into(&file, &mut out).unwrap();
        assert_eq!((scaled.stored.width, scaled.stored.height), (200, 153));
    }
}
