//! Checks backward functions against finite differences of the forward functions.

use super::real::Real;

/// Reproducible pseudo-random numbers in -1 … 1.
pub(crate) fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

pub(crate) fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| f32::from_f64(value)).collect()
}

/// Compares `gradient` with central differences of `loss` at `x`, in three random directions.
pub(crate) fn check(what: &str, x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len(), "{what}");
    for seed in 11..14 {
        let direction = numbers(x.len(), seed);
        let moved = |step: f64| -> Vec<f64> { x.iter().zip(&direction).map(|(x, d)| x + step * d).collect() };
        let difference = (loss(&moved(STEP)) - loss(&moved(-STEP))) / (2.0 * STEP);
        let analytic: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
        let scale = project(gradient, gradient).sqrt();
        assert!((difference - analytic).abs() / scale < 1e-7, "{what}: {difference} against {analytic}");
    }
}

/// Scalar product with fixed random numbers: turns any output into a loss with these numbers as gradient.
pub(crate) fn project(y: &[f64], gradient: &[f64]) -> f64 {
    y.iter().zip(gradient).map(|(y, g)| y * g).sum()
}
