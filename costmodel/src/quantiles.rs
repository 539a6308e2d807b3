//! Estimates stream quantiles in bounded memory, with a bounded relative error.
//!
//! Values are counted in buckets, 256 per octave, selected by the leading bits, so a bucket's width is at
//! most 1/256 of the lower edge. Each bucket keeps the mean over all values in it. A quantile is the mean in
//! the bucket that contains the quantile's rank: **at most [`SKETCH_ERROR`] of the value away from the exact
//! quantile**, and exact if a bucket holds only equal values, as it does for whole numbers up to 512. Part
//! sketches merge to a sketch for the whole stream.
//!
//! # Source
//! Buckets by leading bits: `HdrHistogram`. Guarantee: Masson et al., "`DDSketch`", PVLDB 2019, for buckets
//! that are linear instead of logarithmic within an octave, which needs no logarithm and gives the same bits
//! everywhere.

use serde::Serialize;

/// Maximum relative quantile error.
pub const SKETCH_ERROR: f64 = 1.0 / 256.0;
/// Number of low bits that do not select the bucket: all but 8 of the 52 fraction bits.
const IGNORED_BITS: u32 = 44;

/// Stream of numbers, as counts in buckets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct QuantileSketch {
    zeros: u64,
    /// Index of the first bucket in `buckets`.
    first: usize,
    buckets: Vec<Bucket>,
    n: u64,
    sum: f64,
    least: f64,
    greatest: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Bucket {
    count: u64,
    sum: f64,
}

/// Distribution of a quantity.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Quantiles {
    /// Number of values.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Minimum value.
    pub min: f64,
    /// 5th percentile.
    pub p5: f64,
    /// First quartile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// Third quartile.
    pub p75: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum value.
    pub max: f64,
}

/// Value counts in classes of equal width.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Lower edge of the first class.
    pub min: f64,
    /// Upper edge of the last class.
    pub max: f64,
    /// Number of values in each class.
    pub counts: Vec<u64>,
}

impl QuantileSketch {
    /// Counts a value; negative values and NaN count as 0.
    pub fn insert(&mut self, value: f64) {
        let value = if value > 0.0 { value.min(f64::MAX) } else { 0.0 };
        self.least = if self.n == 0 { value } else { self.least.min(value) };
        self.greatest = self.greatest.max(value);
        self.n += 1;
        self.sum += value;
        // Subnormal numbers have no leading bit, so they would not select a bucket.
        if value < f64::MIN_POSITIVE {
            self.zeros += 1;
            return;
        }
        // The bits of positive numbers sort like the numbers.
        let bucket = self.bucket((value.to_bits() >> IGNORED_BITS) as usize);
        bucket.count += 1;
        bucket.sum += value;
    }

    /// Adds the values from a second sketch.
    pub fn merge(&mut self, other: &Self) {
        if other.n == 0 {
            return;
        }
        self.least = if self.n == 0 { other.least } else { self.least.min(other.least) };
        self.greatest = self.greatest.max(other.greatest);
        self.n += other.n;
        self.sum += other.sum;
        self.zeros += other.zeros;
        for (number, added) in (other.first..).zip(&other.buckets) {
            if added.count > 0 {
                let bucket = self.bucket(number);
                bucket.count += added.count;
                bucket.sum += added.sum;
            }
        }
    }

    /// Returns the number of values.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.n
    }

    /// Returns whether the sketch is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Returns the sum over all values.
    #[must_use]
    pub const fn sum(&self) -> f64 {
        self.sum
    }

    /// Returns the smallest value that at least this percentage of the values do not exceed; 0 without
    /// values.
    ///
    /// The minimum and the maximum value, 0 % and 100 %, are exact.
    #[must_use]
    pub fn quantile(&self, percent: u64) -> f64 {
        // In 128 bits, because 100 times the count may not fit into 64.
        let rank = (u128::from(self.n) * u128::from(percent)).div_ceil(100).max(1) as u64;
        if percent == 0 {
            return self.least;
        }
        if rank >= self.n {
            return self.greatest;
        }
        let mut passed = 0;
        for (value, count) in self.values() {
            passed += count;
            if passed >= rank {
                return value.clamp(self.least, self.greatest);
            }
        }
        self.greatest
    }

    /// Returns the number of values above a limit, exact except for values in the limit's own bucket.
    #[must_use]
    pub fn above(&self, limit: f64) -> u64 {
        self.values().filter(|(value, _)| *value > limit).map(|(_, count)| count).sum()
    }

    /// Summarizes the distribution.
    #[must_use]
    pub fn quantiles(&self) -> Quantiles {
        let mean = if self.n > 0 { (self.sum / self.n as f64).clamp(self.least, self.greatest) } else { 0.0 };
        Quantiles {
            n: self.n as usize,
            mean,
            min: self.quantile(0),
            p5: self.quantile(5),
            p25: self.quantile(25),
            p50: self.quantile(50),
            p75: self.quantile(75),
            p95: self.quantile(95),
            p99: self.quantile(99),
            max: self.quantile(100),
        }
    }

    /// Counts the values in classes of equal width; a bucket counts in the class that contains the bucket
    /// mean.
    ///
    /// # Panics
    /// If `classes` is 0.
    #[must_use]
    pub fn histogram(&self, classes: usize) -> Histogram {
        assert!(classes > 0, "a histogram has at least one class");
        let (min, max) = (self.least, self.greatest);
        let mut counts = vec![0; classes];
        for (value, count) in self.values() {
            let place = if max > min { (value - min) / (max - min) * classes as f64 } else { 0.0 };
            counts[(place.max(0.0) as usize).min(classes - 1)] += count;
        }
        Histogram { min, max, counts }
    }

    /// Iterates over the means and counts in all non-empty buckets, ascending.
    fn values(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let zeros = (self.zeros > 0).then_some((0.0, self.zeros));
        let filled = self.buckets.iter().filter(|bucket| bucket.count > 0);
        zeros.into_iter().chain(filled.map(|bucket| (bucket.sum / bucket.count as f64, bucket.count)))
    }

    /// Returns the bucket with this number; makes room for it if needed.
    fn bucket(&mut self, number: usize) -> &mut Bucket {
        if self.buckets.is_empty() {
            self.first = number;
        }
        if number < self.first {
            let missing = self.first - number;
            self.buckets.splice(0..0, std::iter::repeat_n(Bucket::default(), missing));
            self.first = number;
        }
        let place = number - self.first;
        if place >= self.buckets.len() {
            self.buckets.resize(place + 1, Bucket::default());
        }
        &mut self.buckets[place]
    }
}

/// Returns the median, the mean of the middle two for an even count; NaN without values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    if values.is_empty() { f64::NAN } else { median_of_sorted(&values) }
}

/// Returns the smallest of sorted values that `percent` of 100 do not exceed; `None` without values.
#[must_use]
pub fn nearest_rank<T: Copy>(sorted: &[T], percent: usize) -> Option<T> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Returns the smallest value that `percent` of 100 do not exceed; NaN without values.
#[must_use]
pub fn percentile(mut values: Vec<f64>, percent: usize) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    nearest_rank(&values, percent).unwrap_or(f64::NAN)
}

/// Returns the middle value of sorted values, or the mean of the two in the middle.
///
/// # Panics
/// If there is no value.
pub(crate) fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_values_of_the_list() {
        let values: Vec<f64> = (1..=60).rev().map(f64::from).collect();
        assert_eq!((percentile(values.clone(), 95), percentile(values.clone(), 50)), (57.0, 30.0));
        assert_eq!((median(values), median(vec![3.0, 1.0, 2.0])), (30.5, 2.0));
        assert_eq!((nearest_rank(&[4_u64], 1), nearest_rank::<u64>(&[], 95)), (Some(4), None));
        assert!(median(Vec::new()).is_nan() && percentile(Vec::new(), 95).is_nan());
    }

    fn sketch(values: &[f64]) -> QuantileSketch {
        let mut sketch = QuantileSketch::default();
        for value in values {
            sketch.insert(*value);
        }
        sketch
    }

    #[test]
    fn quantiles_of_one_to_hundred_are_their_own_percent() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let quantiles = sketch(&values).quantiles();
        let shown =
            [quantiles.min, quantiles.p5, quantiles.p50, quantiles.p99, quantiles.max, quantiles.mean];
        assert_eq!(shown.map(|value| (value * 10.0) as u32), [10, 50, 500, 990, 1000, 505]);
    }

    #[test]
    fn an_even_number_of_values_has_the_mean_of_the_middle_two_as_median() {
        assert!((median_of_sorted(&[1.0, 2.0, 4.0, 9.0]) - 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_histogram_counts_every_value_once() {
        let histogram = sketch(&[0.0, 1.0, 2.0, 3.0, 4.0]).histogram(2);
        assert_eq!((histogram.min as u32, histogram.max as u32, histogram.counts), (0, 4, vec![2, 3]));
    }

    #[test]
    fn what_is_no_number_counts_as_zero() {
        let sketch = sketch(&[f64::NAN, -3.0, f64::NEG_INFINITY, 1e-320, f64::INFINITY]);
        assert_eq!((sketch.len(), sketch.above(0.0)), (5, 1));
        assert!(sketch.quantiles().max.is_finite());
        assert_eq!(QuantileSketch::default().quantiles().n, 0);
    }

    proptest! {
        #[test]
        fn quantiles_are_within_the_stated_error(
            values in prop::collection::vec((0.0f64..1.0, -12i32..12), 1..300), percent in 0u64..=100,
        ) {
            let mut values: Vec<f64> = values.iter().map(|(value, scale)| value * 10f64.powi(*scale)).collect();
            let found = sketch(&values).quantile(percent);
            values.sort_by(f64::total_cmp);
            let exact = values[(values.len() * percent as usize).div_ceil(100).max(1) - 1];
            prop_assert!((found - exact).abs() <= SKETCH_ERROR * exact * (1.0 + 1e-12), "{found} {exact}");
        }

        #[test]
        fn parts_add_up_to_the_whole(
            left in prop::collection::vec(0.0f64..1e6, 0..50), right in prop::collection::vec(0.0f64..1e-3, 0..50),
        ) {
            let mut merged = sketch(&left);
            merged.merge(&sketch(&right));
            let whole = sketch(&[left, right].concat());
            prop_assert_eq!(merged.len(), whole.len());
            for percent in [0, 5, 50, 95, 100] {
                let (a, b) = (merged.quantile(percent), whole.quantile(percent));
                prop_assert!((a - b).abs() <= 1e-9 * b.abs(), "{a} {b}");
            }
        }
    }
}
