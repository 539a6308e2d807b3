//! Predicts each measured point from the remaining points, to learn how far errors exceed expectations.

use super::{Curve, Knot, LocalError, Surface, SurfacePoint};

/// Error at a left-out point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Score {
    /// Distance from the prediction, divided by the expected error.
    pub(crate) ratio: f64,
    /// Whether the point is outside the remaining points.
    pub(crate) is_extrapolated: bool,
}

impl Score {
    fn new(ns: f64, local: LocalError) -> Self {
        // A prediction of zero time expects no error.
        let expected_ns = local.expected_ns().max(f64::MIN_POSITIVE);
        Self { ratio: (ns - local.ns).abs() / expected_ns, is_extrapolated: local.is_extrapolated }
    }
}

/// Returns the errors at a curve's points, each predicted from the remaining points; none for a single point.
pub(crate) fn curve_scores(knots: &[Knot]) -> Vec<Score> {
    let score = |(others, left_out): (Vec<Knot>, &Knot)| {
        (!others.is_empty()).then(|| Score::new(left_out.ns, Curve::new(&others).local(left_out.x)))
    };
    each_left_out(knots).filter_map(score).collect()
}

/// Returns the errors at a surface's points, each predicted from the remaining points; none for a single
/// point.
pub(crate) fn surface_scores(points: &[SurfacePoint]) -> Vec<Score> {
    let score = |(others, left_out): (Vec<SurfacePoint>, &SurfacePoint)| {
        let predict = || Surface::new(others.clone()).local(left_out.batch, left_out.tokens);
        (!others.is_empty()).then(|| Score::new(left_out.ns, predict()))
    };
    each_left_out(points).filter_map(score).collect()
}

fn each_left_out<T: Copy>(all: &[T]) -> impl Iterator<Item = (Vec<T>, &T)> {
    all.iter().enumerate().map(|(at, left_out)| ([&all[..at], &all[at + 1..]].concat(), left_out))
}
