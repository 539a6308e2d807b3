//! Range of pixels into which images are scaled, and the roundings of their sides.

use serde::{Deserialize, Serialize};

/// Range of pixels (width x height) into which an image is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PixelRange {
    /// Smallest number of pixels; smaller images are scaled up.
    pub min: u32,
    /// Largest number of pixels; larger images are scaled down, which has precedence over `min`.
    pub max: u32,
}

pub(super) fn area(sides: [u64; 2]) -> f64 {
    sides[0] as f64 * sides[1] as f64
}

/// Divides and rounds to the nearest integer, halves to the even one, as Python does.
pub(super) fn round_half_even(value: u64, divisor: u64) -> u64 {
    let (quotient, twice_rest) = (value / divisor, 2 * (value % divisor));
    let is_up = twice_rest > divisor || (twice_rest == divisor && quotient % 2 == 1);
    quotient + u64::from(is_up)
}
