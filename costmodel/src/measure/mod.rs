//! Chooses what to measure, and compares predictions with measurements.
//!
//! Compares predictions with measured times: errors, spreads over repeated runs, and bounds.
//!
//! [`choose_points`] decides which sizes a measuring program runs, level by level, and stops when predictions
//! between them are within an error bound. The program itself is a [`TimeSource`]: the executor, or PyTorch.
//! [`TimeCurve`] is the interpolation used for predictions; [`RepeatedRuns`], [`ErrorSummary`] and
//! [`PredictionCheck`] compare predictions with repeated runs.
//!
//! A setting's time is the **median** over the runs. The **spread** is 1.4826 times the median absolute
//! deviation between runs, divided by the median: the noise between runs with the same setting. The
//! prediction error is the distance from the median, divided by the median.

mod adaptive_grid;

use super::quantiles::{median, median_of_sorted, nearest_rank, percentile};
use serde::Serialize;

pub use adaptive_grid::{ChosenPoints, Grid, TimeCurve, TimeSource, choose_points};

/// Bound for the median error.
pub const MEDIAN_BOUND: f64 = 0.05;
/// Bound for the 95th error percentile if spreads are small.
pub const P95_BOUND: f64 = 0.12;
/// Bound for the 95th error percentile if spreads are large, as a multiple of the 95th spread percentile.
const P95_SPREADS: f64 = 1.5;
/// Ratio of standard deviation to median absolute deviation in a normal distribution.
const MAD_TO_DEVIATION: f64 = 1.4826;

/// Prediction errors, as fractions of the observed times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ErrorSummary {
    /// Number of compared predictions.
    pub count: usize,
    /// Mean relative error; above 0 if predictions are too long.
    pub bias: f64,
    /// Mean absolute error.
    pub mape: f64,
    /// Median absolute error.
    pub p50: f64,
    /// 95th percentile of absolute errors.
    pub p95: f64,
    /// Maximum absolute error.
    pub max: f64,
}

impl ErrorSummary {
    /// Summarizes relative errors, `predicted / observed - 1`; all 0 without errors.
    #[must_use]
    pub fn from_errors(errors: &[f64]) -> Self {
        let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        // Nearest rank, so that `p95` is an actual error.
        let (Some(p95), Some(&max)) = (nearest_rank(&sizes, 95), sizes.last()) else {
            return Self::default();
        };
        let n = sizes.len() as f64;
        Self {
            count: sizes.len(),
            bias: errors.iter().sum::<f64>() / n,
            mape: sizes.iter().sum::<f64>() / n,
            p50: median_of_sorted(&sizes),
            p95,
            max,
        }
    }
}

/// Time and spread for a setting that ran several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RepeatedRuns {
    /// Median over the runs, in the same unit; NaN without runs.
    pub median: f64,
    /// Spread over the runs, as a fraction of the median.
    pub spread: f64,
}

impl RepeatedRuns {
    /// Summarizes runs.
    #[must_use]
    pub fn new(runs: &[f64]) -> Self {
        let middle = median(runs.to_vec());
        let deviations = runs.iter().map(|run| (run - middle).abs()).collect();
        Self { median: middle, spread: MAD_TO_DEVIATION * median(deviations) / middle }
    }
}

/// Prediction errors, compared with the spread between the predicted runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictionCheck {
    /// Errors over all predictions.
    pub errors: ErrorSummary,
    /// Median spread.
    pub spread_median: f64,
    /// 95th spread percentile.
    pub spread_p95: f64,
    /// Bound for the 95th error percentile.
    pub p95_bound: f64,
    /// Whether median and 95th percentile are within the bounds.
    pub is_within: bool,
}

impl PredictionCheck {
    /// Compares relative errors with the same settings' spreads.
    #[must_use]
    pub fn new(errors: &[f64], spreads: &[f64]) -> Self {
        let errors = ErrorSummary::from_errors(errors);
        let spread_p95 = percentile(spreads.to_vec(), 95);
        let p95_bound = P95_BOUND.max(P95_SPREADS * spread_p95);
        Self {
            errors,
            spread_median: median(spreads.to_vec()),
            spread_p95,
            p95_bound,
            is_within: errors.p50 <= MEDIAN_BOUND && errors.p95 <= p95_bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_compared_with_both_bounds() {
        let (mut errors, mut spreads) = (vec![0.04; 20], vec![0.01; 20]);
        let check = |errors: &[f64], spreads: &[f64]| PredictionCheck::new(errors, spreads);
        let good = check(&errors, &spreads);
        assert!(good.is_within, "{good:?}");
        assert!((good.errors.p50 - 0.04).abs() < 1e-9 && (good.errors.bias - 0.04).abs() < 1e-9);
        assert!((good.p95_bound - 0.12).abs() < 1e-9);
        errors[0] = -0.3;
        assert!(check(&errors, &spreads).is_within, "one in twenty may be outside the bound");
        errors[1] = -0.13;
        assert!(!check(&errors, &spreads).is_within, "two may not");
        spreads[2..4].fill(0.1);
        let noisy = check(&errors, &spreads);
        assert!(noisy.is_within && (noisy.p95_bound - 0.15).abs() < 1e-9, "unless runs are as far apart");
        errors.fill(0.051);
        assert!(!check(&errors, &spreads).is_within, "the median's bound does not move");
    }

    #[test]
    fn the_spread_of_runs_is_relative_to_their_median() {
        let runs = RepeatedRuns::new(&[90.0, 100.0, 100.0, 110.0, 400.0]);
        assert!((runs.median - 100.0).abs() < 1e-12 && (runs.spread - 0.14826).abs() < 1e-12, "{runs:?}");
        assert!(RepeatedRuns::new(&[]).median.is_nan());
        assert_eq!(ErrorSummary::from_errors(&[]), ErrorSummary::default());
    }
}
