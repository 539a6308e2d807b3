//! Chooses the shapes to measure: denser where interpolated predictions would be wrong.
//!
//! Starts with a coarse geometric grid. Then, level by level, the middle of every interval is measured and
//! compared with the curve that the cost model draws through the points around it. Where the curve misses by
//! more than the bound, both halves are examined in the next level. Points of earlier levels are measured
//! again together with the new ones, so that a machine that slows down meanwhile does not look like a curve
//! that bends.
//!
//! Ends when no interval is left, at the maximum number of points, or when the source has spent its budget.

use dflop_costmodel::TimeCurve;
use dflop_costmodel::profile::Part;

use crate::error::Result;

/// Range and stop conditions of the choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grid {
    /// Part of the profile: attention grows with the square of its tokens, everything else linearly.
    pub part: Part,
    /// Smallest number of tokens.
    pub tokens_min: u32,
    /// Largest number of tokens.
    pub tokens_max: u32,
    /// Ratio of neighboring points in the first grid, at least 1.25.
    pub ratio: f64,
    /// Largest relative error of interpolation in the middle of an interval.
    pub error_bound: f64,
    /// Largest number of points.
    pub points_max: usize,
}

/// A source of measured times by number of tokens.
pub trait TimeSource {
    /// Returns the possible number of tokens that is nearest to `tokens`.
    fn snap(&self, tokens: u32) -> u32;

    /// Measures points together, some of them for the second time, and returns their times, all above 0, in
    /// one unit.
    ///
    /// # Errors
    /// Errors of the code that is measured.
    fn measure(&mut self, tokens: &[u32]) -> Result<Vec<f64>>;

    /// Returns whether the budget is spent, so that nothing more should be measured.
    fn is_spent(&self) -> bool;
}

/// Chosen points, and the error that is left between them.
#[derive(Debug, Clone, PartialEq)]
pub struct ChosenPoints {
    /// Tokens and times, ascending.
    pub points: Vec<(u32, f64)>,
    /// Largest error of an interval, taken in its middle; a half that was not examined has the error of the
    /// whole. `None` if no middle was measured.
    pub error_max: Option<f64>,
    /// Number of intervals whose error is not known to be within the bound.
    pub open: usize,
}

/// An interval between two points.
#[derive(Debug, Clone, Copy)]
struct Interval {
    low: u32,
    high: u32,
    /// Error of the interval that this is a half of.
    error: Option<f64>,
}

/// Chooses and measures points.
///
/// # Errors
/// Errors of the source.
pub fn choose(grid: &Grid, source: &mut impl TimeSource) -> Result<ChosenPoints> {
    let mut tokens = first_grid(grid, source);
    let times = source.measure(&tokens)?;
    let mut points: Vec<(u32, f64)> = tokens.iter().copied().zip(times).collect();
    let mut open: Vec<Interval> =
        tokens.windows(2).map(|pair| Interval { low: pair[0], high: pair[1], error: None }).collect();
    let (mut closed, mut unmet) = (Vec::new(), Vec::new());
    while !source.is_spent() {
        let mut middles = Vec::new();
        for interval in std::mem::take(&mut open) {
            match middle(interval, source) {
                // No number of tokens lies between: the error of the whole interval remains.
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
        tokens.extend(&middles);
        let times = source.measure(&tokens)?;
        let measured: Vec<(u32, f64)> = tokens.iter().copied().zip(times).collect();
        let (old, new) = measured.split_at(points.len());
        let Some(curve) = TimeCurve::new(grid.part, old) else { break };
        // Intervals beyond the largest number of points were not measured, and stay open.
        let mut next = open.split_off(new.len());
        for (interval, &(middle, time)) in open.iter().zip(new) {
            let error = (curve.at(middle) / time - 1.0).abs();
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

/// Returns points at equal ratios, including both ends.
fn first_grid(grid: &Grid, source: &impl TimeSource) -> Vec<u32> {
    let (low, high) = (f64::from(grid.tokens_min.max(1)), f64::from(grid.tokens_max.max(grid.tokens_min)));
    let steps = ((high / low).ln() / grid.ratio.max(1.25).ln()).ceil().max(1.0) as u32;
    let at = |step: u32| low * (high / low).powf(f64::from(step) / f64::from(steps));
    let mut tokens: Vec<u32> = (0..=steps).map(|step| source.snap(at(step).round() as u32)).collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Returns the geometric mean, if a possible number of tokens lies strictly between.
fn middle(interval: Interval, source: &impl TimeSource) -> Option<u32> {
    let mean = (f64::from(interval.low) * f64::from(interval.high)).sqrt();
    Some(source.snap(mean.round() as u32)).filter(|tokens| (interval.low + 1..interval.high).contains(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times by a function, on a clock that each measurement advances.
    struct Synthetic<F> {
        time: F,
        step: u32,
        clock: f64,
        budget: f64,
        calls: Vec<usize>,
    }

    impl<F: Fn(f64) -> f64> Synthetic<F> {
        fn new(time: F, budget: f64) -> Self {
            Self { time, step: 1, clock: 0.0, budget, calls: Vec::new() }
        }
    }

    impl<F: Fn(f64) -> f64> TimeSource for Synthetic<F> {
        fn snap(&self, tokens: u32) -> u32 {
            (tokens / self.step * self.step).max(self.step)
        }

        fn measure(&mut self, tokens: &[u32]) -> Result<Vec<f64>> {
            self.calls.push(tokens.len());
            let times: Vec<f64> = tokens.iter().map(|&tokens| (self.time)(f64::from(tokens))).collect();
            self.clock += times.iter().sum::<f64>();
            Ok(times)
        }

        fn is_spent(&self) -> bool {
            self.clock >= self.budget
        }
    }

    const GRID: Grid = Grid {
        part: Part::Linear,
        tokens_min: 16,
        tokens_max: 8192,
        ratio: 4.0,
        error_bound: 0.02,
        points_max: 64,
    };

    /// A line with a launch cost, and a cache that ends at 1000 tokens.
    fn bent(tokens: f64) -> f64 {
        50.0 + 3.0 * tokens + 2.5 * (tokens - 1000.0).max(0.0)
    }

    #[test]
    fn a_line_needs_one_look_at_every_interval() {
        let mut source = Synthetic::new(|tokens| 50.0 + 3.0 * tokens, f64::INFINITY);
        let chosen = choose(&GRID, &mut source).unwrap();
        assert_eq!(source.calls, [6, 11]);
        assert!(chosen.open == 0 && chosen.error_max.unwrap() < 1e-9);
        assert_eq!((chosen.points[0].0, chosen.points[10].0), (16, 8192));
        assert!(chosen.points.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn the_bound_holds_everywhere_when_the_choice_ends() {
        let mut source = Synthetic::new(bent, f64::INFINITY);
        let chosen = choose(&GRID, &mut source).unwrap();
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
        let chosen = choose(&GRID, &mut source).unwrap();
        assert_eq!((source.calls, chosen.error_max, chosen.open), (vec![6], None, 5));
        let mut source = Synthetic::new(bent, first * 1.1);
        let chosen = choose(&GRID, &mut source).unwrap();
        assert_eq!(source.calls, [6, 11]);
        assert!(chosen.open > 0 && chosen.error_max.unwrap() > 0.02, "{chosen:?}");
    }

    #[test]
    fn noise_without_end_ends_at_the_most_points_or_where_nothing_lies_between() {
        let noisy = |tokens: f64| 100.0 + tokens + 50.0 * (tokens as u64 % 3) as f64;
        let chosen = choose(&GRID, &mut Synthetic::new(noisy, f64::INFINITY)).unwrap();
        assert!(chosen.points.len() <= 64 && chosen.open > 0);
        let mut source = Synthetic { step: 512, ..Synthetic::new(noisy, f64::INFINITY) };
        let grid = Grid { tokens_min: 512, points_max: 1000, ..GRID };
        let chosen = choose(&grid, &mut source).unwrap();
        assert!(chosen.points.len() <= 16 && chosen.points.iter().all(|point| point.0 % 512 == 0));
    }

    #[test]
    fn attention_is_held_against_squares() {
        let mut source = Synthetic::new(|tokens| 5.0 + tokens * tokens / 100.0, f64::INFINITY);
        let chosen = choose(&Grid { part: Part::Attention, ..GRID }, &mut source).unwrap();
        assert!(chosen.open == 0 && chosen.error_max.unwrap() <= 0.02);
    }
}
