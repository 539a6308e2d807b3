//! Fits a module's microbatch time from a profile: a floor, a constant, and two rates.
//!
//! A microbatch takes `max(floor, base + token · n + pair · q)`, where `n` is the number of tokens in all
//! sequences and `q` is the sum of squared sequence lengths. Below the floor the host launches kernels more
//! slowly than the device runs them, so the time does not depend on the microbatch content. A sample's cost
//! is the time that it adds: `token · n + pair · n²`.
//!
//! The fastest repeat per setting counts: a delay, such as from a different process on the host, is no
//! property of the module, and a microbatch on a loaded device has work queued while the host is late.
//!
//! If a profile has held-out microbatches, the median over them sets the level for all times.
//!
//! # Source
//! Non-negative least squares by enumerating the active sets, seven for three unknowns; relative residuals,
//! because prediction errors are relative.

use std::fmt;

use serde::Serialize;

use super::measured_points::{WholeRun, whole_runs};
use crate::Module;
use crate::profile::{Part, Point, Profile};
use crate::quantiles::median;

/// Points within this factor of the fastest point's time belong to the floor.
const FLOOR_SPREAD: f64 = 1.25;
/// Minimum ratio of the largest to the smallest number of tokens among floor points; times that rise with the
/// tokens have no floor.
const FLOOR_RANGE: f64 = 4.0;
/// Points above the floor by this factor show device rates.
const ABOVE_FLOOR: f64 = 1.5;
/// Minimum number of held-out microbatches that set a curve's level.
const HELD_OUT_MIN: usize = 9;
/// Maximum number of rounds in which points are divided into floor points and points above.
const ROUNDS_MAX: usize = 8;

/// Microbatch time in a module, forward and backward, in nanoseconds.
///
/// # Examples
/// ```
/// use dflop_costmodel::{MicrobatchCurve, Module, Profile};
///
/// # fn main() -> dflop_costmodel::Result<()> {
/// let mut text = String::from(
///     "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n",
/// );
/// for (batch, microseconds) in [(1, 900.0), (8, 905.0), (64, 910.0), (512, 5120.0), (1024, 10240.0)] {
///     text += &format!("llm,whole,forward,1,4,{batch},64,{microseconds}\n");
///     text += &format!("llm,whole,backward,1,4,{batch},64,{}\n", 2.0 * microseconds);
/// }
/// let profile = Profile::parse([("profile.csv", text.as_str())])?;
/// let curve = MicrobatchCurve::from_profile(&profile, Module::Llm, 4).expect("whole modules were measured");
/// assert_eq!(curve.floor_ns.round(), 3.0 * 905e3);
/// assert_eq!(curve.ns(64.0 * 2048.0, 64.0 * 64.0 * 2048.0).round(), 3.0 * 20480e3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MicrobatchCurve {
    /// Minimum time, set by host launches; 0 if the measured points show none.
    pub floor_ns: f64,
    /// Constant time for every microbatch above the floor.
    pub base_ns: f64,
    /// Time per token.
    pub token_ns: f64,
    /// Time per pair of tokens in the same sequence.
    pub pair_ns: f64,
}

/// A measured microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MeasuredPack {
    pub(super) tokens: f64,
    pub(super) pairs: f64,
    pub(super) ns: f64,
}

impl MicrobatchCurve {
    /// Fits the times for a whole module with this many layers, without tensor parallelism; `None` if the
    /// profile has none.
    #[must_use]
    pub fn from_profile(profile: &Profile, module: Module, layers: u32) -> Option<Self> {
        let curve = Self::from_runs(profile, module, layers)?;
        Some(curve.times(curve.level(profile, module)))
    }

    /// Fits only the fastest repeats with equal sequences.
    fn from_runs(profile: &Profile, module: Module, layers: u32) -> Option<Self> {
        let points = profile.fastest_runs().points();
        let points: Vec<Point> = points.into_iter().filter(|point| point.setting.module == module).collect();
        let pack = |run: WholeRun| {
            let [sequences, length] = run.shape;
            let tokens = sequences * length;
            MeasuredPack { tokens, pairs: tokens * length, ns: run.passes_ns.iter().sum() }
        };
        Self::fit(&whole_runs(&points, 1, layers).into_iter().map(pack).collect::<Vec<MeasuredPack>>())
    }

    /// Returns the median ratio of measured to predicted time over the held-out microbatches; 1 if they are
    /// too few to tell.
    ///
    /// The fastest runs with equal sequences show how a time grows; microbatches from a loader take longer,
    /// because of other sequences, colder caches and other load on the machine.
    fn level(&self, profile: &Profile, module: Module) -> f64 {
        let runs = profile.files().iter().flat_map(|file| &file.held_out).filter(|run| run.module == module);
        let ratios: Vec<f64> =
            runs.map(|run| 1e3 * run.microseconds / self.ns(run.tokens, run.pairs)).collect();
        if ratios.len() < HELD_OUT_MIN { 1.0 } else { median(ratios) }
    }

    /// Returns the level of a profile's held-out microbatches relative to the whole-module runs with the most
    /// layers; 1 without them.
    pub(super) fn profile_level(profile: &Profile, module: Module) -> f64 {
        let rows = profile.files().iter().flat_map(|file| &file.measurements).map(|row| row.setting);
        let whole = rows.filter(|setting| setting.module == module && setting.part == Part::Whole);
        let layers = whole.map(|setting| setting.layers).max();
        let curve = layers.and_then(|layers| Self::from_runs(profile, module, layers));
        curve.map_or(1.0, |curve| curve.level(profile, module))
    }

    /// Multiplies all times.
    pub(super) fn times(self, factor: f64) -> Self {
        let Self { floor_ns, base_ns, token_ns, pair_ns } = self;
        let [floor_ns, base_ns, token_ns, pair_ns] =
            [floor_ns, base_ns, token_ns, pair_ns].map(|ns| ns * factor);
        Self { floor_ns, base_ns, token_ns, pair_ns }
    }

    /// Fits microbatches; `None` without any.
    pub(super) fn fit(packs: &[MeasuredPack]) -> Option<Self> {
        let floor_ns = floor(packs)?;
        let mut curve = Self { floor_ns, base_ns: 0.0, token_ns: 0.0, pair_ns: 0.0 };
        let mut above: Vec<MeasuredPack> = Vec::new();
        for _ in 0..ROUNDS_MAX {
            let is_above = |pack: &&MeasuredPack| {
                pack.ns > ABOVE_FLOOR * floor_ns || curve.device_ns(pack.tokens, pack.pairs) > floor_ns
            };
            let mut found: Vec<MeasuredPack> = packs.iter().filter(is_above).copied().collect();
            if found.is_empty() {
                // The rate is not known, but it is at most the largest pack's rate.
                found.extend(packs.iter().max_by(|a, b| a.tokens.total_cmp(&b.tokens)));
            }
            if found == above {
                break;
            }
            above = found;
            let [base_ns, token_ns, pair_ns] = non_negative_fit(&above);
            curve = Self { floor_ns, base_ns, token_ns, pair_ns };
        }
        Some(curve)
    }

    /// Returns the time for a microbatch.
    ///
    /// - `tokens`: total over all sequences
    /// - `pairs`: sum of squared sequence lengths
    #[must_use]
    pub fn ns(&self, tokens: f64, pairs: f64) -> f64 {
        self.device_ns(tokens, pairs).max(self.floor_ns)
    }

    /// Returns the time for the device, without launch limits.
    #[must_use]
    pub fn device_ns(&self, tokens: f64, pairs: f64) -> f64 {
        self.base_ns + self.added_ns(tokens, pairs)
    }

    /// Returns the time that sequences add to a microbatch above the floor.
    #[must_use]
    pub fn added_ns(&self, tokens: f64, pairs: f64) -> f64 {
        self.token_ns * tokens + self.pair_ns * pairs
    }

    /// Returns the number of tokens below which launches limit a microbatch with short sequences; 0 without a
    /// floor.
    #[must_use]
    pub fn floor_tokens(&self) -> f64 {
        ((self.floor_ns - self.base_ns) / self.token_ns).max(0.0)
    }
}

/// Returns the time floor, 0 if times rise from the smallest pack on; `None` without packs.
fn floor(packs: &[MeasuredPack]) -> Option<f64> {
    let fastest = packs.iter().map(|pack| pack.ns).min_by(f64::total_cmp)?;
    let mut flat: Vec<MeasuredPack> = packs.to_vec();
    flat.retain(|pack| pack.ns <= FLOOR_SPREAD * fastest);
    flat.sort_by(|a, b| a.tokens.total_cmp(&b.tokens));
    if flat[flat.len() - 1].tokens < FLOOR_RANGE * flat[0].tokens {
        return Some(0.0);
    }
    let mut times: Vec<f64> = flat.iter().map(|pack| pack.ns).collect();
    times.sort_by(f64::total_cmp);
    Some(crate::quantiles::median_of_sorted(&times))
}

/// Returns base, time per token and time per pair, none below 0, minimizing the sum of squared relative
/// errors.
fn non_negative_fit(packs: &[MeasuredPack]) -> [f64; 3] {
    let is_one_size = packs.iter().all(|pack| pack.tokens.to_bits() == packs[0].tokens.to_bits());
    let rows: Vec<[f64; 3]> = packs
        .iter()
        .map(|pack| {
            // A single size cannot separate a constant from a rate.
            let base = if is_one_size { 0.0 } else { 1.0 };
            [base, pack.tokens, pack.pairs].map(|term| term / pack.ns)
        })
        .collect();
    let error = |x: &[f64; 3]| -> f64 {
        let residual = |row: &[f64; 3]| row.iter().zip(x).map(|(term, x)| term * x).sum::<f64>() - 1.0;
        rows.iter().map(|row| residual(row) * residual(row)).sum()
    };
    let sets = (1_u8..8).map(|set| [0, 1, 2].map(|column| set & 1 << column != 0));
    let fits = sets.filter_map(|is_used| least_squares(&rows, is_used));
    let fits = fits.filter(|x| x.iter().all(|value| *value >= 0.0));
    fits.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or_default()
}

/// Solves the normal equations for the chosen columns with a right side of ones; `None` if they depend on
/// each other.
fn least_squares(rows: &[[f64; 3]], is_used: [bool; 3]) -> Option<[f64; 3]> {
    let columns: Vec<usize> = (0..3).filter(|&column| is_used[column]).collect();
    let scale = |column: usize| rows.iter().map(|row| row[column] * row[column]).sum::<f64>().sqrt();
    let scales: Vec<f64> = columns.iter().map(|&column| scale(column)).collect();
    if rows.len() < columns.len() || scales.iter().any(|scale| *scale <= 0.0) {
        return None;
    }
    let size = columns.len();
    let mut system = vec![vec![0.0; size + 1]; size];
    for row in rows {
        let terms: Vec<f64> =
            columns.iter().zip(&scales).map(|(&column, scale)| row[column] / scale).collect();
        for (equation, term) in system.iter_mut().zip(&terms) {
            for (sum, other) in equation.iter_mut().zip(terms.iter().chain([&1.0])) {
                *sum += term * other;
            }
        }
    }
    for pivot in 0..size {
        // Columns have the length 1, so a small pivot means that they are nearly parallel.
        if system[pivot][pivot] < 1e-9 {
            return None;
        }
        let equation = system[pivot].clone();
        for (_, other) in system.iter_mut().enumerate().filter(|(number, _)| *number != pivot) {
            let factor = other[pivot] / equation[pivot];
            other.iter_mut().zip(&equation).for_each(|(value, own)| *value -= factor * own);
        }
    }
    let mut solution = [0.0; 3];
    for (number, &column) in columns.iter().enumerate() {
        solution[column] = system[number][size] / system[number][number] / scales[number];
    }
    Some(solution)
}

/// Microbatch size below which launches limit a module.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LaunchLimit {
    /// Limited module.
    pub module: Module,
    /// Minimum microbatch time in the module, forward and backward.
    pub seconds: f64,
    /// Tokens in short sequences inside the module that take as long.
    pub tokens: u64,
}

impl LaunchLimit {
    /// Returns a curve's limit; `None` without a floor.
    pub(super) fn new(module: Module, curve: &MicrobatchCurve) -> Option<Self> {
        let tokens = curve.floor_tokens();
        let has_limit = tokens >= 1.0 && tokens.is_finite();
        has_limit.then(|| Self { module, seconds: curve.floor_ns / 1e9, tokens: tokens as u64 })
    }
}

impl fmt::Display for LaunchLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module, seconds, tokens } = self;
        write!(
            formatter,
            "{module} is limited by launches below {tokens} tokens a microbatch ({:.0} ms)",
            1e3 * seconds
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs for a module with these properties, at the settings that a profile measures.
    fn measured(truth: MicrobatchCurve) -> Vec<MeasuredPack> {
        let sizes = [
            (1, 64),
            (3, 64),
            (11, 64),
            (38, 64),
            (69, 64),
            (128, 64),
            (1, 215),
            (1, 724),
            (1, 2435),
            (1, 8192),
        ];
        let pack = |(batch, tokens): (i32, i32)| {
            let (batch, tokens) = (f64::from(batch), f64::from(tokens));
            let (tokens, pairs) = (batch * tokens, batch * tokens * tokens);
            MeasuredPack { tokens, pairs, ns: truth.ns(tokens, pairs) }
        };
        sizes.into_iter().map(pack).collect()
    }

    fn assert_near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1e-6), "{found} for {expected}");
    }

    #[test]
    fn floor_constant_and_rates_are_found_again() {
        for (floor_ns, base_ns) in [(140e6, 30e6), (140e6, 0.0), (0.0, 30e6), (0.0, 0.0)] {
            let truth = MicrobatchCurve { floor_ns, base_ns, token_ns: 106e3, pair_ns: 2.9 };
            let found = MicrobatchCurve::fit(&measured(truth)).unwrap();
            let of = |curve: MicrobatchCurve| [curve.floor_ns, curve.base_ns, curve.token_ns, curve.pair_ns];
            for (found, expected) in of(found).into_iter().zip(of(truth)) {
                assert_near(found, expected);
            }
        }
    }

    #[test]
    fn times_that_a_host_delays_do_not_become_negative_rates() {
        let truth = MicrobatchCurve { floor_ns: 140e6, base_ns: 20e6, token_ns: 30e3, pair_ns: 0.0 };
        let mut packs = measured(truth);
        // Many short sequences take the host longer than a single long sequence.
        packs.iter_mut().filter(|pack| pack.pairs < 64.5 * pack.tokens).for_each(|pack| pack.ns *= 1.1);
        let found = MicrobatchCurve::fit(&packs).unwrap();
        assert!(found.base_ns >= 0.0 && found.token_ns > 0.0 && found.pair_ns >= 0.0, "{found:?}");
        let (tokens, pairs) = (12_000.0, 12_000.0 * 1_400.0);
        assert!((found.ns(tokens, pairs) / truth.ns(tokens, pairs) - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn points_of_the_floor_alone_bound_the_rate() {
        let truth = MicrobatchCurve { floor_ns: 140e6, base_ns: 0.0, token_ns: 1e3, pair_ns: 0.0 };
        let found = MicrobatchCurve::fit(&measured(truth)).unwrap();
        assert_near(found.floor_ns, 140e6);
        assert!(found.token_ns <= 140e6 / 8192.0 * 1.001 && found.floor_tokens() >= 8_000.0, "{found:?}");
        assert_eq!(MicrobatchCurve::fit(&[]), None);
    }
}
