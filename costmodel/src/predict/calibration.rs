//! Compares a profile with the microbatches that were held out when it was measured, and calibrates its
//! uncertainty.
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
//!
//! A profile that does not predict them plans worse than a guess, so it is rejected unless the check is
//! turned off. The same errors give the prediction intervals: 90 % of held-out microbatches are within the
//! half width, with the finite-sample correction.

use super::measured_points::{measured_knots, measured_points};
use super::microbatch_curve::MicrobatchCurve;
use crate::curve::{Curve, IntervalRule, Knot, LocalError, Surface, SurfacePoint};
use crate::error::{Error, Result};
use crate::measure::{ErrorSummary, MEDIAN_BOUND, P95_BOUND};
use crate::profile::{HeldOutRun, Part, Phase, Point, Profile, ProfileFile, REPEATS_MIN, SelectedPoints};
use crate::quantiles::median_of_sorted;
use crate::{MODULES_MAX, Module};
use serde::Serialize;
use std::collections::BTreeMap;

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

/// Minimum number of microbatches that determine a 90 % quantile.
const MICROBATCHES_MIN: usize = 9;

/// Profile errors over held-out microbatches, `predicted / measured - 1`.
///
/// # Examples
/// ```
/// use dflop_costmodel::{Profile, ProfileCheck};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let mut text = String::from("# dflop-profile: 1\n");
/// for microbatch in 0..10 {
///     text += &format!("# held-out: {microbatch},llm,100,10000,{}\n", 150 + microbatch);
/// }
/// text += "module,part,phase,tp,layers,batch,tokens,microseconds\n";
/// for tokens in [10, 20, 40, 80, 160] {
///     text += &format!("llm,whole,forward,1,4,1,{tokens},{tokens}\n");
///     text += &format!("llm,whole,backward,1,4,1,{tokens},{}\n", tokens as f64 / 2.0);
/// }
/// let check = ProfileCheck::new(&Profile::parse([("p.csv", text.as_str())])?).expect("microbatches");
/// assert!(check.is_within() && check.errors.count == 10 && check.errors.max < 0.06);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProfileCheck {
    /// Whole-microbatch errors: for the sum over all modules.
    pub errors: ErrorSummary,
    /// Half width of the 90 % interval for a whole microbatch, as a fraction of the predicted time.
    pub half_width: f64,
    /// Half width of each module's interval, by [`Module`]; `None` without microbatches for the module.
    pub module_half_widths: [Option<f64>; MODULES_MAX],
}

/// Predicted and measured time.
type Pair = [f64; 2];

impl ProfileCheck {
    /// Compares a profile; `None` if it has fewer than 9 held-out microbatches from whole-module runs.
    #[must_use]
    pub fn new(profile: &Profile) -> Option<Self> {
        let mut whole: BTreeMap<u32, Pair> = BTreeMap::new();
        let mut of_modules: [Vec<Pair>; MODULES_MAX] = Default::default();
        for module in Module::ALL {
            for (run, predicted_ns) in profile.files().iter().flat_map(|file| predictions(file, module)) {
                let pair = [predicted_ns, 1e3 * run.microseconds];
                of_modules[module as usize].push(pair);
                let sums = whole.entry(run.microbatch).or_default();
                sums.iter_mut().zip(pair).for_each(|(sum, ns)| *sum += ns);
            }
        }
        if whole.len() < MICROBATCHES_MIN {
            return None;
        }
        let error = |[predicted, measured]: &Pair| predicted / measured - 1.0;
        let errors: Vec<f64> = whole.values().map(error).collect();
        Some(Self {
            errors: ErrorSummary::from_errors(&errors),
            half_width: half_width(whole.values())?,
            module_half_widths: of_modules.map(|pairs| half_width(pairs.iter())),
        })
    }

    /// Whether the median error is at most 5 %, and the 95th percentile at most 12 %.
    #[must_use]
    pub fn is_within(&self) -> bool {
        self.errors.p50 <= MEDIAN_BOUND && self.errors.p95 <= P95_BOUND
    }

    /// Rejects a profile that is out of bounds.
    ///
    /// # Errors
    /// [`Error::ProfileInaccurate`] with the errors.
    pub fn require_within(&self) -> Result<()> {
        if self.is_within() {
            return Ok(());
        }
        let ErrorSummary { count, p50, p95, .. } = self.errors;
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        Err(Error::ProfileInaccurate { microbatches: count, median: percent(p50), p95: percent(p95) })
    }
}

/// Returns a module's held-out runs in a file, each with the predicted nanoseconds.
fn predictions(file: &ProfileFile, module: Module) -> Vec<(HeldOutRun, f64)> {
    let runs = || file.held_out.iter().filter(|run| run.module == module);
    let of_whole = file.measurements.iter().map(|row| row.setting);
    let of_whole = of_whole.filter(|setting| setting.module == module && setting.part == Part::Whole);
    // The deepest cut is the cut that ran.
    let Some(layers) = of_whole.map(|setting| setting.layers).max().filter(|_| runs().next().is_some())
    else {
        return Vec::new();
    };
    let curve = MicrobatchCurve::from_profile(&Profile::from_file(file.clone()), module, layers);
    let predict = |curve: MicrobatchCurve| runs().map(move |run| (*run, curve.ns(run.tokens, run.pairs)));
    curve.map(predict).into_iter().flatten().collect()
}

fn half_width<'a>(pairs: impl Iterator<Item = &'a Pair>) -> Option<f64> {
    covering_quantile(pairs.map(|[predicted, measured]| (measured / predicted - 1.0).abs()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SampleShape;
    use crate::model::ModelSpec;
    use crate::predict::{CostModel, ProfileOptions};
    use std::fmt::Write;

    /// A profile with 3 us per token, whose held-out microbatches take `factor` times as long, every second
    /// microbatch by `scatter` more.
    fn text(factor: f64, scatter: f64, microbatches: u32) -> String {
        let mut text = String::from("# dflop-profile: 1\n");
        for number in 0..microbatches {
            let tokens = 500 + 100 * number;
            let microseconds = 3.0 * f64::from(tokens) * factor * (1.0 + scatter * f64::from(number % 2));
            writeln!(text, "# held-out: {number},llm,{tokens},{},{microseconds}", tokens * 100).unwrap();
        }
        text += "module,part,phase,tp,layers,batch,tokens,microseconds\n";
        for tokens in [64, 256, 1024, 4096] {
            writeln!(text, "llm,whole,forward,1,4,1,{tokens},{tokens}").unwrap();
            writeln!(text, "llm,whole,backward,1,4,1,{tokens},{}", 2 * tokens).unwrap();
        }
        text
    }

    fn profile(text: &str) -> Profile {
        Profile::parse([("p.csv", text)]).unwrap()
    }

    #[test]
    fn a_profile_out_of_bounds_is_refused_with_the_figures_unless_told_otherwise() {
        let tiny = ModelSpec::preset("tiny").unwrap();
        let spec = ModelSpec { vision: None, audio: None, ..tiny };
        let build = |text: &str, options| CostModel::from_profile(spec.clone(), &profile(text), options);
        assert!(build(&text(1.0, 0.05, 20), ProfileOptions::default()).is_ok());
        let message = build(&text(1.0, 1.0, 20), ProfileOptions::default()).unwrap_err().to_string();
        assert!(
            message.contains("20 held-out microbatches") && message.contains("median error of 38%"),
            "{message}"
        );
        assert!(build(&text(1.0, 1.0, 20), ProfileOptions::default().unchecked()).is_ok());
        assert!(build(&text(1.0, 1.0, 8), ProfileOptions::default()).is_ok(), "too few to tell");
    }

    #[test]
    fn held_out_microbatches_set_level_and_interval() {
        let tiny = ModelSpec::preset("tiny").unwrap();
        let spec = ModelSpec { vision: None, audio: None, ..tiny };
        let profile = profile(&text(1.3, 0.08, 30));
        let model = CostModel::from_profile(spec, &profile, ProfileOptions::default()).unwrap();
        let shape = SampleShape { text_tokens: 1000, ..SampleShape::default() };
        let time = model.predict_with_uncertainty(&shape).unwrap().unwrap().modules[0];
        assert!((time.ns as f64 / (3e6 * 1.3 * 1.04) - 1.0).abs() < 1e-3, "{time:?}");
        let share = time.uncertainty_ns as f64 / time.ns as f64;
        assert!((share - (1.0 - 1.0 / 1.04)).abs() < 1e-3, "{share}");
    }

    #[test]
    fn modules_of_one_microbatch_are_added() {
        let llm = text(1.0, 0.2, 12);
        // What takes the LLM longer takes the encoder less.
        let vision = text(1.2, -1.0 / 6.0, 12).replace("llm", "vision");
        let both = Profile::parse([("a.csv", llm.as_str()), ("b.csv", vision.as_str())]).unwrap();
        let check = ProfileCheck::new(&both).unwrap();
        assert!(check.errors.count == 12 && check.errors.p50 < 0.02, "{check:?}");
        assert!(check.module_half_widths[Module::Llm as usize].unwrap() > 0.09, "{check:?}");
        assert_eq!(check.module_half_widths[Module::Audio as usize], None);
    }
}
