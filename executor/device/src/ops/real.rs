//! Number types for operations: `f32` in training, `f64` when finite differences check a backward.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

/// Floating-point number.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Rounds to this type.
    fn from_f64(value: f64) -> Self;
    /// Returns whether this is NaN.
    fn is_nan(self) -> bool;
    /// Widens to `f64`.
    fn to_f64(self) -> f64;
    /// Multiplies and adds with one rounding: `self * factor + addend`.
    #[must_use]
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// Exponential function; NaN stays NaN.
    #[must_use]
    fn exp(self) -> Self;
    /// Error function.
    #[must_use]
    fn erf(self) -> Self;

    /// Hyperbolic tangent.
    #[must_use]
    #[inline(always)]
    fn tanh(self) -> Self {
        let two = Self::ONE + Self::ONE;
        Self::ONE - two / ((self * two).exp() + Self::ONE)
    }

    /// Logistic function.
    #[must_use]
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    fn from_f64(value: f64) -> Self {
        value
    }
    fn is_nan(self) -> bool {
        f64::is_nan(self)
    }
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        f64::mul_add(self, factor, addend)
    }
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn exp(self) -> Self {
        libm::exp(self)
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    #[inline(always)]
    fn is_nan(self) -> bool {
        f32::is_nan(self)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        f32::mul_add(self, factor, addend)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn exp(self) -> Self {
        exp_f32(self)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        erf_f32(self)
    }
}

/// Exponential function within 2 units in the last place. Branch-free, so that loops compile to vector
/// instructions. Inputs below -86.9 return the result for -86.9, about 2e-38.
///
/// # Source
/// Range reduction and polynomial: Moshier, Cephes Mathematical Library, `expf`.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LEAST: f32 = -86.9;
    const MOST: f32 = 88.722_83;
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < LEAST { LEAST } else { x };
    let is_over = x > MOST;
    // NaN passes both comparisons unchanged
    let bounded = if is_over { MOST } else { x };
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = bounded - whole * LN2_HIGH - whole * LN2_LOW;
    let mut sum = 1.987_569_1e-4;
    sum = sum * rest + 1.398_199_9e-3;
    sum = sum * rest + 8.333_452e-3;
    sum = sum * rest + 4.166_579_6e-2;
    sum = sum * rest + 1.666_666_5e-1;
    sum = sum * rest + 0.5;
    let power = sum * rest * rest + rest + 1.0;
    // two factors, because 2^128 is not representable
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(126);
    let result = power * f32::from_bits(exponent << 23) * 2.0;
    if is_over { f32::INFINITY } else { result }
}

/// Error function, within 4e-7. Branch-free, so that loops compile to vector instructions.
///
/// `x P(x^2) / Q(x^2)` up to a bound, beyond which 1 is the nearest `f32`. The coefficients are a
/// least-squares fit in `f64` to `erf(x) / x`, reweighted iteratively until the maximum relative error was
/// close to minimal, 5e-8.
#[inline(always)]
fn erf_f32(x: f32) -> f32 {
    const MOST: f32 = 3.92;
    #[expect(clippy::approx_constant, reason = "a fitted coefficient, near 2 / sqrt(pi)")]
    const ABOVE: [f32; 7] = [
        1.992_525e-8,
        -1.957_669_2e-6,
        1.418_051_8e-4,
        3.699_732_5e-3,
        5.056_739e-2,
        1.998_806_7e-1,
        1.128_379_1,
    ];
    const BELOW: [f32; 5] = [9.555_837e-4, 1.434_939_4e-2, 1.149_801_7e-1, 5.104_713e-1, 1.0];
    let x = if x < -MOST { -MOST } else { x };
    let x = if x > MOST { MOST } else { x };
    let square = x * x;
    let mut above = ABOVE[0];
    for coefficient in &ABOVE[1..] {
        above = above * square + coefficient;
    }
    let mut below = BELOW[0];
    for coefficient in &BELOW[1..] {
        below = below * square + coefficient;
    }
    x * above / below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_match_the_standard_library() {
        for step in -8680..8870 {
            let x = step as f32 / 100.0 + 0.003;
            let truth = f64::from(x).exp();
            let relative = (f64::from(Real::exp(x)) - truth).abs() / truth;
            assert!(relative < 2.5e-7, "{x}: {relative}");
        }
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert_eq!(Real::exp(100.0_f32), f32::INFINITY);
        assert_eq!(Real::exp(f32::INFINITY), f32::INFINITY);
        assert!(Real::exp(-200.0_f32) < 2e-38 && Real::exp(f32::NEG_INFINITY) < 2e-38);
        assert!(Real::exp(f32::NAN).is_nan());
    }

    #[test]
    fn other_functions_are_within_rounding() {
        for step in -600..600 {
            let x = step as f32 / 50.0;
            assert!((Real::tanh(x) - x.tanh()).abs() < 3e-7);
            assert!((x.sigmoid() - 1.0 / (1.0 + (-x).exp())).abs() < 3e-7);
            assert!((Real::erf(x) - libm::erff(x)).abs() < 5e-7);
        }
        for step in -5000..5000 {
            let x = step as f32 / 1000.0 + 1e-5;
            let truth = libm::erf(f64::from(x));
            let relative = (f64::from(Real::erf(x)) - truth).abs() / truth.abs();
            assert!(relative < 5e-7, "{x}: {relative}");
        }
        assert!(Real::erf(f32::NAN).is_nan());
        assert!((Real::erf(f32::INFINITY) - 1.0).abs() < 5e-7 && Real::erf(-0.0_f32) == 0.0);
        assert!(Real::tanh(f32::NAN).is_nan() && f32::NAN.sigmoid().is_nan());
        assert_eq!((Real::tanh(90.0_f32), Real::tanh(-90.0_f32)), (1.0, -1.0));
    }
}
