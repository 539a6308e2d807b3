//! Maps seconds to percent of the width, with round ticks.

use super::number::{TimeUnit, time_unit};
use super::svg::{self, Anchor, Spot};

/// Target number of ticks: few enough for a phone.
const TICKS: f64 = 5.0;
/// Position beyond which the text at a tick would leave the chart, in percent of the width.
const EDGE_PERCENT: f64 = 95.0;

/// Time axis that charts share, so that they can be compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    max_seconds: f64,
    /// Position of the largest time, in percent of the width.
    reach_percent: f64,
    unit: TimeUnit,
}

impl Axis {
    /// Returns an axis from 0 to the largest time, which is at `reach_percent` of the width.
    pub(super) fn new(times_seconds: impl Iterator<Item = f64>, reach_percent: f64) -> Self {
        let max_seconds = times_seconds.fold(0.0, f64::max);
        Self { max_seconds, reach_percent, unit: time_unit(max_seconds) }
    }

    /// Returns whether there is no time to show.
    pub(super) fn is_empty(&self) -> bool {
        self.max_seconds <= 0.0
    }

    /// Returns the position of a time in percent of the width.
    pub(super) fn x(&self, seconds: f64) -> f64 {
        seconds / self.max_seconds * self.reach_percent
    }

    /// Draws a grid line per tick over `ys` pixels, and its time below.
    pub(super) fn draw(&self, out: &mut String, ys: [f64; 2]) {
        let step = round_step(self.max_seconds * self.unit.per_second / TICKS);
        // As many decimals as the step needs: none for steps of 1 and more.
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let mut tick = 0;
        loop {
            let value = f64::from(tick) * step;
            let x = self.x(value / self.unit.per_second);
            if x > 100.0 {
                return;
            }
            svg::upright(out, "grid", x, ys);
            let anchor = match tick {
                0 => Anchor::Start,
                _ if x > EDGE_PERCENT => Anchor::End,
                _ => Anchor::Middle,
            };
            let spot = Spot { x, dx: 0.0, y: ys[1] + 14.0, anchor };
            svg::text(out, "tick", spot, &format!("{value:.decimals$} {}", self.unit.name));
            tick += 1;
        }
    }
}

/// Returns the smallest of 1, 2, 5, 10, … and their multiples by powers of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let ten = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|factor| factor * ten).find(|round| *round >= step).unwrap_or(10.0 * ten)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (step, round) in [(0.13, 0.2), (1.0, 1.0), (3.3, 5.0), (70.0, 100.0)] {
            assert!((round_step(step) - round).abs() < 1e-9, "{step}");
        }
        let mut out = String::new();
        Axis::new([0.0123].into_iter(), 90.0).draw(&mut out, [0.0, 10.0]);
        assert!(out.contains("5 ms") && out.contains("10 ms"), "{out}");
        assert!(out.matches("<line").count() <= 7, "{out}");
    }
}
