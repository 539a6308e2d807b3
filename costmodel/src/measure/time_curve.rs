//! Exposes the interpolation used for predictions to measuring programs, which decide where to measure next.

use crate::curve::{Curve, Knot, Surface, SurfacePoint};
use crate::profile::Part;

/// Time for a module part over tokens: in a single sequence for attention, in all sequences otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeCurve(Kind);

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Linear(Curve),
    Attention(Surface),
}

impl TimeCurve {
    /// Fits the curve used for predictions to pairs of tokens (at least 1) and time; `None` without points.
    ///
    /// Points are in any order; for equal token counts the last point counts.
    #[must_use]
    pub fn new(part: Part, points: &[(u32, f64)]) -> Option<Self> {
        let by_tokens: std::collections::BTreeMap<u32, f64> = points.iter().copied().collect();
        if by_tokens.is_empty() {
            return None;
        }
        let points = by_tokens.into_iter().map(|(tokens, time)| (f64::from(tokens), time));
        Some(Self(if part == Part::Attention {
            let point = |(tokens, ns)| SurfacePoint { batch: 1.0, tokens, ns, spread_ns: 0.0 };
            Kind::Attention(Surface::new(points.map(point).collect()))
        } else {
            let knots: Vec<Knot> = points.map(|(x, ns)| Knot { x, ns, spread_ns: 0.0 }).collect();
            Kind::Linear(Curve::new(&knots))
        }))
    }

    /// Returns the times at `sizes` on the curve through `points`; none without points.
    #[must_use]
    pub fn interpolate(part: Part, points: &[(u32, f64)], sizes: &[u32]) -> Vec<f64> {
        let curve = Self::new(part, points);
        curve.iter().flat_map(|curve| sizes.iter().map(|&size| curve.at(size))).collect()
    }

    /// Returns the time at a number of tokens, in the points' unit.
    #[must_use]
    pub fn at(&self, tokens: u32) -> f64 {
        match &self.0 {
            Kind::Linear(curve) => curve.at(f64::from(tokens)),
            Kind::Attention(surface) => surface.at(1.0, f64::from(tokens)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_squares_are_interpolated_between_their_points() {
        let points =
            |time: fn(f64) -> f64| [64_u32, 128, 256].map(|tokens| (tokens, time(f64::from(tokens))));
        let line = TimeCurve::new(Part::Linear, &points(|x| 7.0 + 3.0 * x)).unwrap();
        assert!((line.at(100) - 307.0).abs() < 1e-9);
        let square = TimeCurve::new(Part::Attention, &points(|x| x * x)).unwrap();
        assert!((square.at(1024) / 1_048_576.0 - 1.0).abs() < 1e-9, "beyond the points work is the square");
        assert!((square.at(200) / 40_000.0 - 1.0).abs() < 0.02);
        assert_eq!(TimeCurve::new(Part::OutsideLayers, &[]), None);
    }
}
