//! Creates synthetic benchmark inputs, the same on every machine.
//!
//! Everything is drawn from [`Random`] with a fixed seed: sample shapes, a profile and partition problems for
//! [`planning`], and [`archives`] with images for the loader. Nothing is measured here; the benchmarks are in
//! `benches/`, the loop to compare with in `src/bin/bare_loop.rs`.

pub mod archives;
/// Partition problem families, shared with the balancer tests.
#[path = "../../balancer/tests/families/mod.rs"]
pub mod families;
pub mod planning;

use dflop_costmodel::random::mix64;

/// Generator that hashes a counter.
#[derive(Debug, Clone)]
pub struct Random {
    seed: u64,
    draws: u64,
}

impl Random {
    /// Starts the sequence for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed: mix64(seed), draws: 0 }
    }

    /// Draws a number in `0..1`.
    pub fn fraction(&mut self) -> f64 {
        self.draws += 1;
        (mix64(self.seed ^ self.draws) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Draws an integer in `0..end`; 0 if the range is empty.
    pub fn below(&mut self, end: u32) -> u32 {
        (self.fraction() * f64::from(end)) as u32
    }

    /// Draws from a log-normal distribution with this median and this standard deviation of the logarithm.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        // Box and Muller, 1958; 1 - fraction is never 0.
        let radius = (-2.0 * (1.0 - self.fraction()).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.fraction();
        median * (sigma * radius * angle.cos()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_sequence() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..5).map(|_| random.below(1_000_000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn half_of_a_log_normal_sample_is_below_its_median() {
        let mut random = Random::new(3);
        let below = (0..10_000).filter(|_| random.log_normal(7.0, 0.8) < 7.0).count();
        assert!((4_800..5_200).contains(&below), "{below}");
    }
}
