//! Generates pseudo-random numbers that are the same on every machine.

/// Random number generator with a stream per sample, so that samples can be generated in any order.
///
/// # Source
/// `SplitMix64`: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014,
/// doi:10.1145/2660193.2660195.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Returns the generator of one sample of the dataset with this seed.
    pub(crate) fn new(seed: u64, sample: usize) -> Self {
        let mut rng = Self(seed);
        let start = rng.bits();
        // An odd multiplier maps samples to distinct starts; SplitMix64 mixes neighboring starts well.
        Self(start ^ (sample as u64).wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    /// Draws 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// Draws an integer in `0..end`; `end` is at least 1.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        // The upper 64 bits of the product: almost uniform, and cheaper than a remainder.
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// Draws an integer in `from..end`.
    pub(crate) fn between(&mut self, from: i32, end: i32) -> i32 {
        from + self.below((end - from) as usize) as i32
    }

    /// Draws a number in `0..1`.
    pub(crate) fn fraction(&mut self) -> f64 {
        // 53 bits, the precision of `f64`, so that the result is below 1.
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Draws a number in `from..end`.
    pub(crate) fn range(&mut self, from: f64, end: f64) -> f64 {
        from + (end - from) * self.fraction()
    }

    /// Returns true in `percent` of 100 cases.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
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
