//! Interpolates a measured time over work: monotone between the points, linear outside them, with the
//! expected error as a 90 % interval.
//!
//! First the points are made non-decreasing by isotonic regression (pool adjacent violators), since less time
//! for more work is clock noise; then a monotone piecewise cubic goes through them. Times are interpolated,
//! never rates: a rate hides launch costs and does not add up.
//!
//! A cubic in plain coordinates, because: through points on `a + b x` it is exactly that line; it has no
//! kinks at the points, so marginal costs do not jump; it needs only `+ - * /`, which IEEE 754 rounds
//! correctly, so every rank gets the same bits (logarithms from a platform library would not give them).
//!
//! # Source
//! Isotonic regression: Ayer et al., "An Empirical Distribution Function for Sampling with Incomplete
//! Information",
//! 1955. Slopes: Fritsch and Butland, "A Method for Constructing Local Monotone Piecewise Cubic
//!       Interpolants", 1984, in Brodlie's form with weights from the interval lengths.

mod surface;

pub(crate) use surface::{Surface, SurfacePoint};

/// Work and time at a curve point.
pub(crate) type CurvePoint = (f64, f64);

/// Measured curve point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Knot {
    /// Work, above 0.
    pub(crate) x: f64,
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Standard deviation of a single run in nanoseconds.
    pub(crate) spread_ns: f64,
}

/// Monotone curve through measured points.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Curve {
    pieces: Vec<Piece>,
    interval: IntervalRule,
}

/// Point and the cubic up to the next point: `ns + u (slope + u (square + u cube))` at `x + u`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Piece {
    knot: Knot,
    slope: f64,
    square: f64,
    cube: f64,
}

impl Curve {
    /// Fits a curve through at least one point; points are sorted by work, and no two have the same work.
    pub(crate) fn new(knots: &[Knot]) -> Self {
        let mut fitted = knots.to_vec();
        let mut times: Vec<f64> = knots.iter().map(|knot| knot.ns).collect();
        pool_adjacent_violators(&mut times);
        for (knot, ns) in fitted.iter_mut().zip(times) {
            // A pooled point is at least as uncertain as the distance by which it was moved.
            knot.spread_ns = knot.spread_ns.max((knot.ns - ns).abs());
            knot.ns = ns;
        }
        let point = |at: usize| fitted.get(at).map(|knot| (knot.x, knot.ns));
        let piece = |(at, knot): (usize, &Knot)| {
            let before = at.checked_sub(1).and_then(point);
            let Some(next) = point(at + 1) else {
                return Piece { knot: *knot, slope: 0.0, square: 0.0, cube: 0.0 };
            };
            let [slope, square, cube] = cubic(before, (knot.x, knot.ns), next, point(at + 2));
            Piece { knot: *knot, slope, square, cube }
        };
        Self { pieces: fitted.iter().enumerate().map(piece).collect(), interval: IntervalRule::EXPECTED }
    }

    /// Sets the rule for 90 % intervals.
    pub(crate) fn interval(mut self, rule: IntervalRule) -> Self {
        self.interval = rule;
        self
    }

    /// Returns the curve with `factor` times the time; `factor` is at least 0.
    pub(crate) fn times(&self, factor: f64) -> Self {
        let scaled = |piece: &Piece| Piece {
            knot: Knot {
                x: piece.knot.x,
                ns: piece.knot.ns * factor,
                spread_ns: piece.knot.spread_ns * factor,
            },
            slope: piece.slope * factor,
            square: piece.square * factor,
            cube: piece.cube * factor,
        };
        Self { pieces: self.pieces.iter().map(scaled).collect(), interval: self.interval }
    }

    /// Adds two curves over the same measured work, exact from the first point on; `None` if their work
    /// differs.
    pub(crate) fn plus(&self, other: &Self) -> Option<Self> {
        let is_alike = |(a, b): (&Piece, &Piece)| a.knot.x.total_cmp(&b.knot.x).is_eq();
        if self.pieces.len() != other.pieces.len() || !self.pieces.iter().zip(&other.pieces).all(is_alike) {
            return None;
        }
        let sum = |(a, b): (&Piece, &Piece)| Piece {
            knot: Knot {
                x: a.knot.x,
                ns: a.knot.ns + b.knot.ns,
                spread_ns: a.knot.spread_ns + b.knot.spread_ns,
            },
            slope: a.slope + b.slope,
            square: a.square + b.square,
            cube: a.cube + b.cube,
        };
        Some(Self {
            pieces: self.pieces.iter().zip(&other.pieces).map(sum).collect(),
            interval: self.interval.wider(other.interval),
        })
    }

    /// Returns the minimum and maximum measured work.
    pub(crate) fn range(&self) -> [f64; 2] {
        [self.first().knot.x, self.last().knot.x]
    }

    /// Returns the time for this much work in nanoseconds; no work takes no time.
    pub(crate) fn at(&self, x: f64) -> f64 {
        if x <= 0.0 {
            return 0.0;
        }
        let after = self.pieces.partition_point(|piece| piece.knot.x <= x);
        if after == 0 {
            return extrapolate_below(self.point(0), self.pieces.get(1).map(Piece::point), x);
        }
        let piece = &self.pieces[after - 1];
        let Some(next) = self.pieces.get(after) else { return self.extrapolate(x) };
        let u = x - piece.knot.x;
        let ns = piece.knot.ns + u * (piece.slope + u * (piece.square + u * piece.cube));
        // The cubic is monotone up to rounding errors; the clamp removes those.
        ns.clamp(piece.knot.ns, next.knot.ns)
    }

    /// Returns the time with the half width of the 90 % interval.
    pub(crate) fn estimate(&self, x: f64) -> Estimate {
        self.interval.estimate(self.local(x))
    }

    /// Returns the time with the expected error there.
    ///
    /// The error is the spread at the points around the work; between two points, the distance to the
    /// straight line; outside all points, the distance to a time proportional to work.
    pub(crate) fn local(&self, x: f64) -> LocalError {
        if x <= 0.0 {
            return LocalError::default();
        }
        let ns = self.at(x);
        let after = self.pieces.partition_point(|piece| piece.knot.x <= x);
        let is_extrapolated = after == 0 || (after == self.pieces.len() && x > self.last().knot.x);
        let low = &self.pieces[after.saturating_sub(1)].knot;
        let high = &self.pieces[after.min(self.pieces.len() - 1)].knot;
        let share = if high.x > low.x { ((x - low.x) / (high.x - low.x)).clamp(0.0, 1.0) } else { 0.0 };
        let spread_ns = low.spread_ns + share * (high.spread_ns - low.spread_ns);
        let other_ns = if is_extrapolated { low.ns / low.x * x } else { low.ns + share * (high.ns - low.ns) };
        let scale = if is_extrapolated && low.ns > 0.0 { (ns / low.ns).max(1.0) } else { 1.0 };
        LocalError { ns, spread_ns: spread_ns * scale, distance_ns: (ns - other_ns).abs(), is_extrapolated }
    }

    /// Extrapolates linearly in work from the last point on.
    fn extrapolate(&self, x: f64) -> f64 {
        // The slope spans at least a factor of 2 in work, so that noise between two close end points is not
        // extrapolated.
        let last = self.last().point();
        let half = self.pieces.iter().rev().map(Piece::point).find(|point| 2.0 * point.0 <= last.0);
        extrapolate_above(last, half.or_else(|| self.pieces.first().map(Piece::point)), x)
    }

    fn point(&self, at: usize) -> CurvePoint {
        self.pieces[at].point()
    }

    fn first(&self) -> &Piece {
        &self.pieces[0]
    }

    fn last(&self) -> &Piece {
        &self.pieces[self.pieces.len() - 1]
    }
}

impl Piece {
    fn point(&self) -> CurvePoint {
        (self.knot.x, self.knot.ns)
    }
}

/// Makes values non-decreasing: falling runs are replaced by the mean, with equal weights.
///
/// Keeps the order between inputs: if no value in `a` is above the corresponding value in `b`, none is
/// afterwards.
pub(crate) fn pool_adjacent_violators(values: &mut [f64]) {
    let mut pools: Vec<(f64, usize)> = Vec::with_capacity(values.len());
    for &value in values.iter() {
        let (mut sum, mut length) = (value, 1);
        while let Some(&(before, before_length)) = pools.last() {
            if before / before_length as f64 <= sum / length as f64 {
                break;
            }
            pools.pop();
            (sum, length) = (before + sum, before_length + length);
        }
        pools.push((sum, length));
    }
    let mut at = 0;
    for (sum, length) in pools {
        values[at..at + length].fill(sum / length as f64);
        at += length;
    }
}

/// Returns the cubic's coefficients from `low` to `high`; the neighbors shape the slopes.
pub(crate) fn cubic(
    before: Option<CurvePoint>,
    low: CurvePoint,
    high: CurvePoint,
    after: Option<CurvePoint>,
) -> [f64; 3] {
    let (width, rise) = interval(low, high);
    let at_low = match (before, after) {
        (Some(before), _) => inner_slope(interval(before, low), (width, rise)),
        (None, Some(after)) => end_slope((width, rise), interval(high, after)),
        (None, None) => rise,
    };
    let at_high = match (before, after) {
        (_, Some(after)) => inner_slope((width, rise), interval(high, after)),
        (Some(before), None) => end_slope((width, rise), interval(before, low)),
        (None, None) => rise,
    };
    let square = (3.0 * rise - 2.0 * at_low - at_high) / width;
    let cube = (at_low + at_high - 2.0 * rise) / (width * width);
    [at_low, square, cube]
}

/// Extrapolates below the first point: linear in work, at most the first time, at least proportional to work.
pub(crate) fn extrapolate_below(first: CurvePoint, second: Option<CurvePoint>, x: f64) -> f64 {
    let proportional = first.1 * (x / first.0);
    let slope = second.map_or(first.1 / first.0, |second| interval(first, second).1);
    (first.1 - slope * (first.0 - x)).clamp(proportional.min(first.1), first.1)
}

/// Extrapolates beyond the last point: linear in work, with the slope from an earlier point to the last.
pub(crate) fn extrapolate_above(last: CurvePoint, earlier: Option<CurvePoint>, x: f64) -> f64 {
    let slope = match earlier {
        Some(earlier) if earlier.0 < last.0 => interval(earlier, last).1,
        _ => last.1 / last.0,
    };
    last.1 + slope.max(0.0) * (x - last.0)
}

/// Returns an interval's width, and the rise per unit width.
fn interval(low: CurvePoint, high: CurvePoint) -> (f64, f64) {
    (high.0 - low.0, (high.1 - low.1) / (high.0 - low.0))
}

/// Returns the slope between two intervals: the weighted harmonic mean, 0 at an extreme.
fn inner_slope(left: (f64, f64), right: (f64, f64)) -> f64 {
    if left.1 * right.1 <= 0.0 {
        return 0.0;
    }
    let left_weight = 2.0 * right.0 + left.0;
    let right_weight = right.0 + 2.0 * left.0;
    (left_weight + right_weight) / (left_weight / left.1 + right_weight / right.1)
}

/// Returns the slope at an end: through three points, limited so that the cubic stays monotone.
fn end_slope(own: (f64, f64), neighbor: (f64, f64)) -> f64 {
    let slope = ((2.0 * own.0 + neighbor.0) * own.1 - own.0 * neighbor.1) / (own.0 + neighbor.0);
    if slope * own.1 <= 0.0 {
        return 0.0;
    }
    if own.1 * neighbor.1 <= 0.0 && slope.abs() > 3.0 * own.1.abs() { 3.0 * own.1 } else { slope }
}

/// Smallest expected error, as a fraction of the time: no measurement is more exactly repeatable.
const RELATIVE_ERROR_MIN: f64 = 0.001;

/// Curve value with uncertainty.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Estimate {
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Half width of the 90 % interval around the time, in nanoseconds.
    pub(crate) uncertainty_ns: f64,
    /// Whether the work is outside the measured points.
    pub(crate) is_extrapolated: bool,
}

/// Curve value with the expected error there, before calibration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct LocalError {
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Standard deviation of a single run at the surrounding points, in nanoseconds.
    pub(crate) spread_ns: f64,
    /// Distance to an alternative interpolation between the same points, in nanoseconds.
    pub(crate) distance_ns: f64,
    /// Whether the work is outside the measured points.
    pub(crate) is_extrapolated: bool,
}

/// Rule that converts expected errors to half widths of 90 % intervals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct IntervalRule {
    /// Half width divided by the expected error, between the measured points.
    pub(crate) inside: f64,
    /// Half width divided by the expected error, outside the measured points.
    pub(crate) outside: f64,
    /// Difference between measurement sessions, as a share of the time.
    pub(crate) session: f64,
    /// Whether spreads were measured, so that no interval is narrower; otherwise they are assumed.
    pub(crate) has_spread: bool,
}

impl Estimate {
    /// Scales the estimate.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { ns: self.ns * factor, uncertainty_ns: self.uncertainty_ns * factor, ..self }
    }

    /// Adds two estimates; uncertainties add up in full, because a profile's errors share the same machine
    /// and day.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            ns: self.ns + other.ns,
            uncertainty_ns: self.uncertainty_ns + other.uncertainty_ns,
            is_extrapolated: self.is_extrapolated || other.is_extrapolated,
        }
    }
}

impl LocalError {
    /// Mixes two values, with `share` for the second.
    pub(crate) fn mixed(self, other: Self, share: f64) -> Self {
        let mix = |own: f64, other: f64| own * (1.0 - share) + other * share;
        Self {
            ns: mix(self.ns, other.ns),
            spread_ns: mix(self.spread_ns, other.spread_ns),
            distance_ns: mix(self.distance_ns, other.distance_ns),
            is_extrapolated: self.is_extrapolated || other.is_extrapolated,
        }
    }

    /// Returns the expected error in nanoseconds: spread and distance together.
    pub(crate) fn expected_ns(&self) -> f64 {
        (self.spread_ns + self.distance_ns).max(self.ns * RELATIVE_ERROR_MIN)
    }
}

impl IntervalRule {
    /// Rule that keeps the expected error unchanged.
    pub(crate) const EXPECTED: Self = Self { inside: 1.0, outside: 1.0, session: 0.0, has_spread: true };

    /// Returns the larger factors among two rules.
    pub(crate) fn wider(self, other: Self) -> Self {
        Self {
            inside: self.inside.max(other.inside),
            outside: self.outside.max(other.outside),
            session: self.session.max(other.session),
            has_spread: self.has_spread || other.has_spread,
        }
    }

    /// Returns the rule for measurements from the profile's own session.
    pub(crate) fn same_session(self) -> Self {
        Self { session: 0.0, ..self }
    }

    /// Returns the time with uncertainty, which is never below a measured spread.
    pub(crate) fn estimate(self, local: LocalError) -> Estimate {
        let factor = if local.is_extrapolated { self.outside } else { self.inside };
        let least_ns = if self.has_spread { local.spread_ns } else { 0.0 };
        let own_ns = (factor * local.expected_ns()).max(least_ns);
        Estimate {
            ns: local.ns,
            // Added in full: all points in a session are off together, in addition to their individual
            // errors.
            uncertainty_ns: own_ns + self.session * local.ns,
            is_extrapolated: local.is_extrapolated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(points: &[CurvePoint]) -> Curve {
        let knots: Vec<Knot> = points.iter().map(|&(x, ns)| Knot { x, ns, spread_ns: ns / 100.0 }).collect();
        Curve::new(&knots)
    }

    #[test]
    fn a_line_with_a_launch_cost_is_met_exactly_everywhere() {
        let line = |x: f64| 7_000.0 + 3.0 * x;
        let curve = curve(&[64.0, 128.0, 512.0, 2048.0].map(|x| (x, line(x))));
        for x in [64.0, 100.0, 500.0, 2000.0, 2048.0, 10_000.0] {
            assert!((curve.at(x) - line(x)).abs() < 1e-6 * line(x), "{x}");
        }
        assert!(curve.at(0.0).abs() < 1e-12, "no work, no launch");
        assert!((curve.at(32.0) - line(32.0)).abs() < 1e-6, "launch costs stay below the first point");
    }

    #[test]
    fn a_parabola_at_doubled_lengths_is_met_within_one_percent() {
        let curve = curve(&[256.0, 512.0, 1024.0, 2048.0, 4096.0].map(|x| (x, x * x)));
        for x in [300.0, 700.0, 1500.0, 3000.0_f64] {
            let error = curve.at(x) / (x * x) - 1.0;
            assert!(error.abs() < 0.015, "{x}: {error}");
        }
    }

    #[test]
    fn beyond_the_points_time_is_linear_in_work_and_its_uncertainty_grows() {
        let curve = curve(&[(100.0, 200.0), (200.0, 300.0), (400.0, 500.0)]);
        assert!((curve.at(800.0) - 900.0).abs() < 1e-9);
        let [near, far] = [600.0, 4000.0].map(|x| curve.estimate(x));
        assert!(near.is_extrapolated && far.is_extrapolated);
        assert!(far.uncertainty_ns / far.ns > near.uncertainty_ns / near.ns);
        assert!(!curve.estimate(400.0).is_extrapolated && !curve.estimate(100.0).is_extrapolated);
        assert!(curve.estimate(99.0).is_extrapolated);
    }

    #[test]
    fn curves_over_the_same_work_add_up() {
        let xs = [10.0, 30.0, 70.0, 90.0];
        let [a, b] = [curve(&xs.map(|x| (x, x * x))), curve(&xs.map(|x| (x, 50.0 + x)))];
        let sum = a.plus(&b).unwrap();
        for x in [10.0, 33.0, 90.0, 200.0] {
            assert!((sum.at(x) - a.at(x) - b.at(x)).abs() < 1e-9 * sum.at(x), "{x}");
        }
        assert_eq!(a.plus(&curve(&[(10.0, 1.0)])), None);
        assert_eq!(a.plus(&curve(&[10.0, 31.0, 70.0, 90.0].map(|x| (x, x)))), None);
    }

    #[test]
    fn one_point_is_taken_in_proportion() {
        let curve = curve(&[(100.0, 50.0)]);
        assert!((curve.at(50.0) - 25.0).abs() < 1e-12 && (curve.at(300.0) - 150.0).abs() < 1e-12);
        assert!(curve.estimate(300.0).is_extrapolated && !curve.estimate(100.0).is_extrapolated);
    }

    #[test]
    fn at_a_point_the_uncertainty_is_its_spread() {
        let curve = curve(&[(1.0, 100.0), (2.0, 300.0), (3.0, 900.0)]);
        assert!((curve.estimate(2.0).uncertainty_ns - 3.0).abs() < 1e-9);
        assert!(curve.estimate(2.5).uncertainty_ns > 6.0);
    }

    #[test]
    fn noise_that_falls_is_pooled_and_counts_as_spread() {
        let curve = curve(&[(1.0, 100.0), (2.0, 80.0), (4.0, 300.0)]);
        assert!((curve.at(1.0) - 90.0).abs() < 1e-9 && (curve.at(2.0) - 90.0).abs() < 1e-9);
        assert!(curve.estimate(1.0).uncertainty_ns >= 10.0);
    }

    #[test]
    fn the_rule_scales_the_expected_error_and_keeps_the_spread() {
        let points = [(1.0, 100.0), (2.0, 300.0), (3.0, 900.0)];
        let half_width = |inside, outside, session, x| {
            let rule = IntervalRule { inside, outside, session, has_spread: true };
            curve(&points).interval(rule).estimate(x).uncertainty_ns
        };
        let expected = curve(&points).estimate(2.5).uncertainty_ns;
        assert!((half_width(2.0, 9.0, 0.0, 2.5) - 2.0 * expected).abs() < 1e-9);
        assert!((half_width(0.1, 9.0, 0.0, 2.0) - 3.0).abs() < 1e-9, "the spread is the least");
        assert!((half_width(1.0, 9.0, 0.05, 2.0) - 3.0 - 15.0).abs() < 1e-9);
        let assumed = IntervalRule { inside: 0.1, has_spread: false, ..IntervalRule::EXPECTED };
        assert!((curve(&points).interval(assumed).estimate(2.0).uncertainty_ns - 0.3).abs() < 1e-9);
        let [one, nine] = [1.0, 9.0].map(|outside| half_width(1.0, outside, 0.0, 6.0));
        assert!((nine - 9.0 * one).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn more_work_never_takes_less_time(
            times in prop::collection::vec((1u32..50, 1.0f64..1e6), 1..12),
            low in 0.0f64..1000.0, more in 0.0f64..1000.0,
        ) {
            let mut x = 0.0;
            let points: Vec<CurvePoint> = times.iter().map(|&(step, ns)| { x += f64::from(step); (x, ns) }).collect();
            let curve = curve(&points);
            let [less, most] = [curve.at(low), curve.at(low + more)];
            prop_assert!(less <= most * (1.0 + 1e-12) + 1e-9, "{less} {most}");
            prop_assert!(curve.estimate(low).uncertainty_ns >= 0.0);
        }

        #[test]
        fn pooling_keeps_the_order_of_inputs(
            values in prop::collection::vec((0.0f64..100.0, 0.0f64..10.0), 1..20),
        ) {
            let mut low: Vec<f64> = values.iter().map(|value| value.0).collect();
            let mut high: Vec<f64> = values.iter().map(|value| value.0 + value.1).collect();
            pool_adjacent_violators(&mut low);
            pool_adjacent_violators(&mut high);
            prop_assert!(low.windows(2).all(|pair| pair[0] <= pair[1] + 1e-9));
            prop_assert!(low.iter().zip(&high).all(|(low, high)| *low <= high + 1e-9));
        }
    }
}
