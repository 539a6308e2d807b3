//! Computes source pixel weights for a resampled pixel, bit-identical to Pillow.
//!
//! Weights are computed in double precision and stored as integers with 22 fractional bits. When an image
//! shrinks, the filter is stretched by the same factor, so that every source pixel contributes.

/// Number of fractional bits in a weight: 32, minus 8 pixel bits, minus 2 because filters overshoot.
pub(super) const WEIGHT_BITS: u32 = 32 - 8 - 2;

/// Resampling filter, with Pillow's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Triangle with radius 1.
    Bilinear,
    /// Cubic convolution with radius 2 and a = -1/2.
    Bicubic,
    /// Windowed sinc with radius 3.
    Lanczos,
}

impl Filter {
    /// Returns the filter with this number in `PIL.Image.Resampling`, as used in processor configurations.
    #[must_use]
    pub const fn from_pillow(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }

    const fn radius(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, distance: f64) -> f64 {
        match self {
            Self::Bilinear => (1.0 - distance.abs()).max(0.0),
            Self::Bicubic => bicubic(distance.abs()),
            Self::Lanczos if (-3.0..3.0).contains(&distance) => sinc(distance) * sinc(distance / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

/// Evaluates the bicubic kernel in Pillow's order of operations; a different order would round differently.
#[expect(clippy::suboptimal_flops, reason = "a fused operation rounds once where Pillow rounds twice")]
fn bicubic(distance: f64) -> f64 {
    const A: f64 = -0.5;
    if distance < 1.0 {
        ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0
    } else if distance < 2.0 {
        (((distance - 5.0) * distance + 8.0) * distance - 4.0) * A
    } else {
        0.0
    }
}

fn sinc(distance: f64) -> f64 {
    if distance == 0.0 {
        return 1.0;
    }
    let angle = distance * std::f64::consts::PI;
    angle.sin() / angle
}

/// Image axis: length, and position of the stored pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisExtent {
    /// Number of pixels, including padding.
    pub(super) whole: usize,
    /// Number of padding pixels before the first stored pixel.
    pub(super) before: usize,
    /// Number of stored pixels.
    pub(super) stored: usize,
}

/// Weights for a resampled pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PixelWeights {
    /// First stored pixel with a weight.
    pub(super) start: usize,
    first_weight: usize,
    weights: usize,
    /// Sum of the weights on padding.
    pub(super) padding_weight: i32,
}

/// Weights for an axis; reuses memory.
#[derive(Clone, Debug, Default)]
pub(super) struct AxisWeights {
    pub(super) windows: Vec<PixelWeights>,
    weights: Vec<i32>,
    exact: Vec<f64>,
}

impl AxisWeights {
    /// Computes the weights for the pixels `wanted` out of `resampled` pixels.
    pub(super) fn compute(
        &mut self,
        filter: Filter,
        length: AxisExtent,
        resampled: usize,
        wanted: std::ops::Range<usize>,
    ) {
        self.windows.clear();
        self.weights.clear();
        let scale = length.whole as f64 / resampled as f64;
        // The filter is stretched only for shrinking; enlarging interpolates with the natural radius.
        let stretch = scale.max(1.0);
        let radius = filter.radius() * stretch;
        for pixel in wanted {
            let center = (pixel as f64 + 0.5) * scale;
            let start = (center - radius + 0.5).max(0.0) as usize;
            let end = ((center + radius + 0.5) as usize).min(length.whole);
            self.weigh(filter, start..end, center, 1.0 / stretch);
            self.push_weights(start, length);
        }
    }

    /// Computes the weights for consecutive pixels around a center, with sum 1.
    fn weigh(&mut self, filter: Filter, pixels: std::ops::Range<usize>, center: f64, squeeze: f64) {
        self.exact.clear();
        self.exact.extend(pixels.map(|pixel| filter.weight((pixel as f64 - center + 0.5) * squeeze)));
        // Summed sequentially, as Pillow does; a different order would round differently.
        let total = self.exact.iter().fold(0.0, |total, weight| total + weight);
        if total != 0.0 {
            self.exact.iter_mut().for_each(|weight| *weight /= total);
        }
    }

    /// Stores the weights on stored pixels without leading and trailing zeros, and the sum of padding
    /// weights.
    fn push_weights(&mut self, start: usize, length: AxisExtent) {
        let stored = length.before..length.before + length.stored;
        let first_weight = self.weights.len();
        let mut window = PixelWeights { start: 0, first_weight, weights: 0, padding_weight: 0 };
        for (position, weight) in (start..).zip(&self.exact) {
            let weight = fixed_point(*weight);
            if !stored.contains(&position) {
                window.padding_weight = window.padding_weight.wrapping_add(weight);
            } else if weight != 0 || self.weights.len() > first_weight {
                if self.weights.len() == first_weight {
                    window.start = position - length.before;
                }
                self.weights.push(weight);
            }
        }
        while self.weights.len() > first_weight && self.weights.last() == Some(&0) {
            self.weights.pop();
        }
        window.weights = self.weights.len() - first_weight;
        self.windows.push(window);
    }

    pub(super) fn window_weights(&self, window: &PixelWeights) -> &[i32] {
        &self.weights[window.first_weight..window.first_weight + window.weights]
    }

    /// Returns the stored pixels that any window needs; empty if none are needed.
    pub(super) fn source_range(&self) -> std::ops::Range<usize> {
        let used = || self.windows.iter().filter(|window| window.weights > 0);
        let start = used().map(|window| window.start).min().unwrap_or(0);
        let end = used().map(|window| window.start + window.weights).max().unwrap_or(0);
        start..end
    }
}

/// Rounds half away from zero, by adding a half and truncating, as Pillow does.
fn fixed_point(weight: f64) -> i32 {
    let scaled = weight * f64::from(1 << WEIGHT_BITS);
    (if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILTERS: [Filter; 3] = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];

    fn unpadded(stored: usize) -> AxisExtent {
        AxisExtent { whole: stored, before: 0, stored }
    }

    #[test]
    fn an_unchanged_length_takes_every_pixel_as_it_is() {
        let mut axis = AxisWeights::default();
        for filter in FILTERS {
            axis.compute(filter, unpadded(9), 9, 0..9);
            for (pixel, window) in axis.windows.iter().enumerate() {
                assert_eq!((window.start, axis.window_weights(window)), (pixel, &[1 << WEIGHT_BITS][..]));
            }
        }
    }

    #[test]
    fn weights_add_up_to_one_and_padding_takes_its_share() {
        let mut axis = AxisWeights::default();
        for filter in FILTERS {
            for (stored, before, after, resampled) in [(700, 0, 0, 64), (5, 3, 40, 17), (1, 0, 999, 384)] {
                let length = AxisExtent { whole: before + stored + after, before, stored };
                axis.compute(filter, length, resampled, 0..resampled);
                assert_eq!(axis.windows.len(), resampled);
                for window in &axis.windows {
                    let weights = axis.window_weights(window);
                    let total = weights.iter().sum::<i32>() + window.padding_weight;
                    assert!((total - (1 << WEIGHT_BITS)).abs() < 600, "{total}");
                    assert!(window.start + weights.len() <= stored);
                }
            }
        }
    }

    #[test]
    fn a_part_of_the_pixels_has_the_weights_of_the_whole() {
        let (mut whole, mut part) = (AxisWeights::default(), AxisWeights::default());
        whole.compute(Filter::Bicubic, unpadded(1000), 300, 0..300);
        part.compute(Filter::Bicubic, unpadded(1000), 300, 100..200);
        for (one, other) in whole.windows[100..200].iter().zip(&part.windows) {
            assert_eq!(one.start, other.start);
            assert_eq!(whole.window_weights(one), part.window_weights(other));
        }
        assert!(part.source_range().start > 300 && part.source_range().end < 700);
    }
}
