//! Chooses the shapes to measure: denser where interpolated predictions would be wrong.
//!
//! Starts with a coarse geometric grid. Then, level by level, the middle of every interval is measured and
//! compared with a prediction from the surrounding points. If the prediction misses by more than the bound,
//! both halves are examined in the next level. Points from earlier levels are measured again together with
//! the new points, so that a machine that slows down meanwhile does not look like a curve that bends.
//!
//! Ends when no interval is left, at the maximum number of points, or when the source has spent the budget.

use crate::curve::{Curve, Knot, Surface, SurfacePoint};
use crate::profile::Part;

/// Maximum number of points on one profile axis.
const POINTS_MAX: usize = 24;
/// Ratio between neighboring points in a profile's first grid.
const RATIO: f64 = 4.0;

/// Range and stop conditions for the choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grid {
    /// Smallest size: tokens, or items.
    pub size_min: u32,
    /// Largest size.
    pub size_max: u32,
    /// Ratio between neighboring points in the first grid, at least 1.25.
    pub ratio: f64,
    /// Maximum relative interpolation error in the middle of an interval.
    pub error_bound: f64,
    /// Maximum number of points.
    pub points_max: usize,
}

impl Grid {
    /// Returns the grid for one profile axis.
    #[must_use]
    pub const fn new(size_min: u32, size_max: u32, error_bound: f64) -> Self {
        Self { size_min, size_max, ratio: RATIO, error_bound, points_max: POINTS_MAX }
    }
}

/// Source of measured times by size, which is a number of tokens or items.
pub trait TimeSource {
    /// Error type of the measured code.
    type Error;

    /// Returns the possible size nearest to `size`.
    ///
    /// # Errors
    /// Errors from the source.
    fn snap(&mut self, size: u32) -> Result<u32, Self::Error>;

    /// Returns the first grid sizes that the budget allows, at least two. Default: all.
    ///
    /// # Errors
    /// Errors from the measured code.
    fn affordable(&mut self, sizes: Vec<u32>) -> Result<Vec<u32>, Self::Error> {
        Ok(sizes)
    }

    /// Measures sizes together, some for the second time, and returns the times, all above 0, in the same
    /// unit.
    ///
    /// # Errors
    /// Errors from the measured code.
    fn measure(&mut self, sizes: &[u32]) -> Result<Vec<f64>, Self::Error>;

    /// Predicts the times at `sizes` from measured points. Default: from the linear-work curve.
    ///
    /// # Errors
    /// Errors from the source.
    fn predict(&mut self, points: &[(u32, f64)], sizes: &[u32]) -> Result<Vec<f64>, Self::Error> {
        Ok(TimeCurve::interpolate(Part::Linear, points, sizes))
    }

    /// Returns whether the budget is spent, so that nothing more should be measured.
    ///
    /// # Errors
    /// Errors from the source.
    fn is_spent(&mut self) -> Result<bool, Self::Error>;
}

/// Chosen points, and the remaining error between them.
#[derive(Debug, Clone, PartialEq)]
pub struct ChosenPoints {
    /// Sizes and times, ascending.
    pub points: Vec<(u32, f64)>,
    /// Maximum error over intervals, measured in the middle; an unexamined half has the whole interval's
    /// error. `None` if no middle was measured.
    pub error_max: Option<f64>,
    /// Number of intervals whose error is not known to be within the bound.
    pub open: usize,
}

/// Interval between two points.
#[derive(Debug, Clone, Copy)]
struct Interval {
    low: u32,
    high: u32,
    /// Error of the interval that this interval is a half of.
    error: Option<f64>,
}

/// Chooses and measures points; uses as many first-grid points as are affordable.
///
/// # Errors
/// Errors from the source, unchanged.
pub fn choose_points<S: TimeSource>(grid: &Grid, source: &mut S) -> Result<ChosenPoints, S::Error> {
    let mut sizes = first_grid(grid, source)?;
    sizes = source.affordable(sizes)?;
    let times = source.measure(&sizes)?;
    let mut points: Vec<(u32, f64)> = sizes.iter().copied().zip(times).collect();
    let mut open: Vec<Interval> =
        sizes.windows(2).map(|pair| Interval { low: pair[0], high: pair[1], error: None }).collect();
    let (mut closed, mut unmet) = (Vec::new(), Vec::new());
    while !source.is_spent()? {
        let mut middles = Vec::new();
        for interval in std::mem::take(&mut open) {
            match middle(interval, source)? {
                // There is no size in between: the whole interval's error remains.
                None => unmet.extend(interval.error),
                Some(middle) => {
                    open.push(interval);
                    if points.len() + middles.len() < grid.points_max {
                        middles.push(middle);
                    }
                }
            }
        }
        if middles.is_empty() {
            break;
        }
        sizes.extend(&middles);
        let times = source.measure(&sizes)?;
        let measured: Vec<(u32, f64)> = sizes.iter().copied().zip(times).collect();
        let (old, new) = measured.split_at(points.len());
        let predicted = source.predict(old, &middles)?;
        // Intervals beyond the maximum number of points were not measured, and stay open.
        let mut next = open.split_off(new.len());
        for ((interval, &(middle, time)), predicted) in open.iter().zip(new).zip(predicted) {
            let error = (predicted / time - 1.0).abs();
            if error <= grid.error_bound {
                closed.push(error);
            } else {
                next.push(Interval { high: middle, error: Some(error), ..*interval });
                next.push(Interval { low: middle, error: Some(error), ..*interval });
            }
        }
        (open, points) = (next, measured);
    }
    points.sort_by_key(|point| point.0);
    let count = open.len() + unmet.len();
    let errors = closed.into_iter().chain(unmet).chain(open.iter().filter_map(|interval| interval.error));
    Ok(ChosenPoints { points, error_max: errors.reduce(f64::max), open: count })
}

/// Returns sizes at equal ratios, including both ends.
fn first_grid<S: TimeSource>(grid: &Grid, source: &mut S) -> Result<Vec<u32>, S::Error> {
    let (low, high) = (f64::from(grid.size_min.max(1)), f64::from(grid.size_max.max(grid.size_min).max(1)));
    let steps = ((high / low).ln() / grid.ratio.max(1.25).ln()).ceil().max(1.0) as u32;
    let at = |step: u32| low * (high / low).powf(f64::from(step) / f64::from(steps));
    let snapped = (0..=steps).map(|step| source.snap(at(step).round() as u32));
    let mut sizes: Vec<u32> = snapped.collect::<Result<_, _>>()?;
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

/// Returns the geometric mean, if a possible size is strictly in between.
fn middle<S: TimeSource>(interval: Interval, source: &mut S) -> Result<Option<u32>, S::Error> {
    let mean = (f64::from(interval.low) * f64::from(interval.high)).sqrt();
    let size = source.snap(mean.round() as u32)?;
    Ok(Some(size).filter(|size| (interval.low + 1..interval.high).contains(size)))
}

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
    use std::convert::Infallible;

    use super::*;

    /// Times from a function, on a clock that each measurement advances.
    struct Synthetic<F> {
        time: F,
        step: u32,
        clock: f64,
        budget: f64,
        calls: Vec<usize>,
        part: Part,
    }

    impl<F: Fn(f64) -> f64> Synthetic<F> {
        fn new(time: F, budget: f64) -> Self {
            Self { time, step: 1, clock: 0.0, budget, calls: Vec::new(), part: Part::Linear }
        }
    }

    impl<F: Fn(f64) -> f64> TimeSource for Synthetic<F> {
        type Error = Infallible;

        fn snap(&mut self, size: u32) -> Result<u32, Infallible> {
            Ok((size / self.step * self.step).max(self.step))
        }

        fn measure(&mut self, sizes: &[u32]) -> Result<Vec<f64>, Infallible> {
            self.calls.push(sizes.len());
            let times: Vec<f64> = sizes.iter().map(|&size| (self.time)(f64::from(size))).collect();
            self.clock += times.iter().sum::<f64>();
            Ok(times)
        }

        fn predict(&mut self, points: &[(u32, f64)], sizes: &[u32]) -> Result<Vec<f64>, Infallible> {
            Ok(TimeCurve::interpolate(self.part, points, sizes))
        }

        fn is_spent(&mut self) -> Result<bool, Infallible> {
            Ok(self.clock >= self.budget)
        }
    }

    const GRID: Grid = Grid { points_max: 64, ..Grid::new(16, 8192, 0.02) };

    /// A line with a launch cost, and a cache that ends at 1000 tokens.
    fn bent(tokens: f64) -> f64 {
        50.0 + 3.0 * tokens + 2.5 * (tokens - 1000.0).max(0.0)
    }

    #[test]
    fn a_line_needs_one_look_at_every_interval() {
        let mut source = Synthetic::new(|tokens| 50.0 + 3.0 * tokens, f64::INFINITY);
        let chosen = choose_points(&GRID, &mut source).unwrap();
        assert_eq!(source.calls, [6, 11]);
        assert!(chosen.open == 0 && chosen.error_max.unwrap() < 1e-9);
        assert_eq!((chosen.points[0].0, chosen.points[10].0), (16, 8192));
        assert!(chosen.points.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn the_bound_holds_everywhere_when_the_choice_ends() {
        let mut source = Synthetic::new(bent, f64::INFINITY);
        let chosen = choose_points(&GRID, &mut source).unwrap();
        assert!(chosen.open == 0 && chosen.error_max.unwrap() <= 0.02, "{chosen:?}");
        let curve = TimeCurve::new(Part::Linear, &chosen.points).unwrap();
        for tokens in 16..=8192 {
            let error = (curve.at(tokens) / bent(f64::from(tokens)) - 1.0).abs();
            assert!(error <= 0.03, "{tokens}: {error}");
        }
        let near = chosen.points.iter().filter(|point| (700..1500).contains(&point.0)).count();
        let far = chosen.points.iter().filter(|point| (4000..8000).contains(&point.0)).count();
        assert!(near > far, "points are denser where the time bends: {:?}", chosen.points);
    }

    #[test]
    fn a_spent_budget_ends_the_choice_and_the_error_left_is_said() {
        let first: f64 = [16.0, 55.0, 194.0, 676.0, 2353.0, 8192.0].map(bent).iter().sum();
        let mut source = Synthetic::new(bent, first * 0.9);
        let chosen = choose_points(&GRID, &mut source).unwrap();
        assert_eq!((source.calls, chosen.error_max, chosen.open), (vec![6], None, 5));
        let mut source = Synthetic::new(bent, first * 1.1);
        let chosen = choose_points(&GRID, &mut source).unwrap();
        assert_eq!(source.calls, [6, 11]);
        assert!(chosen.open > 0 && chosen.error_max.unwrap() > 0.02, "{chosen:?}");
    }

    #[test]
    fn noise_without_end_ends_at_the_most_points_or_where_nothing_lies_between() {
        let noisy = |tokens: f64| 100.0 + tokens + 50.0 * (tokens as u64 % 3) as f64;
        let chosen = choose_points(&GRID, &mut Synthetic::new(noisy, f64::INFINITY)).unwrap();
        assert!(chosen.points.len() <= 64 && chosen.open > 0);
        let mut source = Synthetic { step: 512, ..Synthetic::new(noisy, f64::INFINITY) };
        let grid = Grid { size_min: 512, points_max: 1000, ..GRID };
        let chosen = choose_points(&grid, &mut source).unwrap();
        assert!(chosen.points.len() <= 16 && chosen.points.iter().all(|point| point.0 % 512 == 0));
    }

    #[test]
    fn attention_is_held_against_squares() {
        let square = Synthetic::new(|tokens| 5.0 + tokens * tokens / 100.0, f64::INFINITY);
        let chosen = choose_points(&GRID, &mut Synthetic { part: Part::Attention, ..square }).unwrap();
        assert!(chosen.open == 0 && chosen.error_max.unwrap() <= 0.02);
    }

    #[test]
    fn an_error_of_the_source_ends_the_choice_unchanged() {
        /// Fails at the nth call.
        struct Failing(u32);

        impl Failing {
            fn call<T>(&mut self, value: T) -> Result<T, &'static str> {
                self.0 = self.0.checked_sub(1).ok_or("the source failed")?;
                Ok(value)
            }
        }

        impl TimeSource for Failing {
            type Error = &'static str;

            fn snap(&mut self, size: u32) -> Result<u32, &'static str> {
                self.call(size)
            }

            fn measure(&mut self, sizes: &[u32]) -> Result<Vec<f64>, &'static str> {
                self.call(sizes.iter().map(|&size| f64::from(size)).collect())
            }

            fn is_spent(&mut self) -> Result<bool, &'static str> {
                self.call(false)
            }
        }

        let calls = (0..100).find(|&calls| choose_points(&GRID, &mut Failing(calls)).is_ok()).unwrap();
        // Six sizes in the first grid, five middles, two measurements, and two budget queries.
        assert_eq!(calls, 15);
        assert_eq!(choose_points(&GRID, &mut Failing(calls - 1)), Err("the source failed"));
    }

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
