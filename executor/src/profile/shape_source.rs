//! Runs a module at chosen shapes, within a time budget.
//!
//! Nothing begins that would end after the budget, estimated from the times of smaller shapes, except the two
//! smallest shapes, without which there is no curve.

use std::time::{Duration, Instant};

use dflop_costmodel::measure::{TimeCurve, TimeSource};
use dflop_costmodel::median;
use dflop_costmodel::profile::{Measurement, Part};

use super::module_under_test::ModuleUnderTest;
use crate::error::{Error, Result};
use dflop_device::Device;

/// Number of runs per shape while shapes are chosen.
const CHOOSING_RUNS: usize = 3;
/// Minimum number of shapes, measured regardless of duration.
const SHAPES_MIN: usize = 2;
/// Maximum growth factor in the number of shapes from one level of the choice to the next.
const LEVEL_GROWTH: f64 = 2.0;

/// Start and length of a module time budget.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeBudget {
    start: Instant,
    seconds: f64,
}

impl TimeBudget {
    pub(super) fn new(seconds: f64) -> Self {
        Self { start: Instant::now(), seconds: seconds.max(0.0) }
    }

    /// Returns the remaining budget, from now on.
    pub(super) fn rest(self) -> Self {
        Self::new(self.seconds - self.taken())
    }

    /// Returns the time since the start in seconds.
    pub(super) fn taken(self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Returns the time at which a budget fraction is spent.
    pub(super) fn share_end(self, share: f64) -> Instant {
        self.start + Duration::from_secs_f64(self.seconds * share)
    }

    /// Returns whether work that takes this long would end within the budget.
    pub(super) fn has_room(self, seconds: f64) -> bool {
        self.taken() + seconds <= self.seconds
    }
}

/// Time source that runs the module.
pub(super) struct ShapeSource<'s, 'm, D: Device> {
    subject: &'s mut ModuleUnderTest<'m, D>,
    /// Measured part: attention grows quadratically with token count, everything else linearly.
    part: Part,
    /// End times for the first run over the first grid and for the complete choice.
    ends: [Instant; 2],
    /// Times for the first grid, until they are requested.
    first: Vec<(u32, f64)>,
    /// Rows from all runs.
    pub(super) rows: Vec<Measurement>,
    /// Wall time for the last run over all shapes, in seconds.
    pub(super) run_seconds: f64,
}

impl<'s, 'm, D: Device> ShapeSource<'s, 'm, D> {
    pub(super) fn new(subject: &'s mut ModuleUnderTest<'m, D>, part: Part, ends: [Instant; 2]) -> Self {
        Self { subject, part, ends, first: Vec::new(), rows: Vec::new(), run_seconds: 0.0 }
    }

    /// Measures a shape once, and returns the time in microseconds.
    fn run(&mut self, tokens: u32) -> Result<f64> {
        let (rows, microseconds) = match self.part {
            Part::Attention => self.subject.measure_attention(tokens)?,
            _ => self.subject.measure(tokens)?,
        };
        self.rows.extend(rows);
        Ok(microseconds)
    }
}

impl<D: Device> TimeSource for ShapeSource<'_, '_, D> {
    type Error = Error;

    fn snap(&mut self, tokens: u32) -> Result<u32> {
        if self.part == Part::Attention {
            return Ok(self.subject.sequences.snap_length(tokens));
        }
        let (batch, length) = self.subject.sequences.packed(tokens);
        Ok(batch * length)
    }

    fn affordable(&mut self, sizes: Vec<u32>) -> Result<Vec<u32>> {
        let start = Instant::now();
        let seconds = self.ends[0].saturating_duration_since(start).as_secs_f64();
        let power = if self.part == Part::Attention { 2 } else { 1 };
        let clock = || start.elapsed().as_secs_f64();
        self.first = run_while_affordable(&sizes, power, seconds, clock, |tokens| self.run(tokens))?;
        self.run_seconds = clock();
        Ok(self.first.iter().map(|(tokens, _)| *tokens).collect())
    }

    fn measure(&mut self, tokens: &[u32]) -> Result<Vec<f64>> {
        let mut times: Vec<Vec<f64>> = vec![Vec::new(); tokens.len()];
        let first = std::mem::take(&mut self.first);
        let mut runs = CHOOSING_RUNS;
        if !first.is_empty() {
            let of = |size: &u32| first.iter().find(|(known, _)| known == size).map(|(_, time)| *time);
            for (times, time) in times.iter_mut().zip(tokens.iter().filter_map(of)) {
                times.push(time);
            }
            runs -= 1;
        }
        for _ in 0..runs {
            // Every shape needs one run, even after the time is over.
            let is_needed = times.iter().any(Vec::is_empty);
            let end = Instant::now() + Duration::from_secs_f64(self.run_seconds);
            if !is_needed && end > self.ends[1] {
                break;
            }
            let start = Instant::now();
            for (&tokens, times) in tokens.iter().zip(&mut times) {
                times.push(self.run(tokens)?);
            }
            self.run_seconds = start.elapsed().as_secs_f64();
        }
        Ok(times.into_iter().map(median).collect())
    }

    fn predict(&mut self, points: &[(u32, f64)], tokens: &[u32]) -> Result<Vec<f64>> {
        Ok(TimeCurve::interpolate(self.part, points, tokens))
    }

    fn is_spent(&mut self) -> Result<bool> {
        let level = Duration::from_secs_f64(LEVEL_GROWTH * self.run_seconds);
        Ok(Instant::now() + level > self.ends[1])
    }
}

/// Runs shapes in ascending order while the next shape is expected to end in time; at least the first two.
///
/// - `power`: exponent with which time grows with size
/// - `seconds`, `clock`: available time, and time spent so far
/// - `run`: runs a shape and returns the time
fn run_while_affordable(
    sizes: &[u32],
    power: i32,
    seconds: f64,
    clock: impl Fn() -> f64,
    mut run: impl FnMut(u32) -> Result<f64>,
) -> Result<Vec<(u32, f64)>> {
    let mut done: Vec<(u32, f64)> = Vec::new();
    let mut last_seconds = 0.0;
    for &size in sizes {
        let start = clock();
        if let Some((before, _)) = done.last().filter(|_| done.len() >= SHAPES_MIN) {
            let growth = (f64::from(size) / f64::from(*before)).powi(power);
            if start + growth * last_seconds > seconds {
                break;
            }
        }
        done.push((size, run(size)?));
        last_seconds = clock() - start;
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Runs sizes that take `size^power` milliseconds; returns the sizes that ran, and the time in seconds.
    fn ran(sizes: &[u32], power: i32, seconds: f64) -> (Vec<u32>, f64) {
        let now = Cell::new(0.0);
        let run = |size: u32| {
            now.set(now.get() + 1e-3 * f64::from(size).powi(power));
            Ok(1.0)
        };
        let done = run_while_affordable(sizes, power, seconds, || now.get(), run).unwrap();
        (done.iter().map(|(size, _)| *size).collect(), now.get())
    }

    #[test]
    fn a_shape_that_would_end_too_late_is_not_begun() {
        let sizes = [16, 64, 256, 1024, 4096];
        assert_eq!(ran(&sizes, 1, 10.0).0, sizes);
        for (seconds, count) in [(5.4, 4), (1.4, 4), (1.3, 3), (0.34, 3), (0.33, 2), (0.0, 2)] {
            let (done, taken) = ran(&sizes, 1, seconds);
            assert_eq!(done, sizes[..count], "{seconds}");
            assert!(taken <= seconds || count == SHAPES_MIN, "{taken} of {seconds}");
        }
        // A length four times as long takes sixteen times as long.
        assert_eq!(ran(&sizes, 2, 70.0).0, sizes[..3]);
        assert_eq!(ran(&sizes[..1], 2, 0.0).0, [16]);
    }

    #[test]
    fn a_budget_is_kept() {
        let budget = TimeBudget::new(1000.0);
        assert!(budget.has_room(900.0) && !budget.has_room(1000.5));
        assert!(budget.rest().seconds > 900.0 && budget.share_end(0.5) < budget.share_end(1.0));
        assert!(!TimeBudget::new(-3.0).has_room(0.001));
    }
}
