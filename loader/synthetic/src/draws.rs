//! Generates pseudo-random numbers that are the same on every machine, and draws sample sizes with them.
//!
//! Sample sizes are drawn from quantiles measured on published datasets. A table holds 21 quantiles, from the
//! smallest value in steps of 5 % to the largest; a value is drawn by linear interpolation between neighbors.
//! Sizes come from file headers and metadata only.
//!
//! # Source
//! - Photos: 159 images of COCO 2017 (Lin et al., arXiv:1405.0312; annotations CC BY 4.0).
//! - Receipts: 626 scans of ICDAR 2019 SROIE (Huang et al., arXiv:2103.10213). The largest 15 % are scanned
//!   at 4961 x 7016; images above 2.5 megapixels are scaled down here, to keep the dataset small.
//! - Speech: 32,484 utterances from `LibriSpeech` (Panayotov et al., 2015; CC BY 4.0): dev-clean, test-clean
//!   and train-clean-100, from 3 s on. The last entry is the 99th percentile instead of the maximum.
//! - Text: instruction and answer words in 999 Alpaca samples (Taori et al., 2023), as `LLaMA-Factory` ships
//!   them for demonstration (Apache-2.0).

use dflop_costmodel::random::{SplitMix64, mix64};

/// Random number generator with a stream per sample, so that samples can be generated in any order.
#[derive(Debug, Clone)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Returns the generator for a sample in the dataset with this seed.
    #[must_use]
    pub fn new(seed: u64, sample: usize) -> Self {
        // An odd multiplier maps samples to distinct starts; SplitMix64 mixes neighboring starts well.
        Self(SplitMix64::new(mix64(seed) ^ (sample as u64).wrapping_mul(0xD1B5_4A32_D192_ED03)))
    }

    /// Draws 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws an integer in `0..end`; `end` is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.below(end)
    }

    /// Draws an integer in `from..end`.
    pub fn between(&mut self, from: i32, end: i32) -> i32 {
        from + self.below((end - from) as usize) as i32
    }

    /// Draws a number in `0..1`.
    pub fn fraction(&mut self) -> f64 {
        self.0.fraction()
    }

    /// Draws a number in `from..end`.
    pub fn range(&mut self, from: f64, end: f64) -> f64 {
        from + (end - from) * self.fraction()
    }

    /// Returns true with a probability of `percent` %.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// Number of table entries.
const ENTRIES: usize = 21;

/// Maximum number of image pixels.
const PIXELS_MAX: f64 = 2.5e6;

/// A distribution, given by quantiles in ascending order.
#[derive(Debug)]
pub(crate) struct Quantiles([f64; ENTRIES]);

impl Quantiles {
    /// Draws a value between the first and the last entry.
    pub(crate) fn draw(&self, rng: &mut Rng) -> f64 {
        let place = rng.fraction() * (ENTRIES - 1) as f64;
        // The last entry has no neighbor to interpolate with.
        let entry = (place as usize).min(ENTRIES - 2);
        let (low, high) = (self.0[entry], self.0[entry + 1]);
        low + (high - low) * (place - entry as f64)
    }
}

/// Megapixels and aspect ratios for an image kind, drawn independently.
#[derive(Debug)]
pub(crate) struct ImageSizes {
    megapixels: Quantiles,
    /// Width over height.
    aspect_ratios: Quantiles,
}

impl ImageSizes {
    /// Draws width and height in pixels.
    pub(crate) fn draw(&self, rng: &mut Rng) -> (usize, usize) {
        let pixels = (self.megapixels.draw(rng) * 1e6).min(PIXELS_MAX);
        let ratio = self.aspect_ratios.draw(rng);
        ((pixels * ratio).sqrt().round() as usize, (pixels / ratio).sqrt().round() as usize)
    }
}

/// COCO photo sizes.
pub(crate) const PHOTO_SIZES: ImageSizes = ImageSizes {
    megapixels: Quantiles([
        0.167, 0.188, 0.188, 0.226, 0.251, 0.268, 0.272, 0.273, 0.273, 0.273, 0.273, 0.274, 0.296, 0.306,
        0.307, 0.307, 0.307, 0.307, 0.307, 0.307, 0.41,
    ]),
    aspect_ratios: Quantiles([
        0.559, 0.667, 0.747, 0.75, 0.75, 1.053, 1.329, 1.333, 1.333, 1.333, 1.333, 1.337, 1.463, 1.499,
        1.499, 1.499, 1.502, 1.506, 1.514, 1.633, 2.105,
    ]),
};

/// SROIE scan sizes.
pub(crate) const RECEIPT_SIZES: ImageSizes = ImageSizes {
    megapixels: Quantiles([
        0.28, 0.66, 0.739, 0.788, 0.877, 0.928, 0.992, 1.055, 1.136, 1.281, 1.428, 1.546, 1.641, 1.667, 1.76,
        1.936, 2.063, 2.588, 34.806, 34.806, 34.806,
    ]),
    aspect_ratios: Quantiles([
        0.263, 0.336, 0.373, 0.397, 0.412, 0.424, 0.437, 0.451, 0.475, 0.488, 0.501, 0.511, 0.521, 0.529,
        0.55, 0.581, 0.651, 0.707, 0.707, 0.707, 0.971,
    ]),
};

/// `LibriSpeech` utterance durations, in seconds.
pub(crate) const SPEECH_SECONDS: Quantiles = Quantiles([
    3.0, 4.17, 5.38, 6.88, 8.43, 9.99, 11.28, 12.22, 12.84, 13.31, 13.7, 14.03, 14.33, 14.6, 14.84, 15.08,
    15.31, 15.55, 15.8, 16.14, 16.98,
]);

/// Number of instruction and answer words in Alpaca samples.
pub(crate) const TEXT_WORDS: Quantiles = Quantiles([
    7.0, 17.0, 22.0, 26.0, 30.0, 34.0, 42.0, 51.0, 66.0, 77.0, 96.0, 113.0, 131.0, 152.0, 182.0, 210.0,
    234.0, 258.0, 290.0, 320.0, 444.0,
]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_in_their_range_and_differ_between_samples() {
        let mut rng = Rng::new(3, 4);
        for _ in 0..1000 {
            assert!(rng.below(7) < 7);
            assert!((-2..5).contains(&rng.between(-2, 5)));
            assert!((1.5..2.5).contains(&rng.range(1.5, 2.5)));
        }
        assert_ne!(Rng::new(3, 4).bits(), Rng::new(3, 5).bits());
        assert_ne!(Rng::new(3, 4).bits(), Rng::new(4, 4).bits());
    }

    fn tables() -> [&'static Quantiles; 6] {
        let [photo, receipt] = [&PHOTO_SIZES, &RECEIPT_SIZES];
        let images = [&photo.megapixels, &photo.aspect_ratios, &receipt.megapixels, &receipt.aspect_ratios];
        let [a, b, c, d] = images;
        [a, b, c, d, &SPEECH_SECONDS, &TEXT_WORDS]
    }

    #[test]
    fn values_stay_inside_their_table_and_keep_its_median() {
        let mut rng = Rng::new(1, 0);
        for table in tables() {
            assert!(table.0.is_sorted());
            let mut drawn: Vec<f64> = (0..4001).map(|_| table.draw(&mut rng)).collect();
            drawn.sort_unstable_by(f64::total_cmp);
            assert!(table.0[0] <= drawn[0] && drawn[4000] <= table.0[20]);
            assert!((table.0[9]..=table.0[11]).contains(&drawn[2000]));
        }
    }

    #[test]
    fn images_are_capped() {
        let mut rng = Rng::new(2, 0);
        for _ in 0..2000 {
            let (width, height) = RECEIPT_SIZES.draw(&mut rng);
            assert!(width >= 200 && width * height <= 2_505_000);
        }
    }
}
