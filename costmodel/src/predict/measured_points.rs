//! Groups measured points into points of a surface, knots of a curve, and runs of whole modules, at a model's
//! layer count.
//!
//! Time is assumed to be `constant + layers x time per layer`. Two layer counts separate the two; a single
//! count can only be scaled in proportion, which scales the constant with it.

use std::collections::BTreeMap;

use crate::curve::{Knot, SurfacePoint};
use crate::profile::{Part, Phase, Point};
use crate::quantiles::median_of_sorted;

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

/// Time for a number of layers, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerCountTime {
    pub(super) ns: f64,
    pub(super) spread_ns: f64,
    pub(super) method: Method,
}

/// Method used to find the time for a number of layers; earlier methods are more exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Method {
    /// The layer count was measured.
    Measured,
    /// Extrapolated from at least two layer counts.
    Difference,
    /// Scaled in proportion to a single layer count.
    Proportion,
}

const NANOSECONDS_PER_MICROSECOND: f64 = 1000.0;

/// Returns the time for `layers` layers, from points that differ only in layer count.
pub(super) fn at_layers(points: &[&Point], layers: u32) -> LayerCountTime {
    if let Some(point) = points.iter().find(|point| point.setting.layers == layers) {
        return scaled(point, 1.0, Method::Measured);
    }
    let Some(slope) = slope_microseconds(points) else {
        let point = deepest(points);
        return scaled(point, f64::from(layers) / f64::from(point.setting.layers.max(1)), Method::Proportion);
    };
    let rest = |point: &&Point| point.microseconds - slope * f64::from(point.setting.layers);
    let mut rests: Vec<f64> = points.iter().map(rest).collect();
    rests.sort_by(f64::total_cmp);
    // A negative constant is noise.
    let microseconds = median_of_sorted(&rests).max(0.0) + slope * f64::from(layers);
    LayerCountTime {
        ns: microseconds * NANOSECONDS_PER_MICROSECOND,
        spread_ns: extrapolated_spread(points, layers) * NANOSECONDS_PER_MICROSECOND,
        method: Method::Difference,
    }
}

/// Returns the time per additional layer.
pub(super) fn per_layer(points: &[&Point]) -> LayerCountTime {
    let Some(slope) = slope_microseconds(points) else {
        let point = deepest(points);
        return scaled(point, 1.0 / f64::from(point.setting.layers.max(1)), Method::Proportion);
    };
    LayerCountTime {
        ns: slope * NANOSECONDS_PER_MICROSECOND,
        spread_ns: extrapolated_spread(points, 1) * NANOSECONDS_PER_MICROSECOND,
        method: Method::Difference,
    }
}

/// Returns the median slope over all pairs of layer counts (Theil and Sen), in microseconds per layer.
///
/// `None` with a single layer count, or if more layers did not take more time.
fn slope_microseconds(points: &[&Point]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (at, low) in points.iter().enumerate() {
        for high in &points[at + 1..] {
            let layers = f64::from(high.setting.layers) - f64::from(low.setting.layers);
            if layers != 0.0 {
                slopes.push((high.microseconds - low.microseconds) / layers);
            }
        }
    }
    slopes.sort_by(f64::total_cmp);
    (!slopes.is_empty()).then(|| median_of_sorted(&slopes)).filter(|slope| *slope > 0.0)
}

/// Extrapolates the deepest point's spread by the distance in layers.
fn extrapolated_spread(points: &[&Point], layers: u32) -> f64 {
    let deepest = deepest(points);
    let shallowest = points.iter().map(|point| point.setting.layers).min().unwrap_or(0);
    let reach =
        f64::from(layers.abs_diff(shallowest)) / f64::from((deepest.setting.layers - shallowest).max(1));
    deepest.spread_microseconds * reach.max(1.0)
}

fn deepest<'a>(points: &[&'a Point]) -> &'a Point {
    let mut deepest = points[0];
    for point in points {
        if point.setting.layers > deepest.setting.layers {
            deepest = point;
        }
    }
    deepest
}

fn scaled(point: &Point, factor: f64, method: Method) -> LayerCountTime {
    let factor = factor * NANOSECONDS_PER_MICROSECOND;
    LayerCountTime { ns: point.microseconds * factor, spread_ns: point.spread_microseconds * factor, method }
}

/// Whole-module run over a microbatch with equal sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct WholeRun {
    /// Number of sequences, and tokens per sequence.
    pub(super) shape: [f64; 2],
    /// Forward and backward in nanoseconds.
    pub(super) passes_ns: [f64; 2],
}

/// Returns the runs for a module with this many layers, by shape; `points` belong to this module.
///
/// Layers are extrapolated if they were not measured; if some shapes have two layer counts, shapes with only
/// one are left out, because scaled in proportion they would not be on the same curve.
pub(super) fn whole_runs(points: &[Point], tp: u32, layers: u32) -> Vec<WholeRun> {
    let mut shapes: BTreeMap<[u32; 2], [Vec<&Point>; 2]> = BTreeMap::new();
    for point in points {
        let setting = point.setting;
        let pass = match setting.phase {
            Phase::Forward => 0,
            Phase::Backward => 1,
            Phase::Optimizer => continue,
        };
        if setting.part == Part::Whole && setting.tp == tp {
            shapes.entry(point.shape()).or_default()[pass].push(point);
        }
    }
    shapes.retain(|_, passes| passes.iter().all(|pass| !pass.is_empty()));
    let times = |passes: &[Vec<&Point>; 2]| [0, 1].map(|pass: usize| at_layers(&passes[pass], layers));
    let mut runs: Vec<([u32; 2], [LayerCountTime; 2])> =
        shapes.iter().map(|(shape, passes)| (*shape, times(passes))).collect();
    let is_exact = |(_, times): &([u32; 2], [LayerCountTime; 2])| {
        times.iter().all(|time| time.method < Method::Proportion)
    };
    if runs.iter().any(is_exact) {
        runs.retain(is_exact);
    }
    let run = |(shape, times): ([u32; 2], [LayerCountTime; 2])| WholeRun {
        shape: shape.map(f64::from),
        passes_ns: times.map(|time| time.ns),
    };
    runs.into_iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Module;
    use crate::profile::{Part, Phase, Setting};

    fn point(layers: u32, microseconds: f64) -> Point {
        let (module, part, phase) = (Module::Llm, Part::Linear, Phase::Forward);
        let setting = Setting { module, part, phase, tp: 1, layers, batch: 1, tokens: 512 };
        Point { setting, microseconds, spread_microseconds: 1.0, repeats: 5, bytes: None }
    }

    fn time(points: &[Point], layers: u32) -> LayerCountTime {
        at_layers(&points.iter().collect::<Vec<_>>(), layers)
    }

    #[test]
    fn two_layer_counts_give_a_constant_and_a_time_per_layer() {
        let points = [point(2, 70.0), point(4, 120.0)];
        let all = time(&points, 28);
        assert_eq!(all.method, Method::Difference);
        assert!((all.ns - (20.0 + 28.0 * 25.0) * 1000.0).abs() < 1e-6);
        assert!(all.spread_ns > 10_000.0, "13 times as far");
        assert!((per_layer(&points.iter().collect::<Vec<_>>()).ns - 25_000.0).abs() < 1e-6);
        assert_eq!(time(&points, 4).method, Method::Measured);
    }

    #[test]
    fn one_layer_count_is_taken_in_proportion() {
        let all = time(&[point(4, 120.0)], 28);
        assert_eq!(all.method, Method::Proportion);
        assert!((all.ns - 840_000.0).abs() < 1e-6);
    }

    #[test]
    fn layers_that_seem_to_take_no_time_are_taken_in_proportion_too() {
        let all = time(&[point(2, 120.0), point(4, 110.0)], 8);
        assert_eq!(all.method, Method::Proportion);
        assert!((all.ns - 220_000.0).abs() < 1e-6);
    }

    #[test]
    fn a_negative_constant_is_none() {
        assert!((time(&[point(2, 10.0), point(4, 40.0)], 8).ns - 120_000.0).abs() < 1e-6);
    }
}
