//! Acceptance threshold for the annealing: random, and shrinking to zero.
//!
//! Integers only, so that every machine draws the same: the logarithm in the acceptance rule of simulated
//! annealing is the number of leading zero bits, interpolated linearly between powers of two.

use dflop_costmodel::random::SplitMix64;

/// Number of fraction bits in the logarithm and the progress.
const FRACTION_BITS: u32 = 10;

/// Random thresholds whose mean shrinks from its first value to zero.
#[derive(Debug)]
pub(super) struct Threshold {
    start_ns: u64,
    steps: u64,
    mean_ns: u64,
    next_shrink: u64,
}

impl Threshold {
    /// Starts a cycle with `steps` elementary steps and a mean.
    pub(super) fn new(start_ns: u64, steps: u64) -> Self {
        Self { start_ns, steps, mean_ns: start_ns, next_shrink: 0 }
    }

    /// Sets the mean for this far into the cycle: it falls with the square of the remaining part.
    pub(super) fn shrink(&mut self, done: u64) {
        if done < self.next_shrink {
            return;
        }
        self.next_shrink = done + (self.steps >> FRACTION_BITS);
        let left = u128::from(self.steps.saturating_sub(done));
        let share = (left << FRACTION_BITS) / u128::from(self.steps.max(1));
        self.mean_ns = ((u128::from(self.start_ns) * share * share) >> (2 * FRACTION_BITS)) as u64;
    }

    /// Draws a threshold, nanoseconds: twice as high half as often.
    pub(super) fn draw(&self, rng: &mut SplitMix64) -> u64 {
        let drawn = rng.next_u64() | 1;
        let zeros = drawn.leading_zeros();
        // The bits after the leading 1 interpolate to the next power of two.
        let fraction = (drawn << zeros << 1) >> (64 - FRACTION_BITS);
        let logarithm = (u64::from(zeros + 1) << FRACTION_BITS) - fraction;
        ((u128::from(self.mean_ns) * u128::from(logarithm)) >> FRACTION_BITS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_falls_to_nothing() {
        let mut threshold = Threshold::new(1 << 20, 1 << 20);
        let mut means = Vec::new();
        for done in [0, 1 << 19, 1 << 20, 1 << 21] {
            threshold.shrink(done);
            means.push(threshold.mean_ns);
        }
        assert_eq!(means, [1 << 20, 1 << 18, 0, 0]);
        assert_eq!(threshold.draw(&mut SplitMix64::new(1)), 0);
    }

    #[test]
    fn thresholds_are_twice_as_high_half_as_often() {
        let threshold = Threshold::new(1 << 20, 1);
        let mut rng = SplitMix64::new(3);
        let drawn: Vec<u64> = (0..100_000).map(|_| threshold.draw(&mut rng)).collect();
        for halvings in 1..8 {
            let above = drawn.iter().filter(|drawn| **drawn > halvings << 20).count();
            let expected = 100_000 >> halvings;
            assert!(above.abs_diff(expected) < expected / 8, "{above} above {halvings} for {expected}");
        }
    }
}
