//! Generates pseudo-random numbers that are the same on every machine.

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
}
