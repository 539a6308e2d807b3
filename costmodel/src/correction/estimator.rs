//! Estimates a factor per shape bin from measured microbatches, by least squares over a Cholesky
//! factorization.
//!
//! **The estimator.** A microbatch `m` holds samples from several bins; `w_mb` is the share of bin `b` in the
//! microbatch's predicted time, and `t_m` is the measured time divided by the predicted time, minus 1. With
//! `g_b` a bin's factor minus 1,
//!
//! ```text
//! t_m = sum_b w_mb g_b + noise
//! ```
//!
//! Credit is split by regression: a bin is charged with the extra time that microbatches take *because* they
//! contain more of it. `g` minimizes
//!
//! ```text
//! sum_m huber(r_m / s)  +  sum_b (g_b / 1.0)² / 2  +  sum_(b, next seen bin c) ((g_b - g_c) / 0.5)² / 2
//! ```
//!
//! with residuals `r_m = t_m - sum_b w_mb g_b` and `s` the residual scale, 1.4826 times the median absolute
//! residual. Huber's loss (quadratic up to 1.345 s, linear beyond) limits stragglers: a microbatch that
//! waited for something counts no more than a microbatch at the edge. The second term shrinks towards no
//! correction, the third towards neighbors; both are worth at most one observation, so they decide only if
//! there are few observations. The minimum is found by iteratively reweighted least squares with Cholesky's
//! method.
//!
//! A deviation that all bins share, such as a machine slower than the measured machine, does not show in any
//! single bin: only the sum over the bins is well known. Therefore a **common** deviation `c` for all bins
//! whose own deviation is within noise is estimated in the same way from what the significant bins leave,
//! `t_m - sum_significant w_mb g_b = c sum_other w_mb + noise`. It also applies to bins that were never
//! observed.
//!
//! A factor is used only if it is more than 4 standard errors and more than 2 % away from 1, and the bin has
//! at least 1 % of the predicted time; otherwise it is 1, so that noise corrects nothing.
//!
//! Deterministic: `+ - * / sqrt` in a fixed order, correctly rounded; the same observations in the same order
//! give the same bits everywhere.
//!
//! # Source
//! Huber, "Robust Estimation of a Location Parameter", 1964. DFLOP (arXiv:2603.25120, section 3.4.3) corrects
//! per input shape and leaves the form open; this form was defined for this project.

use crate::quantiles::median_of_sorted;
use std::collections::{BTreeMap, BTreeSet};

/// Residual, in scales, from which Huber's loss is linear: 95 % efficient under normal noise.
const HUBER: f64 = 1.345;
/// Ratio of standard deviation to median absolute residual in a normal distribution.
const MAD_TO_DEVIATION: f64 = 1.4826;
/// Minimum residual scale; clocks are not more exact than this.
const SCALE_MIN: f64 = 1e-3;
/// Prior standard deviation for `g`.
const PRIOR_DEVIATION: f64 = 1.0;
/// Prior standard deviation for the difference in `g` between neighbors.
const NEIGHBOR_DEVIATION: f64 = 0.5;
/// Number of standard errors by which a factor must differ from 1 to be used.
const SIGNIFICANT_ERRORS: f64 = 4.0;
/// Minimum deviation from 1 that is corrected.
const DEAD_BAND: f64 = 0.02;
/// Minimum share of the predicted time for a bin with a separate factor.
const SHARE_MIN: f64 = 0.01;
/// Maximum number of reweightings.
const ROUNDS_MAX: usize = 50;
/// Change in `g` below which reweighting stops.
const CHANGE_MIN: f64 = 1e-7;

/// Microbatch as a regression equation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Equation {
    /// Measured divided by predicted time, minus 1.
    pub(super) target: f64,
    /// Bins with shares of the predicted time; shares add up to 1.
    pub(super) shares: Vec<(usize, f64)>,
}

/// Estimated deviation for a bin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Deviation {
    /// Factor minus 1.
    pub(super) excess: f64,
    /// Standard error of `excess`.
    pub(super) error: f64,
}

impl Deviation {
    /// Returns the factor; 1 if the deviation is within noise.
    pub(super) fn factor(self) -> f64 {
        let is_significant =
            self.excess.abs() > SIGNIFICANT_ERRORS * self.error && self.excess.abs() > DEAD_BAND;
        if is_significant { 1.0 + self.excess } else { 1.0 }
    }
}

/// Factors on predicted times.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Factors {
    /// Factors for bins whose own deviation is significant.
    pub(super) bins: BTreeMap<usize, f64>,
    /// Factor for all other bins, observed or not.
    pub(super) common: f64,
}

/// Estimates the factors that differ significantly from 1.
pub(super) fn factors(equations: &[Equation]) -> Factors {
    let own = estimate(equations).into_iter().filter(|(bin, _)| has_weight(equations, *bin));
    let own = own.map(|(bin, deviation)| (bin, deviation.factor()));
    let bins: BTreeMap<usize, f64> = own.filter(|(_, factor)| (factor - 1.0).abs() > 0.0).collect();
    // Removes the significant bins from an equation; the remaining bins share what is left.
    let rest = |equation: &Equation| {
        let (mut target, mut others) = (equation.target, 0.0);
        for (bin, share) in &equation.shares {
            match bins.get(bin) {
                Some(factor) => target -= share * (factor - 1.0),
                None => others += share,
            }
        }
        (others > 0.0).then(|| (target, vec![(0, others)]))
    };
    let rows: Vec<(f64, Vec<(usize, f64)>)> = equations.iter().filter_map(rest).collect();
    if rows.is_empty() {
        return Factors { bins, common: 1.0 };
    }
    let (excess, errors) = solve(&rows, 1);
    Factors { bins, common: Deviation { excess: excess[0], error: errors[0] }.factor() }
}

/// Whether a bin has enough of the predicted time for a separate factor.
fn has_weight(equations: &[Equation], bin: usize) -> bool {
    let shares = equations.iter().flat_map(|equation| &equation.shares);
    let share: f64 = shares.filter(|(of, _)| *of == bin).map(|(_, share)| share).sum();
    share >= SHARE_MIN * equations.len() as f64
}

/// Estimates the deviation for every bin that occurs in the equations.
fn estimate(equations: &[Equation]) -> BTreeMap<usize, Deviation> {
    let bins: BTreeMap<usize, usize> = {
        let seen: BTreeSet<usize> =
            equations.iter().flat_map(|equation| &equation.shares).map(|(bin, _)| *bin).collect();
        seen.into_iter().enumerate().map(|(place, bin)| (bin, place)).collect()
    };
    if bins.is_empty() {
        return BTreeMap::new();
    }
    let place = |(bin, share): &(usize, f64)| (bins[bin], *share);
    let rows: Vec<(f64, Vec<(usize, f64)>)> = equations
        .iter()
        .map(|equation| (equation.target, equation.shares.iter().map(place).collect()))
        .collect();
    let (excess, errors) = solve(&rows, bins.len());
    bins.into_iter()
        .map(|(bin, place)| (bin, Deviation { excess: excess[place], error: errors[place] }))
        .collect()
}

/// Solves by iteratively reweighted least squares; returns `g` and the standard errors.
fn solve(rows: &[(f64, Vec<(usize, f64)>)], bins: usize) -> (Vec<f64>, Vec<f64>) {
    let mut excess = vec![0.0; bins];
    let mut errors = vec![f64::INFINITY; bins];
    for _ in 0..ROUNDS_MAX {
        let residuals: Vec<f64> = rows.iter().map(|row| residual(row, &excess)).collect();
        let scale = scale(&residuals);
        let (matrix, right) = normal_equations(rows, &residuals, scale, bins);
        // The prior makes the matrix positive definite.
        let Some(cholesky) = Cholesky::new(&matrix, bins) else { break };
        let next = cholesky.solve(&right);
        let change = next.iter().zip(&excess).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        excess = next;
        if change < CHANGE_MIN {
            errors = cholesky.inverse_diagonal().into_iter().map(f64::sqrt).collect();
            return (excess, errors);
        }
    }
    let residuals: Vec<f64> = rows.iter().map(|row| residual(row, &excess)).collect();
    let (matrix, _) = normal_equations(rows, &residuals, scale(&residuals), bins);
    if let Some(cholesky) = Cholesky::new(&matrix, bins) {
        errors = cholesky.inverse_diagonal().into_iter().map(f64::sqrt).collect();
    }
    (excess, errors)
}

fn residual((target, shares): &(f64, Vec<(usize, f64)>), excess: &[f64]) -> f64 {
    target - shares.iter().map(|(place, share)| share * excess[*place]).sum::<f64>()
}

fn scale(residuals: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    (MAD_TO_DEVIATION * median_of_sorted(&sizes)).max(SCALE_MIN)
}

/// Builds the weighted normal equations, with the priors.
fn normal_equations(
    rows: &[(f64, Vec<(usize, f64)>)],
    residuals: &[f64],
    scale: f64,
    bins: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut matrix, mut right) = (vec![0.0; bins * bins], vec![0.0; bins]);
    for ((target, shares), residual) in rows.iter().zip(residuals) {
        // Weight of Huber's loss: 1 up to the limit, then falling with the residual.
        let robust = (HUBER * scale / residual.abs().max(f64::MIN_POSITIVE)).min(1.0);
        let weight = robust / (scale * scale);
        for &(row, row_share) in shares {
            right[row] += weight * row_share * target;
            for &(column, column_share) in shares {
                matrix[row * bins + column] += weight * row_share * column_share;
            }
        }
    }
    let neighbors = 1.0 / (NEIGHBOR_DEVIATION * NEIGHBOR_DEVIATION);
    for bin in 0..bins {
        matrix[bin * bins + bin] += 1.0 / (PRIOR_DEVIATION * PRIOR_DEVIATION);
        if bin + 1 < bins {
            let next = bin + 1;
            matrix[bin * bins + bin] += neighbors;
            matrix[next * bins + next] += neighbors;
            matrix[bin * bins + next] -= neighbors;
            matrix[next * bins + bin] -= neighbors;
        }
    }
    (matrix, right)
}

/// Symmetric positive definite matrix, factored as `L Lᵀ`.
#[derive(Debug)]
pub(super) struct Cholesky {
    size: usize,
    lower: Vec<f64>,
}

impl Cholesky {
    /// Factors a matrix in row-major order; `None` if it is not positive definite.
    pub(super) fn new(matrix: &[f64], size: usize) -> Option<Self> {
        let mut lower = vec![0.0; size * size];
        for row in 0..size {
            for column in 0..=row {
                let dot: f64 = (0..column).map(|k| lower[row * size + k] * lower[column * size + k]).sum();
                let rest = matrix[row * size + column] - dot;
                if row == column {
                    if rest.is_nan() || rest <= 0.0 {
                        return None;
                    }
                    lower[row * size + row] = rest.sqrt();
                } else {
                    lower[row * size + column] = rest / lower[column * size + column];
                }
            }
        }
        Some(Self { size, lower })
    }

    /// Solves for a single right-hand side.
    pub(super) fn solve(&self, right: &[f64]) -> Vec<f64> {
        let mut x = right.to_vec();
        for row in 0..self.size {
            let dot: f64 = (0..row).map(|k| self.at(row, k) * x[k]).sum();
            x[row] = (x[row] - dot) / self.at(row, row);
        }
        for row in (0..self.size).rev() {
            let dot: f64 = (row + 1..self.size).map(|k| self.at(k, row) * x[k]).sum();
            x[row] = (x[row] - dot) / self.at(row, row);
        }
        x
    }

    /// Returns the diagonal of the inverse matrix.
    pub(super) fn inverse_diagonal(&self) -> Vec<f64> {
        let unit = |at: usize| (0..self.size).map(|k| if k == at { 1.0 } else { 0.0 }).collect::<Vec<f64>>();
        (0..self.size).map(|at| self.solve(&unit(at))[at]).collect()
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.lower[row * self.size + column]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equation(target: f64, shares: &[(usize, f64)]) -> Equation {
        Equation { target, shares: shares.to_vec() }
    }

    #[test]
    fn credit_goes_to_the_bin_that_is_there_when_it_is_slow() {
        let mut equations = Vec::new();
        for at in 0..40 {
            let slow_share = f64::from(at % 4) / 4.0;
            equations.push(equation(slow_share, &[(7, slow_share), (20, 1.0 - slow_share)]));
        }
        let deviations = estimate(&equations);
        assert!((deviations[&7].factor() - 2.0).abs() < 0.02, "{deviations:?}");
        assert!((deviations[&20].factor() - 1.0).abs() < 1e-12, "{deviations:?}");
    }

    #[test]
    fn stragglers_do_not_make_a_shape_slow() {
        let equations: Vec<Equation> = (0..200)
            .map(|at| {
                let noise = f64::from(at * 37 % 21 - 10) / 1000.0;
                let straggles = if at % 25 == 0 { 2.0 } else { 0.0 };
                equation(noise + straggles, &[(at as usize % 5, 1.0)])
            })
            .collect();
        let deviations = estimate(&equations);
        assert!(
            deviations.values().all(|deviation| (deviation.factor() - 1.0).abs() < 1e-12),
            "{deviations:?}"
        );
    }

    #[test]
    fn a_bin_seen_once_is_shrunk_and_not_trusted() {
        let mut equations: Vec<Equation> =
            (0..50).map(|at| equation(f64::from(at * 17 % 11 - 5) / 100.0, &[(3, 1.0)])).collect();
        equations.push(equation(0.06, &[(3, 0.9), (9, 0.1)]));
        let deviations = estimate(&equations);
        assert!((deviations[&9].factor() - 1.0).abs() < 1e-12, "{deviations:?}");
        assert!(deviations[&9].excess.abs() < 0.6);
    }

    #[test]
    fn what_all_bins_share_is_a_common_factor_beside_the_clear_ones() {
        let noise = |at: usize| (at * 37 % 21) as f64 / 1000.0 - 0.01;
        let spread_out = |at: usize| (0..6).map(|bin| (10 + (at * 5 + bin * 7) % 40, 1.0 / 6.0)).collect();
        let slower: Vec<Equation> =
            (0..60).map(|at| Equation { target: 0.08 + noise(at), shares: spread_out(at) }).collect();
        let found = factors(&slower);
        let of = |bin: usize| found.bins.get(&bin).copied().unwrap_or(found.common);
        assert!(
            (10..50).all(|bin| (of(bin) - 1.08).abs() < 0.05) && (found.common - 1.08).abs() < 0.01,
            "{found:?}"
        );
        let same: Vec<Equation> =
            (0..60).map(|at| Equation { target: noise(at), shares: spread_out(at) }).collect();
        assert_eq!(factors(&same), Factors { bins: BTreeMap::new(), common: 1.0 });
    }

    #[test]
    fn a_slow_bin_leaves_nothing_for_the_others() {
        let slow = |at: usize| if at.is_multiple_of(3) { 0.5 } else { 0.0 };
        let equations: Vec<Equation> =
            (0..90).map(|at| equation(slow(at), &[(7, slow(at)), (20 + at % 8, 1.0 - slow(at))])).collect();
        let found = factors(&equations);
        assert!((found.bins[&7] - 2.0).abs() < 0.05 && (found.common - 1.0).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn nothing_seen_says_nothing() {
        assert!(estimate(&[]).is_empty());
        assert_eq!(factors(&[]), Factors { bins: BTreeMap::new(), common: 1.0 });
    }

    #[test]
    fn solutions_and_inverses_are_those_of_the_matrix() {
        let matrix = [4.0, 2.0, 0.6, 2.0, 5.0, 1.0, 0.6, 1.0, 3.0];
        let cholesky = Cholesky::new(&matrix, 3).unwrap();
        let x = cholesky.solve(&[1.0, 2.0, 3.0]);
        for row in 0..3 {
            let product: f64 = (0..3).map(|k| matrix[row * 3 + k] * x[k]).sum();
            assert!((product - [1.0, 2.0, 3.0][row]).abs() < 1e-12);
        }
        let [a, ..] = cholesky.inverse_diagonal()[..] else { panic!("three") };
        assert!((a - 14.0 / 44.6).abs() < 1e-9, "{a}");
        assert!(Cholesky::new(&[1.0, 2.0, 2.0, 1.0], 2).is_none());
    }
}
