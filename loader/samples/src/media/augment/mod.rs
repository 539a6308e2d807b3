//! Random augmentation of images: geometry and colors, drawn from the run's seed.
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
//!
//! Values are clamped to black and white after each change and rounded once, at the end. Gray is ITU-R BT.601
//! luma; the hue rotates in HSV.
//!
//! # Source
//! Random resized crop: Szegedy et al., "Going Deeper with Convolutions", 2014, arXiv:1409.4842, section 6;
//! the ten attempts and the centered fallback follow torchvision's `RandomResizedCrop`.

#[cfg(test)]
mod tests;

use super::DecodeError;
use super::image::{Crop, RgbImage, resize_crop};
use crate::SampleId;
use crate::error::{Error, Result};
use dflop_costmodel::ImageSize;
use dflop_costmodel::random::mix64;
use std::ops::RangeInclusive;
use xxhash_rust::xxh3::xxh3_64_with_seed;

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

/// Purpose of a random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    Flip,
    Brightness,
    Contrast,
    Saturation,
    Hue,
    /// Crop area in an attempt.
    Area(u64),
    /// Crop width divided by height in an attempt.
    Ratio(u64),
    Left(u64),
    Top(u64),
    /// Seed for user code, by transform number.
    Transform(u64),
}

impl Quantity {
    fn counter(self) -> u64 {
        /// Counters per attempt, and the first attempt's counter.
        const ATTEMPT: u64 = 4;
        const FIRST: u64 = 16;
        /// Counter offset for transforms, far above the counters of the last attempt.
        const TRANSFORMS: u64 = 1 << 32;
        match self {
            Self::Flip => 0,
            Self::Brightness => 1,
            Self::Contrast => 2,
            Self::Saturation => 3,
            Self::Hue => 4,
            Self::Area(attempt) => FIRST + ATTEMPT * attempt,
            Self::Ratio(attempt) => FIRST + ATTEMPT * attempt + 1,
            Self::Left(attempt) => FIRST + ATTEMPT * attempt + 2,
            Self::Top(attempt) => FIRST + ATTEMPT * attempt + 3,
            Self::Transform(number) => TRANSFORMS + number,
        }
    }
}

/// Random source for an image: a pure function of seed, sample, epoch and field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RandomSource(u64);

impl RandomSource {
    fn new(seed: u64, sample: SampleId<'_>, epoch: u64, field: &str) -> Self {
        // Datasets are moved and copied, so only the shard's base name counts.
        let shard = sample.shard.rsplit('/').next().unwrap_or_default();
        let names = [shard, sample.key, field];
        let names = names.iter().fold(seed, |hash, name| xxh3_64_with_seed(name.as_bytes(), hash));
        Self([sample.offset, epoch].iter().fold(names, |hash, &value| mix64(hash ^ mix64(value))))
    }

    fn bits(self, quantity: Quantity) -> u64 {
        mix64(self.0 ^ mix64(quantity.counter()))
    }

    /// Returns a fraction in `[0, 1)`.
    fn fraction(self, quantity: Quantity) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 53) as f64;
        // An f64 holds 53 bits; with all 64, fractions next to 1 would round up to it.
        (self.bits(quantity) >> 11) as f64 * STEP
    }

    /// Returns a number from `low` to `high`.
    fn between(self, quantity: Quantity, low: f64, high: f64) -> f64 {
        low + self.fraction(quantity) * (high - low)
    }

    /// Returns a number from `low` to `high` whose logarithm is uniform.
    ///
    /// The interval is halved at its geometric mean, once per bit: square roots are rounded correctly on
    /// every machine, whereas logarithms differ between math libraries.
    fn log_between(self, quantity: Quantity, mut low: f64, mut high: f64) -> f64 {
        const HALVINGS: u32 = 40;
        let bits = self.bits(quantity);
        for at in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if bits >> (63 - at) & 1 == 0 { high = middle } else { low = middle }
        }
        (low * high).sqrt()
    }

    /// Returns an integer from 0 to `last`, both included.
    fn whole(self, quantity: Quantity, last: u32) -> u32 {
        ((u128::from(self.bits(quantity)) * (u128::from(last) + 1)) >> 64) as u32
    }
}

/// Red, green and blue weights for gray.
const GRAY: [f32; 3] = [0.299, 0.587, 0.114];
const WHITE: f32 = 255.0;

/// Color changes drawn for an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ColorChanges {
    brightness: f32,
    contrast: f32,
    saturation: f32,
    hue_turns: f32,
}

impl Default for ColorChanges {
    fn default() -> Self {
        Self { brightness: 1.0, contrast: 1.0, saturation: 1.0, hue_turns: 0.0 }
    }
}

impl ColorJitter {
    /// Draws the color changes for an image.
    fn draw(&self, random: RandomSource) -> ColorChanges {
        let factor =
            |quantity, change: f64| random.between(quantity, (1.0 - change).max(0.0), 1.0 + change) as f32;
        ColorChanges {
            brightness: factor(Quantity::Brightness, self.brightness),
            contrast: factor(Quantity::Contrast, self.contrast),
            saturation: factor(Quantity::Saturation, self.saturation),
            hue_turns: random.between(Quantity::Hue, -self.hue, self.hue) as f32,
        }
    }
}

impl ColorChanges {
    /// Changes all pixels of an image.
    #[expect(clippy::float_cmp, reason = "a factor that was not drawn is exactly 1, a turn exactly 0")]
    pub(crate) fn apply(&self, pixels: &mut [[u8; 3]]) {
        if *self == Self::default() {
            return;
        }
        let table = self.value_table(pixels);
        let (has_saturation, has_hue) = (self.saturation != 1.0, self.hue_turns != 0.0);
        for pixel in pixels {
            let mut color = pixel.map(|value| table[usize::from(value)]);
            if has_saturation {
                let gray = gray(color);
                color = color.map(|value| blend(gray, value, self.saturation));
            }
            if has_hue {
                color = rotate_hue(color, self.hue_turns);
            }
            // Adding a half and truncating rounds to the nearest integer, because no value is negative.
            *pixel = color.map(|value| (value + 0.5) as u8);
        }
    }

    /// Builds the lookup table for brightness and contrast, which depend on a single value and the mean gray.
    fn value_table(&self, pixels: &[[u8; 3]]) -> [f32; 256] {
        let table: [f32; 256] = std::array::from_fn(|value| (value as f32 * self.brightness).min(WHITE));
        let grays = pixels.iter().map(|pixel| gray(pixel.map(|value| table[usize::from(value)])));
        let mean = grays.map(f64::from).sum::<f64>() / pixels.len().max(1) as f64;
        table.map(|value| blend(mean as f32, value, self.contrast))
    }
}

fn gray(color: [f32; 3]) -> f32 {
    color[0] * GRAY[0] + color[1] * GRAY[1] + color[2] * GRAY[2]
}

/// Moves `value` away from `base` by `factor`.
fn blend(base: f32, value: f32, factor: f32) -> f32 {
    (base + (value - base) * factor).clamp(0.0, WHITE)
}

/// Rotates the hue by a fraction of the color wheel, keeping HSV value and chroma.
#[expect(clippy::float_cmp, reason = "the largest of three values is one of them")]
fn rotate_hue(color: [f32; 3], turns: f32) -> [f32; 3] {
    const SECTORS: f32 = 6.0;
    let [red, green, blue] = color;
    let most = red.max(green).max(blue);
    let chroma = most - red.min(green).min(blue);
    if chroma <= 0.0 {
        return color;
    }
    let sector = if most == red {
        (green - blue) / chroma
    } else if most == green {
        (blue - red) / chroma + 2.0
    } else {
        (red - green) / chroma + 4.0
    };
    let sector = sector + SECTORS * turns;
    // The offsets place red, green and blue on the six-sector wheel.
    [5.0, 3.0, 1.0].map(|start| {
        let at = (start + sector).rem_euclid(SECTORS);
        most - chroma * at.min(4.0 - at).clamp(0.0, 1.0)
    })
}

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
struct RandomCrop {
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
    fn draw(&self, random: RandomSource, displayed: ImageSize) -> Crop {
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
