//! Groups measured points into points of a surface and knots of a curve.

use std::collections::BTreeMap;

use super::layer_counts::{LayerCountTime, at_layers};
use crate::curve::{Knot, SurfacePoint};
use crate::profile::Point;

/// Points by tokens and batch; points of one shape differ only in their layer counts.
type Shapes<'a> = BTreeMap<(u32, u32), Vec<&'a Point>>;

pub(super) fn shapes(points: &[Point]) -> Shapes<'_> {
    let mut shapes = Shapes::new();
    for point in points {
        shapes.entry((point.setting.tokens, point.setting.batch)).or_default().push(point);
    }
    shapes
}

pub(super) fn surface_points(
    shapes: &Shapes<'_>,
    time: impl Fn(&[&Point]) -> LayerCountTime,
) -> Vec<SurfacePoint> {
    let point = |(&(tokens, batch), points): (&(u32, u32), &Vec<&Point>)| {
        let LayerCountTime { ns, spread_ns, .. } = time(points);
        SurfacePoint { batch: batch.into(), tokens: tokens.into(), ns, spread_ns }
    };
    shapes.iter().map(point).collect()
}

/// Returns points of one part, pass, TP degree and layer count as they were measured.
pub(super) fn measured_points(points: &[Point]) -> Vec<SurfacePoint> {
    surface_points(&shapes(points), |points| at_layers(points, points[0].setting.layers))
}

/// Returns such points by all tokens of a batch.
pub(super) fn measured_knots(points: &[Point]) -> Vec<Knot> {
    knots(&measured_points(points))
}

/// Joins points to knots by all tokens of a batch, ascending.
pub(super) fn knots(points: &[SurfacePoint]) -> Vec<Knot> {
    let knot = |point: &SurfacePoint| Knot {
        x: point.batch * point.tokens,
        ns: point.ns,
        spread_ns: point.spread_ns,
    };
    let mut knots: Vec<Knot> = points.iter().map(knot).collect();
    knots.sort_by(|a, b| a.x.total_cmp(&b.x).then(a.ns.total_cmp(&b.ns)));
    knots.chunk_by(|a, b| a.x.total_cmp(&b.x).is_eq()).map(merge).collect()
}

/// Merges knots of the same work in different shapes: their mean, with the distance to it as spread.
fn merge(knots: &[Knot]) -> Knot {
    let ns = knots.iter().map(|knot| knot.ns).sum::<f64>() / knots.len() as f64;
    let spread = |knot: &Knot| knot.spread_ns.max((knot.ns - ns).abs());
    Knot { x: knots[0].x, ns, spread_ns: knots.iter().map(spread).fold(0.0, f64::max) }
}
