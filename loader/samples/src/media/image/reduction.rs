//! Chooses how much a JPEG is reduced during decoding.
//!
//! An inverse DCT with fewer frequencies produces a smaller image with less work. Halves, quarters and
//! eighths have fast code; other ratios cost more than they save.

/// Maximum number of halvings: an 8 x 8 block becomes a single pixel.
#[cfg(any(feature = "turbojpeg", test))]
const HALVINGS_MAX: u32 = 3;

/// Reduction by a power of two on both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::media) struct Reduction(u32);

impl Reduction {
    /// No reduction.
    pub(in crate::media) const NONE: Self = Self(0);

    /// Returns the largest reduction that keeps `length` pixels at least `wanted` long.
    #[cfg(any(feature = "turbojpeg", test))]
    pub(in crate::media) fn at_least(length: f64, wanted: u32) -> Self {
        let leaves = |halvings: &u32| length / f64::from(1u32 << halvings) >= f64::from(wanted);
        Self((1..=HALVINGS_MAX).rev().find(leaves).unwrap_or(0))
    }

    /// Returns the number of halvings.
    #[cfg(feature = "turbojpeg")]
    pub(super) fn log2(self) -> u32 {
        self.0
    }

    /// Returns the reduced length, rounded up.
    #[cfg(feature = "turbojpeg")]
    pub(super) fn apply(self, length: u32) -> u32 {
        length.div_ceil(1 << self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_never_shorter_than_wanted() {
        let table = [(223.0, 0), (447.9, 0), (448.0, 1), (895.0, 1), (896.0, 2), (1792.0, 3), (9000.0, 3)];
        for (length, halvings) in table {
            assert_eq!(Reduction::at_least(length, 224), Reduction(halvings), "{length}");
        }
    }
}
