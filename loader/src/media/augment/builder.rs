//! Settings of an [`Augment`].

use std::ops::RangeInclusive;

use super::Augment;
use crate::error::{Error, Result};

/// How much colors change; 0 is not at all.
///
/// `brightness`, `contrast` and `saturation` are drawn from `max(0, 1 - x)` to `1 + x` and multiply; `hue` is drawn
/// from `-x` to `x`, in turns of the color wheel. They follow each other in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ColorJitter {
    /// Largest relative change of all values.
    pub brightness: f64,
    /// Largest relative change of the distance to the mean gray of the image.
    pub contrast: f64,
    /// Largest relative change of the distance to a pixel's own gray.
    pub saturation: f64,
    /// Largest change of hue, 0 to 0.5.
    pub hue: f64,
}

/// Ranges of the random resized crop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RandomCrop {
    pub(super) scale_min: f64,
    pub(super) scale_max: f64,
    pub(super) ratio_min: f64,
    pub(super) ratio_max: f64,
}

/// Settings of an [`Augment`].
#[derive(Debug, Clone, Default)]
pub struct AugmentBuilder {
    seed: u64,
    crop: Option<RandomCrop>,
    flip_probability: f64,
    jitter: ColorJitter,
}

impl AugmentBuilder {
    /// Sets what all draws depend on. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Keeps a random part of each image, resized to what is asked for. Default: no.
    ///
    /// - `scale`: its share of the image's area, above 0 and at most 1; common is `0.08..=1.0`
    /// - `ratio`: its width over its height, spread evenly by logarithm; common is `0.75..=4.0 / 3.0`
    #[must_use]
    pub fn random_crop(mut self, scale: RangeInclusive<f64>, ratio: RangeInclusive<f64>) -> Self {
        let (scale_min, scale_max) = scale.into_inner();
        let (ratio_min, ratio_max) = ratio.into_inner();
        self.crop = Some(RandomCrop { scale_min, scale_max, ratio_min, ratio_max });
        self
    }

    /// Exchanges left and right with this probability. Default: 0.
    #[must_use]
    pub fn flip(mut self, probability: f64) -> Self {
        self.flip_probability = probability;
        self
    }

    /// Changes colors. Default: not.
    #[must_use]
    pub fn color_jitter(mut self, jitter: ColorJitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Config`] if a number is outside its range, or a range is empty.
    pub fn build(self) -> Result<Augment> {
        let invalid = |setting, reason: &str| Err(Error::Config { setting, reason: reason.to_owned() });
        if let Some(RandomCrop { scale_min, scale_max, ratio_min, ratio_max }) = self.crop {
            if !(scale_min > 0.0 && scale_min <= scale_max && scale_max <= 1.0) {
                return invalid("random_crop", "the scale must be a range above 0 and up to 1");
            }
            if !(ratio_min > 0.0 && ratio_min <= ratio_max && ratio_max.is_finite()) {
                return invalid("random_crop", "the ratio must be a range above 0");
            }
        }
        if !(0.0..=1.0).contains(&self.flip_probability) {
            return invalid("flip", "the probability must be 0 to 1");
        }
        let ColorJitter { brightness, contrast, saturation, hue } = self.jitter;
        if [brightness, contrast, saturation].iter().any(|change| !change.is_finite() || *change < 0.0) {
            return invalid("color_jitter", "brightness, contrast and saturation must be at least 0");
        }
        if !(0.0..=0.5).contains(&hue) {
            return invalid("color_jitter", "the hue must be 0 to 0.5");
        }
        let Self { seed, crop, flip_probability, jitter } = self;
        Ok(Augment { seed, crop, flip_probability, jitter })
    }
}
