//! Changes images at random for training; the result does not depend on where a sample is decoded.
//!
//! Random draws depend on the seed, the epoch, the sample and the image field name, by integer hashing: not
//! on ranks, workers, loader, order, resume or the other fields that are read. A sample is identified by
//! shard base name, offset and key. The order is fixed: crop (and resize), brightness, contrast, saturation,
//! hue, flip. Loaders apply the changes while decoding; [`ImageAugment::apply`] works on any decoded image.
//!
//! # Examples
//! ```
//! use dflop_samples::media::augment::Augment;
//! use dflop_samples::SampleId;
//! use dflop_samples::media::RgbImage;
//!
//! let augment = Augment::builder().random_crop(0.5..=1.0, 0.75..=1.5).flip(0.5).seed(7).build()?;
//! let sample = SampleId { shard: "shards/a.tar", offset: 0, key: "kite" };
//! let image = RgbImage { width: 6, height: 4, pixels: vec![128; 72], is_truncated: false };
//! let changed = augment.image(sample, 3, "jpg").apply(&image, 6, 4)?;
//! assert_eq!(changed, augment.image(sample, 3, "jpg").apply(&image, 6, 4)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod builder;
mod colors;
mod random;

use dflop_costmodel::ImageSize;

pub use self::builder::{AugmentBuilder, ColorJitter};
pub(crate) use self::colors::ColorChanges;

use self::builder::RandomCrop;
use self::random::{Quantity, RandomSource};
use super::error::DecodeError;
use super::image::{Crop, RgbImage, resize_crop};
use crate::raw_sample::SampleId;

/// Random image changes, with ranges and probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Augment {
    /// Seed; `None` for the loader seed.
    seed: Option<u64>,
    crop: Option<RandomCrop>,
    flip_probability: f64,
    jitter: ColorJitter,
}

impl Augment {
    /// Creates a builder that starts without changes.
    #[must_use]
    pub fn builder() -> AugmentBuilder {
        AugmentBuilder::default()
    }

    /// Sets the seed, unless the builder set one.
    #[must_use]
    pub fn or_seed(mut self, seed: u64) -> Self {
        self.seed.get_or_insert(seed);
        self
    }

    /// Returns the changes for an image.
    ///
    /// - `epoch`: epoch of the sample, from 0
    /// - `field`: extension of the image field, which distinguishes fields within a sample
    #[must_use]
    pub fn image(&self, sample: SampleId<'_>, epoch: u64, field: &str) -> ImageAugment {
        let random = RandomSource::new(self.seed.unwrap_or_default(), sample, epoch, field);
        ImageAugment { augment: *self, random }
    }
}

/// Returns the seed for a transform on a field.
#[must_use]
pub fn field_seed(seed: u64, sample: SampleId<'_>, epoch: u64, field: &str, transform: u64) -> u64 {
    RandomSource::new(seed, sample, epoch, field).bits(Quantity::Transform(transform))
}

/// Random changes for an image; pixel coordinates follow from the image size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageAugment {
    augment: Augment,
    random: RandomSource,
}

impl ImageAugment {
    /// Draws the changes for an image with this size, measured after the EXIF orientation was applied.
    pub(crate) fn draw(&self, displayed: ImageSize) -> ImageChanges {
        let Augment { crop, flip_probability, jitter, .. } = self.augment;
        ImageChanges {
            crop: crop.map(|crop| crop.draw(self.random, displayed)),
            is_flipped: self.random.fraction(Quantity::Flip) < flip_probability,
            colors: jitter.draw(self.random),
        }
    }

    /// Applies the changes to a decoded image; the result has `width` x `height` pixels.
    ///
    /// Without a random crop the whole image is resized if the size differs.
    ///
    /// # Errors
    /// [`DecodeError::Codec`] if a side is zero, or if the number of pixels does not match the size of
    /// `image`.
    pub fn apply(&self, image: &RgbImage, width: u32, height: u32) -> Result<RgbImage, DecodeError> {
        let displayed = ImageSize { width: image.width, height: image.height };
        let draw = self.draw(displayed);
        let crop =
            draw.crop.unwrap_or(Crop { left: 0, top: 0, width: displayed.width, height: displayed.height });
        let mut changed = resize_crop(image, crop, ImageSize { width, height })?;
        let (pixels, _) = changed.pixels.as_chunks_mut::<3>();
        draw.colors.apply(pixels);
        if draw.is_flipped {
            pixels.chunks_exact_mut(width as usize).for_each(<[_]>::reverse);
        }
        Ok(changed)
    }
}

/// Image changes in pixels; none by default.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ImageChanges {
    /// Kept rectangle; `None` keeps the caller's choice.
    pub(crate) crop: Option<Crop>,
    /// Whether the image is mirrored from left to right, after all other changes.
    pub(crate) is_flipped: bool,
    /// Color changes.
    pub(crate) colors: ColorChanges,
}

#[cfg(test)]
mod tests;
