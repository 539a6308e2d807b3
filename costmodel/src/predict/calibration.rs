//! Calibrates a profile's uncertainty: half widths that cover 90 % of measurements at other shapes.
//!
//! Each measured point is left out in turn and predicted from the remaining points. The point's score is the
//! error of that prediction divided by the error that the curve expects there: the spread between repeats
//! plus the distance to an alternative interpolation. The 90 % quantile over the scores is the factor from
//! expected error to half width. A new shape is as likely to be off as a left-out shape, whatever the error
//! distribution, **if it is measured in the same session**. Scores are pooled over a module's parts in one
//! pass. If these are too few for the quantile, scores from both passes count, then from all TP degrees, then
//! from all modules.
//!
//! A different session, on a different day or under a different load, is off at all shapes together, which no
//! point in the first session shows. The half width therefore grows by the share of the time by which
//! sessions differ: as measured if several files in a profile have the same points, otherwise assumed.
//!
//! # Source
//! Leave-one-out residuals: Barber et al., "Predictive Inference with the Jackknife+", 2021,
//! arXiv:1905.02928. Scores over expected errors, and the rank with the finite-sample correction: Lei et al.,
//! "Distribution-Free Predictive Inference for Regression", 2018, arXiv:1604.04173.

use super::measured_points::{measured_knots, measured_points};
use crate::curve::{Curve, IntervalRule, Knot, LocalError, Surface, SurfacePoint};
use crate::profile::{Part, Phase, Point, REPEATS_MIN, SelectedPoints};
use crate::quantiles::median_of_sorted;

/// Percentage of measurements that intervals cover.
const COVERED_PERCENT: usize = 90;
/// Factor for a profile with too few points for a quantile: 2.13, from Student's distribution for 90 % and
/// the spread between 5 repeats, times 1.22 for the error in the points that a prediction uses.
const ASSUMED_FACTOR: f64 = 2.6;
/// Share of the time by which sessions differ, assumed if a profile has only one session.
const ASSUMED_SESSION: f64 = 0.05;

/// Minimum number of common points for two sessions in a part, and of such parts.
const COMMON_MIN: usize = 3;
/// Half width for a third session divided by the median difference between two: `1.645 sqrt(1 + 1/2)` over
/// `0.674 sqrt(2)`, if sessions differ by a normal distribution.
const SESSION_FACTOR: f64 = 2.11;

/// Returns the rule for one pass at one TP degree.
pub(super) fn interval_rule(selected: &SelectedPoints, phase: Phase, tp: u32) -> IntervalRule {
    let is_pass = |point: &Point| point.setting.phase != Phase::Optimizer;
    let is_degree = |point: &Point| is_pass(point) && point.setting.tp == tp;
    let is_own = |point: &Point| is_degree(point) && point.setting.phase == phase;
    let pools = [
        pooled(&selected.points, is_own),
        pooled(&selected.points, is_degree),
        pooled(&selected.points, is_pass),
        pooled(&selected.profile, is_pass),
    ];
    let (mut inside, mut outside, mut known) = (None, None, 0);
    for pooled in pools {
        // Each pool contains the previous pool, so a pool with the same size has nothing to add.
        if (inside.is_some() && outside.is_some()) || pooled.len() == known {
            continue;
        }
        known = pooled.len();
        let scores = scores(&pooled);
        let factor = |is_extrapolated| {
            let of_kind = scores.iter().filter(|score| score.is_extrapolated == is_extrapolated);
            covering_quantile(of_kind.map(|score| score.ratio).collect())
        };
        inside = inside.or_else(|| factor(false));
        outside = outside.or_else(|| factor(true));
    }
    let inside = inside.unwrap_or(ASSUMED_FACTOR);
    IntervalRule {
        inside,
        // Few points are at the ends, so the outside quantile is uncertain: it never falls below the inside
        // quantile.
        outside: outside.unwrap_or(ASSUMED_FACTOR).max(inside),
        session: session_difference(&selected.sessions).unwrap_or(ASSUMED_SESSION),
        has_spread: selected.points.iter().any(|point| is_pass(point) && point.repeats >= REPEATS_MIN),
    }
}

fn pooled(points: &[Point], is_pooled: impl Fn(&Point) -> bool) -> Vec<Point> {
    points.iter().filter(|point| is_pooled(point)).copied().collect()
}

/// Returns the scores for all points, each predicted from the points that differ only in shape.
fn scores(points: &[Point]) -> Vec<Score> {
    let is_alike = |a: &Point, b: &Point| {
        let (a, b) = (a.setting, b.setting);
        (a.module, a.part, a.phase, a.tp, a.layers) == (b.module, b.part, b.phase, b.tp, b.layers)
    };
    let of_shapes = |alike: &[Point]| match alike[0].setting.part {
        Part::Attention | Part::Whole => surface_scores(&measured_points(alike)),
        Part::Linear | Part::OutsideLayers | Part::Head => curve_scores(&measured_knots(alike)),
    };
    // Points are sorted by setting, so similar points are adjacent.
    points.chunk_by(is_alike).flat_map(of_shapes).collect()
}

/// Returns the share of the time by which a different session differs from these; `None` if they have too
/// little in common to tell.
///
/// A module part in a pass is off as a whole, so the signed median over the part's points is free from point
/// noise. The median over all parts is the scale of these differences.
fn session_difference(sessions: &[Vec<Point>]) -> Option<f64> {
    let mut differences = Vec::new();
    for (at, session) in sessions.iter().enumerate() {
        for other in &sessions[at + 1..] {
            let is_alike = |a: &Point, b: &Point| {
                let (a, b) = (a.setting, b.setting);
                (a.part, a.phase, a.tp) == (b.part, b.phase, b.tp)
            };
            let of_part = session.chunk_by(is_alike).filter_map(|part| part_difference(part, other));
            differences.extend(of_part.map(f64::abs));
        }
    }
    differences.sort_by(f64::total_cmp);
    (differences.len() >= COMMON_MIN).then(|| SESSION_FACTOR * median_of_sorted(&differences))
}

/// Returns the median relative difference between a part's points and a second session, sorted by setting.
fn part_difference(part: &[Point], other: &[Point]) -> Option<f64> {
    let difference = |point: &Point| {
        let same = other.binary_search_by(|other| other.setting.cmp(&point.setting)).ok()?;
        let [a, b] = [point.microseconds, other[same].microseconds];
        Some(2.0 * (a - b) / (a + b))
    };
    let mut differences: Vec<f64> = part.iter().filter_map(difference).collect();
    differences.sort_by(f64::total_cmp);
    (differences.len() >= COMMON_MIN).then(|| median_of_sorted(&differences))
}

/// Returns the value that the next value exceeds with a probability of at most 10 %; `None` if there are too
/// few values for that.
pub(super) fn covering_quantile(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    // One more than the number of values, because the next value has a rank among them, too.
    let rank = ((values.len() + 1) * COVERED_PERCENT).div_ceil(100);
    values.get(rank - 1).copied()
}

/// Error at a left-out point.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Score {
    /// Distance from the prediction, divided by the expected error.
    ratio: f64,
    /// Whether the point is outside the remaining points.
    is_extrapolated: bool,
}

impl Score {
    fn new(ns: f64, local: LocalError) -> Self {
        // A prediction of zero time expects no error.
        let expected_ns = local.expected_ns().max(f64::MIN_POSITIVE);
        Self { ratio: (ns - local.ns).abs() / expected_ns, is_extrapolated: local.is_extrapolated }
    }
}

/// Returns the errors at a curve's points, each predicted from the remaining points; none for a single point.
fn curve_scores(knots: &[Knot]) -> Vec<Score> {
    let score = |(others, left_out): (Vec<Knot>, &Knot)| {
        (!others.is_empty()).then(|| Score::new(left_out.ns, Curve::new(&others).local(left_out.x)))
    };
    each_left_out(knots).filter_map(score).collect()
}

/// Returns the errors at a surface's points, each predicted from the remaining points; none for a single
/// point.
fn surface_scores(points: &[SurfacePoint]) -> Vec<Score> {
    let score = |(others, left_out): (Vec<SurfacePoint>, &SurfacePoint)| {
        let predict = || Surface::new(others.clone()).local(left_out.batch, left_out.tokens);
        (!others.is_empty()).then(|| Score::new(left_out.ns, predict()))
    };
    each_left_out(points).filter_map(score).collect()
}

fn each_left_out<T: Copy>(all: &[T]) -> impl Iterator<Item = (Vec<T>, &T)> {
    all.iter().enumerate().map(|(at, left_out)| ([&all[..at], &all[at + 1..]].concat(), left_out))
}
