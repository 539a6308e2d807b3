//! Fits microbatch times to measured times: a floor, a constant, and a scale for each module. Ranks whose
//! times exceed the fit whatever they run are slow.
//!
//! ```text
//! measured = max(floor, base + sum over modules of scale * added)
//! ```
//!
//! `added` is the time that the microbatch's samples add by the uncorrected prediction. The scales cover a
//! device or a profile that is off as a whole, the floor and the constant cover what no stated rate knows.
//! They have few unknowns, so about twenty microbatches determine them.
//!
//! Residuals are relative to the measured time. The loss is Huber's at first, then Tukey's biweight, which
//! leaves out outliers: stragglers, and microbatches with a shape that takes longer, for which shape factors
//! are learned afterwards. Scales have a prior around the common ratio over all microbatches, the constant
//! has a prior around the known constant, which decide if microbatches are too similar to tell them apart.
//!
//! Microbatches at the floor take the same time whatever is in them. Several floors are tried; the floor with
//! the smallest errors counts if it explains the times clearly better than none.
//!
//! Deterministic, like the factor estimator: `+ - * / sqrt` in a fixed order.
//!
//! # Source
//! Huber, "Robust Estimation of a Location Parameter", 1964; Beaton and Tukey, "The Fitting of Power Series",
//! 1974, for the biweight.

use std::collections::BTreeMap;

use serde::Serialize;

use super::estimator::Cholesky;
use super::table::MicrobatchConstants;
use crate::MODULES_MAX;
use crate::quantiles::{median, median_of_sorted};

/// Number of unknowns above a floor: the constant, and a scale for each module.
const UNKNOWNS: usize = 1 + MODULES_MAX;
/// Residual, in scales, from which Huber's loss is linear, and beyond which Tukey's weight is 0: both 95 %
/// efficient under normal noise.
const HUBER: f64 = 1.345;
const BIWEIGHT: f64 = 4.685;
const MAD_TO_DEVIATION: f64 = 1.4826;
/// Minimum residual scale.
const SCALE_MIN: f64 = 2e-3;
/// Number of reweightings with each loss.
const ROUNDS: usize = 8;
/// Prior standard deviation for a scale, as a fraction of the common ratio.
const SCALE_DEVIATION: f64 = 0.5;
/// Prior standard deviation for the constant, as a fraction of the median time.
const BASE_DEVIATION: f64 = 0.2;
/// Error above which a microbatch counts no more when fits are compared.
const ERROR_MAX: f64 = 0.3;
/// Number of floors to try, and of rounds in which microbatches are divided by each.
const FLOORS: usize = 16;
const FLOOR_ROUNDS: usize = 6;
/// Minimum number of microbatches at a floor, and above it.
const FLOOR_MIN: usize = 3;
/// Minimum ratio between the times that samples add in a floor's microbatches.
const FLOOR_RANGE: f64 = 1.3;
/// Maximum ratio of errors with a floor to errors without.
const FLOOR_GAIN: f64 = 0.8;

/// Measured microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Timed {
    pub(super) measured_ns: f64,
    /// Time that the samples add, by module, without correction.
    pub(super) added_ns: [f64; MODULES_MAX],
    /// Data-parallel rank that ran the microbatch.
    pub(super) rank: u32,
}

/// Fitted microbatch time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MicrobatchFit {
    pub(super) floor_ns: f64,
    pub(super) base_ns: f64,
    /// Factor on the time that samples add, by module.
    pub(super) scales: [f64; MODULES_MAX],
}

impl MicrobatchFit {
    /// Creates a fit that equals the predictions.
    pub(super) fn known(constants: MicrobatchConstants) -> Self {
        let [floor_ns, base_ns] = [constants.floor_ns, constants.base_ns].map(|ns| ns as f64);
        Self { floor_ns, base_ns, scales: [1.0; MODULES_MAX] }
    }

    /// Fits at least one microbatch.
    pub(super) fn new(timed: &[Timed], known: MicrobatchConstants) -> Self {
        let known = Self::known(known);
        let plain = Self { floor_ns: 0.0, ..above_floor(&timed.iter().collect::<Vec<_>>(), &known) };
        let mut best = (plain.error(timed), plain);
        let mut times: Vec<f64> = timed.iter().map(|one| one.measured_ns).collect();
        times.sort_by(f64::total_cmp);
        let step = (times.len() / FLOORS).max(1);
        for floor_ns in times.iter().step_by(step).copied().chain([known.floor_ns]) {
            let Some(fit) = with_floor(timed, &known, floor_ns) else { continue };
            let error = fit.error(timed);
            // The first floor has to be clearly better, later floors only better.
            let limit = if best.1.floor_ns > 0.0 { best.0 } else { FLOOR_GAIN * best.0 };
            if error < limit {
                best = (error, fit);
            }
        }
        best.1
    }

    /// Returns the device time, without the floor.
    fn device_ns(&self, added_ns: &[f64; MODULES_MAX]) -> f64 {
        self.base_ns + added_ns.iter().zip(&self.scales).map(|(ns, scale)| ns * scale).sum::<f64>()
    }

    pub(super) fn ns(&self, added_ns: &[f64; MODULES_MAX]) -> f64 {
        self.device_ns(added_ns).max(self.floor_ns)
    }

    /// Whether the device, not the floor, decides.
    pub(super) fn is_above_floor(&self, added_ns: &[f64; MODULES_MAX]) -> bool {
        self.device_ns(added_ns) > self.floor_ns
    }

    /// Returns the mean error as a fraction of the measured times; no microbatch counts more than
    /// [`ERROR_MAX`].
    pub(super) fn error(&self, timed: &[Timed]) -> f64 {
        let error = |one: &Timed| (self.ns(&one.added_ns) / one.measured_ns - 1.0).abs().min(ERROR_MAX);
        timed.iter().map(error).sum::<f64>() / timed.len().max(1) as f64
    }

    pub(super) fn constants(&self) -> MicrobatchConstants {
        let whole = |ns: f64| (ns + 0.5) as u64;
        MicrobatchConstants { floor_ns: whole(self.floor_ns), base_ns: whole(self.base_ns) }
    }
}

/// Fits with a floor of about this time; `None` if too few microbatches are at the floor.
fn with_floor(timed: &[Timed], known: &MicrobatchFit, floor_ns: f64) -> Option<MicrobatchFit> {
    let is_above = |one: &&Timed| one.measured_ns > 1.1 * floor_ns;
    let mut above: Vec<&Timed> = timed.iter().filter(is_above).collect();
    let mut fit = None;
    for _ in 0..FLOOR_ROUNDS {
        let rates = if above.len() < FLOOR_MIN {
            below_floor(timed, known, floor_ns)
        } else {
            above_floor(&above, known)
        };
        let of_floor: Vec<&Timed> =
            timed.iter().filter(|one| rates.device_ns(&one.added_ns) <= floor_ns).collect();
        if of_floor.len() < FLOOR_MIN {
            return None;
        }
        let middle = median(of_floor.iter().map(|one| one.measured_ns).collect());
        let added = |one: &&Timed| one.added_ns.iter().sum::<f64>();
        let least = of_floor.iter().map(added).fold(f64::INFINITY, f64::min);
        let most = of_floor.iter().map(added).fold(0.0, f64::max);
        if most < FLOOR_RANGE * least {
            return None;
        }
        fit = Some(MicrobatchFit { floor_ns: middle, ..rates });
        let next: Vec<&Timed> = timed.iter().filter(|one| rates.device_ns(&one.added_ns) > middle).collect();
        if next.len() == above.len() && next.iter().zip(&above).all(|(a, b)| std::ptr::eq(*a, *b)) {
            break;
        }
        above = next;
    }
    fit
}

/// Uses the known rates if no microbatch shows different rates, no larger than the floor allows.
fn below_floor(timed: &[Timed], known: &MicrobatchFit, floor_ns: f64) -> MicrobatchFit {
    let most = timed.iter().map(|one| known.device_ns(&one.added_ns)).fold(0.0, f64::max);
    let share = if most > floor_ns { floor_ns / most } else { 1.0 };
    MicrobatchFit {
        floor_ns,
        base_ns: share * known.base_ns,
        scales: known.scales.map(|scale| share * scale),
    }
}

/// Fits the constant and the scales.
fn above_floor(timed: &[&Timed], known: &MicrobatchFit) -> MicrobatchFit {
    let added = |one: &Timed| one.added_ns.iter().sum::<f64>();
    let middle = median(timed.iter().map(|one| one.measured_ns).collect());
    let base_ns = known.base_ns.min(0.9 * middle);
    let ratios = timed.iter().map(|one| (one.measured_ns - base_ns).max(0.1 * one.measured_ns) / added(one));
    let ratio = median(ratios.collect());
    let row = |one: &&Timed| -> [f64; UNKNOWNS] {
        let mut row = [1.0; UNKNOWNS];
        row[1..].copy_from_slice(&one.added_ns);
        row.map(|term| term / one.measured_ns)
    };
    let rows: Vec<[f64; UNKNOWNS]> = timed.iter().map(row).collect();
    // Constant and scales in units of their priors, so that the equations are well conditioned.
    let mut units = [ratio; UNKNOWNS];
    units[0] = middle;
    let rows: Vec<[f64; UNKNOWNS]> =
        rows.into_iter().map(|row| std::array::from_fn(|at| row[at] * units[at])).collect();
    let mut prior = [1.0; UNKNOWNS];
    prior[0] = base_ns / middle;
    let mut x = prior;
    let mut weights = vec![1.0; rows.len()];
    for round in 0..2 * ROUNDS {
        let residual =
            |row: &[f64; UNKNOWNS]| row.iter().zip(&x).map(|(term, x)| term * x).sum::<f64>() - 1.0;
        let residuals: Vec<f64> = rows.iter().map(residual).collect();
        let mut sizes: Vec<f64> = residuals.iter().map(|residual| residual.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let scale = (MAD_TO_DEVIATION * median_of_sorted(&sizes)).max(SCALE_MIN);
        for (weight, residual) in weights.iter_mut().zip(&residuals) {
            let distance = residual.abs() / scale;
            *weight = if round < ROUNDS {
                (HUBER / distance.max(f64::MIN_POSITIVE)).min(1.0)
            } else {
                let share = 1.0 - (distance / BIWEIGHT) * (distance / BIWEIGHT);
                if share > 0.0 { share * share } else { 0.0 }
            };
        }
        x = solve(&rows, &weights, scale, &prior);
    }
    let scales = std::array::from_fn(|module| x[1 + module] * units[1 + module]);
    MicrobatchFit { floor_ns: 0.0, base_ns: x[0] * units[0], scales }
}

/// Returns the unknowns with the minimum weighted squares, none below 0.
fn solve(rows: &[[f64; UNKNOWNS]], weights: &[f64], scale: f64, prior: &[f64; UNKNOWNS]) -> [f64; UNKNOWNS] {
    let (mut matrix, mut right) = ([[0.0; UNKNOWNS]; UNKNOWNS], [0.0; UNKNOWNS]);
    for (row, weight) in rows.iter().zip(weights) {
        for one in 0..UNKNOWNS {
            right[one] += weight * row[one];
            for other in 0..UNKNOWNS {
                matrix[one][other] += weight * row[one] * row[other];
            }
        }
    }
    for at in 0..UNKNOWNS {
        let deviation = if at == 0 { BASE_DEVIATION } else { SCALE_DEVIATION };
        let weight = (scale / deviation) * (scale / deviation);
        matrix[at][at] += weight;
        right[at] += weight * prior[at];
    }
    let loss = |x: &[f64; UNKNOWNS]| {
        let of_row =
            |row: usize| -> f64 { (0..UNKNOWNS).map(|column| matrix[row][column] * x[column]).sum() };
        (0..UNKNOWNS).map(|row| x[row] * (of_row(row) - 2.0 * right[row])).sum::<f64>()
    };
    let sets = (1_u8..1 << UNKNOWNS).filter_map(|set| {
        let columns: Vec<usize> = (0..UNKNOWNS).filter(|column| set & 1 << column != 0).collect();
        let part: Vec<f64> = columns
            .iter()
            .flat_map(|&row| columns.iter().map(move |&column| (row, column)))
            .map(|(row, column)| matrix[row][column])
            .collect();
        let solved = Cholesky::new(&part, columns.len())?
            .solve(&columns.iter().map(|&column| right[column]).collect::<Vec<f64>>());
        let mut x = [0.0; UNKNOWNS];
        columns.iter().zip(&solved).for_each(|(&column, value)| x[column] = *value);
        solved.iter().all(|value| *value >= 0.0).then_some(x)
    });
    sets.min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap_or(*prior)
}

/// Minimum factor that makes a rank slow.
const SLOW_MIN: f64 = 1.1;
/// Number of standard errors by which a slow rank has to differ from the median rank.
const SIGNIFICANT_ERRORS: f64 = 4.0;
/// Minimum number of microbatches on a rank.
const MICROBATCHES_MIN: usize = 3;
/// Standard error of a median divided by the standard error of a mean.
const MEDIAN_ERROR: f64 = 1.2533;

/// Rank that takes longer for the same work.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SlowRank {
    /// Data-parallel rank.
    pub rank: u32,
    /// Rank time divided by the other ranks' time for the same work.
    pub factor: f64,
}

/// Returns the slow ranks, ascending.
///
/// A rank is compared with the lower median over all ranks, so that among two ranks the faster counts as
/// right.
pub(super) fn slow_ranks(timed: &[Timed], fit: &MicrobatchFit) -> Vec<SlowRank> {
    let mut ratios: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for one in timed {
        ratios.entry(one.rank).or_default().push(one.measured_ns / fit.ns(&one.added_ns));
    }
    ratios.retain(|_, ratios| ratios.len() >= MICROBATCHES_MIN);
    let mut distances = Vec::new();
    let middles: Vec<(u32, f64, usize)> = ratios
        .into_iter()
        .map(|(rank, mut ratios)| {
            ratios.sort_by(f64::total_cmp);
            let middle = median_of_sorted(&ratios);
            distances.extend(ratios.iter().map(|ratio| (ratio / middle - 1.0).abs()));
            (rank, middle, ratios.len())
        })
        .collect();
    distances.sort_by(f64::total_cmp);
    let mut sorted: Vec<f64> = middles.iter().map(|(_, middle, _)| *middle).collect();
    sorted.sort_by(f64::total_cmp);
    let Some(&usual) = sorted.get(sorted.len().saturating_sub(1) / 2).filter(|_| sorted.len() > 1) else {
        return Vec::new();
    };
    // All ranks have the same noise, which a single rank hardly shows.
    let deviation = MAD_TO_DEVIATION * median_of_sorted(&distances);
    let is_slow = |(_, middle, count): &(u32, f64, usize)| {
        let error = deviation * MEDIAN_ERROR / (*count as f64).sqrt();
        middle / usual > SLOW_MIN.max(1.0 + SIGNIFICANT_ERRORS * error)
    };
    let slow = middles.into_iter().filter(is_slow);
    slow.map(|(rank, middle, _)| SlowRank { rank, factor: middle / usual }).collect()
}
