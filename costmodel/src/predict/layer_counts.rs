//! Extrapolates from measured layer counts to a model's layer count.
//!
//! Time is assumed to be `constant + layers x time per layer`. Two layer counts separate the two; a single
//! count can only be scaled in proportion, which scales the constant with it.

use crate::profile::Point;
use crate::quantiles::median_of_sorted;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::module::Module;
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
