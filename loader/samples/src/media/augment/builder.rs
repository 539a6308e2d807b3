//! Settings for an [`Augment`], and the random resized crop.
//!
//! # Source
//! Szegedy et al., "Going Deeper with Convolutions", 2014, arXiv:1409.4842, section 6; the ten attempts and
//! the centered fallback follow torchvision's `RandomResizedCrop`.

use std::ops::RangeInclusive;

use dflop_costmodel::ImageSize;

use super::{Augment, Quantity, RandomSource};
use crate::error::{Error, Result};
use crate::media::image::Crop;

/// Ranges for random color changes; 0 changes nothing.
///
/// `brightness`, `contrast` and `saturation` are factors drawn from `max(0, 1 - x)` to `1 + x`; `hue` is
/// drawn from `-x` to `x`, in color wheel turns. They are applied in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ColorJitter {
    /// Maximum relative change in all values.
    pub brightness: f64,
    /// Maximum relative change in the distance to the mean gray of the image.
    pub contrast: f64,
    /// Maximum relative change in the distance to the pixel's own gray.
    pub saturation: f64,
    /// Maximum hue change, 0 to 0.5 turns.
    pub hue: f64,
}

/// Ranges for the random resized crop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RandomCrop {
    scale_min: f64,
    scale_max: f64,
    ratio_min: f64,
    ratio_max: f64,
}

/// Builds an [`Augment`].
#[derive(Debug, Clone, Default)]
pub struct AugmentBuilder {
    seed: Option<u64>,
    crop: Option<RandomCrop>,
    flip_probability: f64,
    jitter: ColorJitter,
}

impl AugmentBuilder {
    /// Sets the seed for all random draws. Default: the loader seed, 0 without a loader.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Keeps a random part of each image, resized to the requested size. Default: no crop.
    ///
    /// - `scale`: kept share of the image area, above 0 and at most 1; common is `0.08..=1.0`
    /// - `ratio`: crop width divided by height, log-uniform; common is `0.75..=4.0 / 3.0`
    #[must_use]
    pub fn random_crop(mut self, scale: RangeInclusive<f64>, ratio: RangeInclusive<f64>) -> Self {
        let (scale_min, scale_max) = scale.into_inner();
        let (ratio_min, ratio_max) = ratio.into_inner();
        self.crop = Some(RandomCrop { scale_min, scale_max, ratio_min, ratio_max });
        self
    }

    /// Mirrors an image from left to right with this probability. Default: 0.
    #[must_use]
    pub fn flip(mut self, probability: f64) -> Self {
        self.flip_probability = probability;
        self
    }

    /// Changes colors at random. Default: no change.
    #[must_use]
    pub fn color_jitter(mut self, jitter: ColorJitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// Validates the ranges.
    ///
    /// # Errors
    /// [`Error::Config`] if a number is outside its range, or a range is empty.
    pub fn build(self) -> Result<Augment> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        if let Some(RandomCrop { scale_min, scale_max, ratio_min, ratio_max }) = self.crop {
            if !(scale_min > 0.0 && scale_min <= scale_max && scale_max <= 1.0) {
                let reason = format!(
                    "the scale must be a non-empty range above 0 and up to 1, got {scale_min} to {scale_max}"
                );
                return invalid("random_crop", reason);
            }
            if !(ratio_min > 0.0 && ratio_min <= ratio_max && ratio_max.is_finite()) {
                let reason =
                    format!("the ratio must be a non-empty range above 0, got {ratio_min} to {ratio_max}");
                return invalid("random_crop", reason);
            }
        }
        if !(0.0..=1.0).contains(&self.flip_probability) {
            let reason = format!("the probability must lie between 0 and 1, got {}", self.flip_probability);
            return invalid("flip", reason);
        }
        let ColorJitter { brightness, contrast, saturation, hue } = self.jitter;
        if [brightness, contrast, saturation].iter().any(|change| !change.is_finite() || *change < 0.0) {
            let reason = format!(
                "the changes must be finite and at least 0, got {brightness}, {contrast} and {saturation}"
            );
            return invalid("color_jitter", reason);
        }
        if !(0.0..=0.5).contains(&hue) {
            return invalid("color_jitter", format!("the hue must lie between 0 and 0.5, got {hue}"));
        }
        let Self { seed, crop, flip_probability, jitter } = self;
        Ok(Augment { seed, crop, flip_probability, jitter })
    }
}

/// Number of attempts before the centered crop is used.
const ATTEMPTS: u64 = 10;

impl RandomCrop {
    /// Draws a rectangle for an image with this size.
    pub(super) fn draw(&self, random: RandomSource, displayed: ImageSize) -> Crop {
        let area = f64::from(displayed.width) * f64::from(displayed.height);
        let fits = |length: f64, most: u32| length >= 1.0 && length <= f64::from(most);
        for attempt in 0..ATTEMPTS {
            let area = area * random.between(Quantity::Area(attempt), self.scale_min, self.scale_max);
            let ratio = random.log_between(Quantity::Ratio(attempt), self.ratio_min, self.ratio_max);
            let [width, height] = [area * ratio, area / ratio].map(|square| square.sqrt().round());
            if fits(width, displayed.width) && fits(height, displayed.height) {
                let (width, height) = (width as u32, height as u32);
                let left = random.whole(Quantity::Left(attempt), displayed.width - width);
                let top = random.whole(Quantity::Top(attempt), displayed.height - height);
                return Crop { left, top, width, height };
            }
        }
        self.center(displayed)
    }

    /// Returns the largest centered rectangle with an allowed ratio.
    fn center(&self, displayed: ImageSize) -> Crop {
        let ratio = f64::from(displayed.width) / f64::from(displayed.height);
        let whole = |length: f64, most: u32| (length.round() as u32).clamp(1, most);
        let (width, height) = if ratio < self.ratio_min {
            (displayed.width, whole(f64::from(displayed.width) / self.ratio_min, displayed.height))
        } else if ratio > self.ratio_max {
            (whole(f64::from(displayed.height) * self.ratio_max, displayed.width), displayed.height)
        } else {
            (displayed.width, displayed.height)
        };
        Crop { left: (displayed.width - width) / 2, top: (displayed.height - height) / 2, width, height }
    }
}
