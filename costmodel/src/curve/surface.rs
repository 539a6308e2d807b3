//! Interpolates a measured time over batch and sequence length, for work that is not linear in tokens.
//!
//! Each measured length has a [`Curve`] over the batch; between lengths a monotone cubic goes through the
//! values at the four nearest lengths. Outside the lengths time is linear in work, where attention work is
//! the squared length. On a full grid the surface is monotone over batches at each measured length and over
//! lengths at each batch.

use super::{
    Curve, CurvePoint, Estimate, IntervalRule, Knot, LocalError, cubic, extrapolate_above, extrapolate_below,
    pool_adjacent_violators,
};

/// Measured point: a batch of sequences with equal lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SurfacePoint {
    /// Number of sequences, above 0.
    pub(crate) batch: f64,
    /// Tokens per sequence, above 0.
    pub(crate) tokens: f64,
    /// Time in nanoseconds.
    pub(crate) ns: f64,
    /// Standard deviation of a single run in nanoseconds.
    pub(crate) spread_ns: f64,
}

/// Monotone surface through measured points.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Surface {
    rows: Vec<LengthCurve>,
    interval: IntervalRule,
}

#[derive(Debug, Clone, PartialEq)]
struct LengthCurve {
    tokens: f64,
    over_batches: Curve,
}

impl Surface {
    /// Fits a surface through at least one point, in any order; no two have the same batch and length.
    pub(crate) fn new(mut points: Vec<SurfacePoint>) -> Self {
        points.sort_by(|a, b| a.batch.total_cmp(&b.batch).then(a.tokens.total_cmp(&b.tokens)));
        // Monotone over lengths first, at each batch; the curves then make the times monotone over batches,
        // and pooling keeps the order between curves, so both hold at the end.
        for of_batch in points.chunk_by_mut(|a, b| a.batch.total_cmp(&b.batch).is_eq()) {
            let mut times: Vec<f64> = of_batch.iter().map(|point| point.ns).collect();
            pool_adjacent_violators(&mut times);
            for (point, ns) in of_batch.iter_mut().zip(times) {
                point.spread_ns = point.spread_ns.max((point.ns - ns).abs());
                point.ns = ns;
            }
        }
        points.sort_by(|a, b| a.tokens.total_cmp(&b.tokens).then(a.batch.total_cmp(&b.batch)));
        let row = |of_length: &[SurfacePoint]| {
            let knot =
                |point: &SurfacePoint| Knot { x: point.batch, ns: point.ns, spread_ns: point.spread_ns };
            let knots: Vec<Knot> = of_length.iter().map(knot).collect();
            LengthCurve { tokens: of_length[0].tokens, over_batches: Curve::new(&knots) }
        };
        Self {
            rows: points.chunk_by(|a, b| a.tokens.total_cmp(&b.tokens).is_eq()).map(row).collect(),
            interval: IntervalRule::EXPECTED,
        }
    }

    /// Sets the rule for 90 % intervals.
    pub(crate) fn interval(mut self, rule: IntervalRule) -> Self {
        self.interval = rule;
        self
    }

    /// Returns the surface with `factor` times the time; `factor` is at least 0.
    pub(crate) fn times(&self, factor: f64) -> Self {
        let scaled = |row: &LengthCurve| LengthCurve {
            tokens: row.tokens,
            over_batches: row.over_batches.times(factor),
        };
        Self { rows: self.rows.iter().map(scaled).collect(), interval: self.interval }
    }

    /// Adds two surfaces on the same grid, exact at the grid's lengths; `None` if the grids differ.
    pub(crate) fn plus(&self, other: &Self) -> Option<Self> {
        if self.rows.len() != other.rows.len() {
            return None;
        }
        let sum = |(a, b): (&LengthCurve, &LengthCurve)| {
            let is_alike = a.tokens.total_cmp(&b.tokens).is_eq();
            let over_batches = a.over_batches.plus(&b.over_batches).filter(|_| is_alike)?;
            Some(LengthCurve { tokens: a.tokens, over_batches })
        };
        let rows: Option<Vec<LengthCurve>> = self.rows.iter().zip(&other.rows).map(sum).collect();
        rows.map(|rows| Self { rows, interval: self.interval.wider(other.interval) })
    }

    /// Returns the minimum and maximum measured length.
    pub(crate) fn token_range(&self) -> [f64; 2] {
        [self.rows[0].tokens, self.rows[self.rows.len() - 1].tokens]
    }

    /// Returns the time for a batch of sequences in nanoseconds; an empty batch takes no time.
    pub(crate) fn at(&self, batch: f64, tokens: f64) -> f64 {
        self.between(batch, tokens, |row| row.over_batches.at(batch))
    }

    /// Returns the time with the half width of the 90 % interval.
    pub(crate) fn estimate(&self, batch: f64, tokens: f64) -> Estimate {
        self.interval.estimate(self.local(batch, tokens))
    }

    /// Returns the time with the expected error there, as [`Curve::local`] does along both axes.
    pub(crate) fn local(&self, batch: f64, tokens: f64) -> LocalError {
        if batch <= 0.0 || tokens <= 0.0 {
            return LocalError::default();
        }
        let ns = self.at(batch, tokens);
        let after = self.rows.partition_point(|row| row.tokens <= tokens);
        let low = &self.rows[after.saturating_sub(1)];
        let high = &self.rows[after.min(self.rows.len() - 1)];
        let [at_low, at_high] = [low, high].map(|row| row.over_batches.local(batch));
        let is_outside = after == 0 || (after == self.rows.len() && tokens > high.tokens);
        let share = if high.tokens > low.tokens && !is_outside {
            (tokens - low.tokens) / (high.tokens - low.tokens)
        } else {
            0.0
        };
        let mixed = at_low.mixed(at_high, share);
        // Outside the lengths, the alternative is a time proportional to the squared length.
        let ratio = tokens / low.tokens;
        let other_ns = if is_outside { at_low.ns * ratio * ratio } else { mixed.ns };
        let scale = if is_outside && at_low.ns > 0.0 { (ns / at_low.ns).max(1.0) } else { 1.0 };
        let own = if is_outside { at_low } else { mixed };
        LocalError {
            ns,
            spread_ns: own.spread_ns * scale,
            distance_ns: own.distance_ns * scale + (ns - other_ns).abs(),
            is_extrapolated: own.is_extrapolated || is_outside,
        }
    }

    fn between(&self, batch: f64, tokens: f64, value: impl Fn(&LengthCurve) -> f64) -> f64 {
        if batch <= 0.0 || tokens <= 0.0 {
            return 0.0;
        }
        let after = self.rows.partition_point(|row| row.tokens <= tokens);
        let work = |row: &LengthCurve| (row.tokens * row.tokens, value(row));
        if after == 0 {
            return extrapolate_below(work(&self.rows[0]), self.rows.get(1).map(work), tokens * tokens);
        }
        let low = &self.rows[after - 1];
        let u = tokens - low.tokens;
        if u <= 0.0 {
            return value(low);
        }
        let Some(high) = self.rows.get(after) else {
            // The slope spans at least a factor of 2 in work, as on a curve.
            let half =
                self.rows.iter().rev().find(|row| 2.0 * row.tokens * row.tokens <= low.tokens * low.tokens);
            return extrapolate_above(work(low), half.or(self.rows.first()).map(work), tokens * tokens);
        };
        let point = |row: &LengthCurve| -> CurvePoint { (row.tokens, value(row)) };
        let (at_low, at_high) = (point(low), point(high));
        let before = after.checked_sub(2).map(|row| point(&self.rows[row]));
        let [slope, square, cube] = cubic(before, at_low, at_high, self.rows.get(after + 1).map(point));
        let ns = at_low.1 + u * (slope + u * (square + u * cube));
        ns.clamp(at_low.1.min(at_high.1), at_low.1.max(at_high.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn surface(batches: &[f64], lengths: &[f64], time: impl Fn(f64, f64) -> f64) -> Surface {
        let point = |batch: f64, tokens: f64| {
            let ns = time(batch, tokens);
            SurfacePoint { batch, tokens, ns, spread_ns: ns / 50.0 }
        };
        Surface::new(
            lengths
                .iter()
                .flat_map(|&s| batches.iter().map(move |&b| (b, s)))
                .map(|(b, s)| point(b, s))
                .collect(),
        )
    }

    /// Adds up attention launch, memory traffic and arithmetic.
    fn attention_ns(batch: f64, tokens: f64) -> f64 {
        5_000.0 + 20.0 * batch * tokens + 0.1 * batch * tokens * tokens
    }

    #[test]
    fn attention_is_met_between_points_and_linear_in_its_square_beyond() {
        let surface = surface(&[1.0, 4.0, 16.0], &[128.0, 256.0, 512.0, 1024.0, 2048.0], attention_ns);
        for (batch, tokens) in [(1.0, 128.0), (2.0, 300.0), (9.0, 729.0), (16.0, 1500.0)] {
            let error = surface.at(batch, tokens) / attention_ns(batch, tokens) - 1.0;
            assert!(error.abs() < 0.015, "{batch} x {tokens}: {error}");
        }
        let far = surface.estimate(1.0, 8192.0);
        assert!((far.ns / attention_ns(1.0, 8192.0) - 1.0).abs() < 0.12 && far.is_extrapolated);
        assert!((far.ns - attention_ns(1.0, 8192.0)).abs() < far.uncertainty_ns);
        assert!(
            !surface.estimate(16.0, 2048.0).is_extrapolated && surface.estimate(17.0, 2048.0).is_extrapolated
        );
        assert!(surface.at(0.0, 100.0).abs() < 1e-12 && surface.at(1.0, 0.0).abs() < 1e-12);
    }

    #[test]
    fn tiles_of_one_length_need_one_row() {
        let surface = surface(&[1.0, 2.0, 8.0], &[729.0], attention_ns);
        assert!((surface.at(5.0, 729.0) / attention_ns(5.0, 729.0) - 1.0).abs() < 1e-9);
        assert!(
            !surface.estimate(5.0, 729.0).is_extrapolated && surface.estimate(5.0, 1458.0).is_extrapolated
        );
        assert!((surface.at(5.0, 1458.0) / surface.at(5.0, 729.0) - 4.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn a_full_grid_is_monotone_in_both_directions_whatever_the_noise(
            times in prop::collection::vec(1.0f64..1e6, 16),
            column in 0usize..4, tokens in 10.0f64..5000.0, row in 0usize..4, batch in 0.5f64..40.0, more in 1.0f64..4.0,
        ) {
            let (batches, lengths) = ([1.0, 2.0, 8.0, 16.0], [64.0, 128.0, 1024.0, 2048.0]);
            let grid = |batch: f64, tokens: f64| {
                let b = batches.iter().position(|&other| other >= batch).unwrap();
                let s = lengths.iter().position(|&other| other >= tokens).unwrap();
                times[s * 4 + b]
            };
            let surface = surface(&batches, &lengths, grid);
            let along_tokens = [tokens, tokens * more].map(|tokens| surface.at(batches[column], tokens));
            prop_assert!(along_tokens[0] <= along_tokens[1] * (1.0 + 1e-9) + 1e-6, "{along_tokens:?}");
            let along_batch = [batch, batch * more].map(|batch| surface.at(batch, lengths[row]));
            prop_assert!(along_batch[0] <= along_batch[1] * (1.0 + 1e-9) + 1e-6, "{along_batch:?}");
        }
    }
}
