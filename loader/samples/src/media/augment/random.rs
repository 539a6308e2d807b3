//! Draws the random numbers for an image, each from a separate counter: enabling a change keeps the other
//! draws.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::raw_sample::SampleId;
use dflop_costmodel::random::mix64;

/// Purpose of a random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quantity {
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
pub(super) struct RandomSource(u64);

impl RandomSource {
    pub(super) fn new(seed: u64, sample: SampleId<'_>, epoch: u64, field: &str) -> Self {
        // Datasets are moved and copied, so only the shard's base name counts.
        let shard = sample.shard.rsplit('/').next().unwrap_or_default();
        let names = [shard, sample.key, field];
        let names = names.iter().fold(seed, |hash, name| xxh3_64_with_seed(name.as_bytes(), hash));
        Self([sample.offset, epoch].iter().fold(names, |hash, &value| mix64(hash ^ mix64(value))))
    }

    pub(super) fn bits(self, quantity: Quantity) -> u64 {
        mix64(self.0 ^ mix64(quantity.counter()))
    }

    /// Returns a fraction in `[0, 1)`.
    pub(super) fn fraction(self, quantity: Quantity) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 53) as f64;
        // An f64 holds 53 bits; with all 64, fractions next to 1 would round up to it.
        (self.bits(quantity) >> 11) as f64 * STEP
    }

    /// Returns a number from `low` to `high`.
    pub(super) fn between(self, quantity: Quantity, low: f64, high: f64) -> f64 {
        low + self.fraction(quantity) * (high - low)
    }

    /// Returns a number from `low` to `high` whose logarithm is uniform.
    ///
    /// The interval is halved at its geometric mean, once per bit: square roots are rounded correctly on
    /// every machine, whereas logarithms differ between math libraries.
    pub(super) fn log_between(self, quantity: Quantity, mut low: f64, mut high: f64) -> f64 {
        const HALVINGS: u32 = 40;
        let bits = self.bits(quantity);
        for at in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if bits >> (63 - at) & 1 == 0 { high = middle } else { low = middle }
        }
        (low * high).sqrt()
    }

    /// Returns an integer from 0 to `last`, both included.
    pub(super) fn whole(self, quantity: Quantity, last: u32) -> u32 {
        ((u128::from(self.bits(quantity)) * (u128::from(last) + 1)) >> 64) as u32
    }
}
