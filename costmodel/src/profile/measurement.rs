//! Defines profile rows, and joins repeated rows to points.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Module;
use crate::quantiles::median_of_sorted;

/// Assumed spread for a point with too few repeats to measure it, as a fraction of the time.
const ASSUMED_SPREAD: f64 = 0.05;
/// Minimum number of repeats for a measured spread.
pub(crate) const REPEATS_MIN: usize = 3;
/// Ratio of standard deviation to median absolute deviation in a normal distribution.
const MAD_TO_DEVIATION: f64 = 1.4826;

/// Measured part of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Transformer layers without the products between queries, keys and values: projections, norms, MLP.
    Linear,
    /// Products between queries, keys and values: scaled dot-product attention.
    Attention,
    /// Everything outside the layers: an encoder's patch embedding and projector, an LLM's embedding and LM
    /// head. Spelled `ends` in profiles.
    #[serde(rename = "ends")]
    OutsideLayers,
    /// Linear work and attention together, measured as a whole.
    Whole,
    /// Last norm, LM head and loss, if they run only for target tokens; [`Part::OutsideLayers`] then excludes
    /// them.
    Head,
}

/// Measured pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Forward pass.
    Forward,
    /// Backward pass, without the forward pass.
    Backward,
    /// Weight update; it has no shape, so batch and tokens are 0.
    Optimizer,
}

impl Part {
    pub(crate) const ALL: [Self; 5] =
        [Self::Linear, Self::Attention, Self::OutsideLayers, Self::Whole, Self::Head];

    /// Whether the part is outside the layers, and therefore has no layer count.
    pub(crate) const fn is_outside_layers(self) -> bool {
        matches!(self, Self::OutsideLayers | Self::Head)
    }

    /// Returns the part's name: `linear`, `attention`, `ends`, `whole` or `head`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Attention => "attention",
            Self::OutsideLayers => "ends",
            Self::Whole => "whole",
            Self::Head => "head",
        }
    }
}

impl Phase {
    pub(super) const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Optimizer];

    /// Returns the phase's name: `forward`, `backward` or `optimizer`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Measured configuration: everything except the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Setting {
    /// Measured module.
    pub module: Module,
    /// Measured module part.
    pub part: Part,
    /// Measured pass.
    pub phase: Phase,
    /// Tensor-parallel degree, at least 1; times are for the whole group.
    pub tp: u32,
    /// Number of transformer layers that ran, 0 for [`Part::OutsideLayers`] and [`Part::Head`].
    pub layers: u32,
    /// Number of parallel sequences: tiles, windows, samples.
    pub batch: u32,
    /// Tokens per sequence, inside the module; target tokens for [`Part::Head`].
    pub tokens: u32,
}

/// Measurement: a profile row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Measured configuration.
    pub setting: Setting,
    /// Run time in microseconds; finite and above 0.
    pub microseconds: f64,
    /// Memory in bytes: the rise in the allocator's peak during a forward or backward pass; after an
    /// optimizer step, the bytes for weights, gradients and optimizer state. `None` if it was not measured.
    pub bytes: Option<u64>,
}

/// Point that joins all measurements with the same setting.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Point {
    /// Measured configuration.
    pub setting: Setting,
    /// Median time in microseconds.
    pub microseconds: f64,
    /// Standard deviation of a single run in microseconds: 1.4826 times the median absolute deviation; with
    /// fewer than 3 repeats, 5 % of the median, which is assumed and not measured.
    pub spread_microseconds: f64,
    /// Number of measurements.
    pub repeats: usize,
    /// Maximum measured memory.
    pub bytes: Option<u64>,
}

impl Point {
    /// Returns the number of sequences, and the tokens per sequence.
    pub(crate) fn shape(&self) -> [u32; 2] {
        [self.setting.batch, self.setting.tokens]
    }
}

/// Joins measurements to points, sorted by setting; measurements with the same setting are repeats.
pub(super) fn points(measurements: &[Measurement]) -> Vec<Point> {
    let mut sorted = measurements.to_vec();
    sorted.sort_by(|a, b| a.setting.cmp(&b.setting).then(a.microseconds.total_cmp(&b.microseconds)));
    let repeats = sorted.chunk_by(|a, b| a.setting == b.setting);
    repeats.map(point).collect()
}

/// Joins measurements with the same setting, sorted by time, to a point.
fn point(repeats: &[Measurement]) -> Point {
    let times: Vec<f64> = repeats.iter().map(|measurement| measurement.microseconds).collect();
    let microseconds = median_of_sorted(&times);
    let mut deviations: Vec<f64> = times.iter().map(|time| (time - microseconds).abs()).collect();
    deviations.sort_by(f64::total_cmp);
    let spread_microseconds = if times.len() < REPEATS_MIN {
        ASSUMED_SPREAD * microseconds
    } else {
        MAD_TO_DEVIATION * median_of_sorted(&deviations)
    };
    Point {
        setting: repeats[0].setting,
        microseconds,
        spread_microseconds,
        repeats: times.len(),
        bytes: repeats.iter().filter_map(|measurement| measurement.bytes).max(),
    }
}

/// Raises spreads below the pass median to the median, relative to the times.
///
/// The spread between a handful of repeats is uncertain itself: by chance they may agree. Points in the same
/// pass run on the same machine, so the median spread is the better estimate. `points` belong to one module.
pub(super) fn pool_spreads(points: &mut [Point]) {
    for phase in Phase::ALL {
        let is_measured = |point: &&Point| point.setting.phase == phase && point.repeats >= REPEATS_MIN;
        let measured = points.iter().filter(is_measured);
        let mut shares: Vec<f64> =
            measured.map(|point| point.spread_microseconds / point.microseconds).collect();
        shares.sort_by(f64::total_cmp);
        if shares.is_empty() {
            continue;
        }
        let share = median_of_sorted(&shares);
        for point in points.iter_mut().filter(|point| point.setting.phase == phase) {
            point.spread_microseconds = point.spread_microseconds.max(share * point.microseconds);
        }
    }
}

/// Key of the lines `# held-out: microbatch,module,tokens,pairs,microseconds`.
pub(super) const HELD_OUT_KEY: &str = "held-out";

/// Module time over a mixed microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOutRun {
    /// Microbatch number; modules with equal numbers ran the same microbatch.
    pub microbatch: u32,
    /// Module that ran.
    pub module: Module,
    /// Total tokens over all sequences inside the module.
    pub tokens: f64,
    /// Sum of squared sequence lengths.
    pub pairs: f64,
    /// Forward and backward microseconds, the median over the runs.
    pub microseconds: f64,
}

impl HeldOutRun {
    /// Parses a line's value.
    ///
    /// # Errors
    /// Expected and found fields.
    pub(super) fn parse(value: &str) -> Result<Self, String> {
        let fields: Vec<&str> = value.split(',').map(str::trim).collect();
        let expected = || format!("expected `microbatch,module,tokens,pairs,microseconds`, found `{value}`");
        let [microbatch, module, tokens, pairs, microseconds] = fields[..] else { return Err(expected()) };
        let number = |text: &str| text.parse::<f64>().ok().filter(|value| value.is_finite() && *value > 0.0);
        let module = Module::ALL.into_iter().find(|known| known.name() == module);
        let run = || {
            Some(Self {
                microbatch: microbatch.parse().ok()?,
                module: module?,
                tokens: number(tokens)?,
                pairs: number(pairs)?,
                microseconds: number(microseconds)?,
            })
        };
        run().ok_or_else(expected)
    }
}

impl std::fmt::Display for HeldOutRun {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { microbatch, module, tokens, pairs, microseconds } = self;
        write!(formatter, "{microbatch},{module},{tokens},{pairs},{microseconds}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(tokens: u32, microseconds: f64) -> Measurement {
        let (module, part, phase) = (Module::Llm, Part::Linear, Phase::Forward);
        let setting = Setting { module, part, phase, tp: 1, layers: 2, batch: 1, tokens };
        Measurement { setting, microseconds, bytes: Some(microseconds as u64) }
    }

    #[test]
    fn repeats_become_their_median_and_one_straggler_does_not_matter() {
        let times = [10.0, 11.0, 900.0, 10.5, 9.5];
        let rows: Vec<_> =
            times.map(|time| measured(64, time)).into_iter().chain([measured(32, 5.0)]).collect();
        let points = points(&rows);
        assert_eq!(points.len(), 2);
        assert_eq!((points[0].setting.tokens, points[0].repeats), (32, 1));
        assert!((points[0].spread_microseconds - 0.25).abs() < 1e-12, "assumed, 5 %");
        assert_eq!((points[1].repeats, points[1].bytes), (5, Some(900)));
        assert!((points[1].microseconds - 10.5).abs() < 1e-12);
        assert!((points[1].spread_microseconds - 1.4826 * 0.5).abs() < 1e-12);
    }

    #[test]
    fn repeats_that_agree_by_chance_get_the_spread_of_the_others() {
        let repeats = |tokens, times: [f64; 3]| times.map(|time| measured(tokens, time));
        let rows =
            [repeats(1, [10.0, 10.0, 12.0]), repeats(2, [20.0, 22.0, 24.0]), repeats(4, [40.0, 50.0, 60.0])];
        let mut points = points(rows.as_flattened());
        pool_spreads(&mut points);
        let shares = [0, 1, 2].map(|at: usize| points[at].spread_microseconds / points[at].microseconds);
        let median = 1.4826 * 2.0 / 22.0;
        assert!((shares[0] - median).abs() < 1e-12 && (shares[1] - median).abs() < 1e-12, "{shares:?}");
        assert!((shares[2] - 1.4826 * 0.2).abs() < 1e-12, "larger spreads stay");
    }
}
