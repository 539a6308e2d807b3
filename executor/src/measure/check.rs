//! Predictions held against what microbatches of mixed samples really take.
//!
//! Microbatches are drawn from a seed, packed as training packs them, and run through whole modules as one stage each,
//! several times, all of them once in every round. A microbatch took the **median** of its runs; its **spread** is 1.4826 times their
//! median absolute deviation, over the median: how far one run of the same microbatch is from another. The error of a
//! prediction is its distance from the median, over the median.
//!
//! Every run of the first half of the microbatches then goes to the adaptive correction, in two intervals, so that it switches itself
//! off where it does not pay; the second half says what it is worth. A profile that fits leaves nothing to correct: then both
//! are the same.

use std::sync::Arc;

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable, CorrectionTracker, Observation};
use dflop_costmodel::{CostModel, Module, SampleShape};
use serde::Serialize;

use super::clock::Clock;
use super::drawn::{Dice, Drawn};
use super::inputs::{numbers, text_context};
use super::profile::median;
use super::subject::time_passes;
use super::{MeasuredModel, kind_of};
use crate::device::{Cpu, Device};
use crate::error::{Error, Result};
use crate::model::context::MicrobatchContext;
use crate::model::model_config::{FrozenModules, StageRange};
use crate::stage::{Activations, Stage};
use crate::weights::Seed;

/// Bound of the median error.
pub const MEDIAN_BOUND: f64 = 0.05;
/// Bound of the 95th percentile of errors where runs agree.
pub const P95_BOUND: f64 = 0.12;
/// The same where they do not, over the 95th percentile of spreads.
pub const P95_SPREADS: f64 = 1.5;
/// From median absolute deviation to standard deviation.
const MAD_TO_DEVIATION: f64 = 1.4826;

/// How much is drawn and run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckOptions {
    /// Microbatches, at least 2. Default: 48.
    pub microbatches: usize,
    /// Runs of each, at least 1. Default: 7.
    pub repeats: usize,
    /// Most tokens of a microbatch, of each module. Default: 2048.
    pub tokens_max: u32,
    /// Seed of microbatches and weights. Default: 1.
    pub seed: u64,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { microbatches: 48, repeats: 7, tokens_max: 2048, seed: 1 }
    }
}

/// One module over one microbatch, forward and backward.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Checked {
    /// The module.
    pub module: Module,
    /// Number of the microbatch, from 0.
    pub microbatch: usize,
    /// Samples packed into it.
    pub samples: usize,
    /// Tokens inside the module.
    pub tokens: usize,
    /// What the profile predicts, in nanoseconds.
    pub predicted_ns: u64,
    /// The same with the correction that the first half has taught; `None` in the first half.
    pub corrected_ns: Option<u64>,
    /// Median of the runs in nanoseconds.
    pub measured_ns: u64,
    /// Spread of the runs, as a fraction of the median.
    pub spread: f64,
    /// All runs in nanoseconds, in order.
    #[serde(skip)]
    pub runs_ns: Vec<u64>,
}

/// Errors over some microbatches, as fractions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Microbatches.
    pub count: usize,
    /// Mean signed error: above 0 where predictions are too long.
    pub bias: f64,
    /// Median of the errors' sizes.
    pub median: f64,
    /// Mean of the errors' sizes.
    pub mean: f64,
    /// 95 % of the errors are at most this large.
    pub p95: f64,
}

/// What was found of one module.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModuleCheck {
    /// The module.
    pub module: Module,
    /// Of all its microbatches, without correction.
    pub errors: Errors,
    /// Median of the microbatches' spreads.
    pub spread_median: f64,
    /// 95 % of the spreads are at most this large.
    pub spread_p95: f64,
    /// What the 95th percentile of errors is held against.
    pub p95_bound: f64,
    /// Whether median and 95th percentile are within their bounds.
    pub is_within: bool,
    /// Of the second half, without correction.
    pub second_half: Errors,
    /// Of the second half, with it.
    pub corrected: Errors,
    /// Shape bins whose factor is not one.
    pub corrected_bins: usize,
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckReport {
    /// What measured.
    pub clock: Clock,
    /// By module, encoders first.
    pub modules: Vec<ModuleCheck>,
    /// Everything that ran, microbatch by microbatch.
    pub microbatches: Vec<Checked>,
}

/// Runs microbatches and compares; `progress` is told what was done, a line at a time.
///
/// - `predictor`: of the same model, without a correction
///
/// # Errors
/// Those of stages and predictions; [`Error::Input`] if encoder and cost model disagree on how many tokens media make.
pub fn check(
    model: &MeasuredModel,
    predictor: &CostModel,
    device: &Cpu,
    options: &CheckOptions,
    mut progress: impl FnMut(&str),
) -> Result<CheckReport> {
    let mut dice = Dice::new(&model.spec, options.seed);
    let mut runs = Vec::new();
    for _ in 0..options.microbatches.max(2) {
        let drawn = dice.microbatch(options.tokens_max)?;
        runs.push(Runs::new(model, device, drawn)?);
    }
    let mut stages = Vec::new();
    for module in model.modules() {
        let kind = kind_of(module);
        let range = StageRange { module: kind, layers: 0..model.config.layers(kind) };
        let seed = Seed(options.seed);
        stages.push((
            module,
            model.config.stage(device, &range, FrozenModules::default(), Activations::Stored, &seed)?,
        ));
    }
    // The first round touches memory for the first time and is left out.
    for round in 0..=options.repeats.max(1) {
        for runs in &mut runs {
            runs.run(model, &mut stages, round > 0)?;
        }
        progress(&format!("round {round} of {}: {} microbatches", options.repeats, runs.len()));
    }
    compare(&runs, predictor, Clock::of(device))
}

/// A microbatch and what it took.
struct Runs {
    drawn: Drawn,
    contexts: Vec<(Module, Arc<MicrobatchContext<Cpu>>)>,
    media_rows: usize,
    /// Nanoseconds, by context, then by run.
    taken_ns: Vec<Vec<u64>>,
}

impl Runs {
    fn new(model: &MeasuredModel, device: &Cpu, drawn: Drawn) -> Result<Self> {
        let mut contexts = Vec::new();
        let mut rows = 0;
        for (module, media) in &drawn.media {
            let context = media.context(device, model.encoder(*module)?)?;
            rows += context.inputs.encoder()?.tokens;
            contexts.push((*module, Arc::new(context)));
        }
        let media_rows: usize = drawn.samples.iter().map(|sample| sample.media).sum();
        if media_rows != rows {
            let problem = format!("make {rows} tokens, the cost model counts {media_rows}");
            return Err(Error::Input { input: "media", problem });
        }
        contexts.push((Module::Llm, Arc::new(text_context(device, &model.config.llm, &drawn.samples)?)));
        let taken_ns = vec![Vec::new(); contexts.len()];
        Ok(Self { drawn, contexts, media_rows, taken_ns })
    }

    /// Runs all modules that have work, encoders first.
    fn run(
        &mut self,
        model: &MeasuredModel,
        stages: &mut [(Module, Stage<Cpu>)],
        is_kept: bool,
    ) -> Result<()> {
        for ((module, context), runs) in self.contexts.iter().zip(&mut self.taken_ns) {
            let Some((_, stage)) = stages.iter_mut().find(|(of, _)| of == module) else { continue };
            let device = stage.device().clone();
            let is_fed = *module == Module::Llm && self.media_rows > 0;
            let input = is_fed.then(|| device.upload(&numbers(self.media_rows * model.config.llm.hidden())));
            let passes = time_passes(Clock::of(&device), stage, context, input.transpose()?)?;
            if is_kept {
                runs.push((passes.forward + passes.backward).as_nanos() as u64);
            }
        }
        Ok(())
    }

    fn checked(&self, microbatch: usize, predictor: &CostModel) -> Result<Vec<Checked>> {
        let predicted = predictor.predict_microbatch(&self.drawn.shapes)?;
        let mut all = Vec::new();
        for ((module, context), runs) in self.contexts.iter().zip(&self.taken_ns) {
            let place = predictor.modules().iter().position(|of| of == module);
            let Some(predicted_ns) = place.map(|place| predicted.as_slice()[place]) else { continue };
            let times: Vec<f64> = runs.iter().map(|&ns| ns as f64).collect();
            let measured = median(times.clone());
            let deviations = times.iter().map(|time| (time - measured).abs()).collect();
            all.push(Checked {
                module: *module,
                microbatch,
                samples: self.drawn.shapes.len(),
                tokens: context.layers.rows,
                predicted_ns,
                corrected_ns: None,
                measured_ns: measured.round() as u64,
                spread: MAD_TO_DEVIATION * median(deviations) / measured,
                runs_ns: runs.clone(),
            });
        }
        Ok(all)
    }
}

fn compare(runs: &[Runs], predictor: &CostModel, clock: Clock) -> Result<CheckReport> {
    let mut microbatches = Vec::new();
    for (index, runs) in runs.iter().enumerate() {
        microbatches.extend(runs.checked(index, predictor)?);
    }
    let half = runs.len() / 2;
    let table = learn(&runs[..half], &microbatches, predictor)?;
    if let Some(table) = &table {
        let corrected = predictor.clone().correction(Some(Arc::new(table.clone())));
        for row in microbatches.iter_mut().filter(|row| row.microbatch >= half) {
            let place = corrected.modules().iter().position(|of| *of == row.module);
            let times = corrected.predict_microbatch(&runs[row.microbatch].drawn.shapes)?;
            row.corrected_ns = place.map(|place| times.as_slice()[place]);
        }
    } else {
        let second = microbatches.iter_mut().filter(|row| row.microbatch >= half);
        second.for_each(|row| row.corrected_ns = Some(row.predicted_ns));
    }
    let of_module = |&module: &Module| {
        let rows: Vec<&Checked> = microbatches.iter().filter(|row| row.module == module).collect();
        let bins = table.iter().flat_map(CorrectionTable::changes).filter(|(of, ..)| *of == module).count();
        (!rows.is_empty()).then(|| ModuleCheck::new(module, &rows, bins))
    };
    let modules = predictor.modules().iter().filter_map(of_module).collect();
    Ok(CheckReport { clock, modules, microbatches })
}

/// Teaches a correction every run of these microbatches, a step each; `None` if there is nothing to correct.
fn learn(runs: &[Runs], checked: &[Checked], predictor: &CostModel) -> Result<Option<CorrectionTable>> {
    let mut learned = Vec::new();
    for row in checked.iter().filter(|row| row.microbatch < runs.len()) {
        let shapes = &runs[row.microbatch].drawn.shapes;
        let samples = shares(predictor, row.module, shapes, row.predicted_ns)?;
        let observation =
            |&measured_ns: &u64| Observation { module: row.module, measured_ns, samples: samples.clone() };
        learned.extend(row.runs_ns.iter().filter(|_| !samples.is_empty()).map(observation));
    }
    // Two intervals: what the first teaches must pay in the second.
    let interval_steps = (learned.len() / 2).max(1) as u64;
    let options = CorrectionOptions { interval_steps, ..CorrectionOptions::default() };
    let mut tracker = CorrectionTracker::new(options)?;
    let mut table = None;
    for observation in &learned {
        tracker.observe(observation)?;
        table = tracker.end_step().and_then(|report| report.table).or(table);
    }
    Ok(table.filter(|table| table.changes().next().is_some()))
}

/// Sizes of samples inside a module, and their shares of what the pack was predicted to take.
fn shares(
    predictor: &CostModel,
    module: Module,
    shapes: &[SampleShape],
    predicted_ns: u64,
) -> Result<Vec<(u64, u64)>> {
    let mut samples = Vec::new();
    for shape in shapes {
        samples.extend(predictor.predict_uncorrected(module, shape)?);
    }
    let sum: u64 = samples.iter().map(|sample| sample.1).sum();
    let scale = predicted_ns as f64 / sum.max(1) as f64;
    Ok(samples.into_iter().map(|(size, ns)| (size, (ns as f64 * scale).round() as u64)).collect())
}

impl ModuleCheck {
    fn new(module: Module, rows: &[&Checked], corrected_bins: usize) -> Self {
        let errors = Errors::of(rows.iter().map(|row| (row.predicted_ns, row.measured_ns)));
        let spreads: Vec<f64> = rows.iter().map(|row| row.spread).collect();
        let spread_p95 = percentile_95(spreads.clone());
        let p95_bound = P95_BOUND.max(P95_SPREADS * spread_p95);
        let second: Vec<_> = rows.iter().filter_map(|row| Some((row, row.corrected_ns?))).collect();
        Self {
            module,
            errors,
            spread_median: median(spreads),
            spread_p95,
            p95_bound,
            is_within: errors.median <= MEDIAN_BOUND && errors.p95 <= p95_bound,
            second_half: Errors::of(second.iter().map(|(row, _)| (row.predicted_ns, row.measured_ns))),
            corrected: Errors::of(second.iter().map(|(row, corrected)| (*corrected, row.measured_ns))),
            corrected_bins,
        }
    }
}

impl Errors {
    /// Errors of predicted against measured times.
    fn of(pairs: impl Iterator<Item = (u64, u64)>) -> Self {
        let errors: Vec<f64> =
            pairs.map(|(predicted, measured)| predicted as f64 / (measured as f64).max(1.0) - 1.0).collect();
        if errors.is_empty() {
            return Self::default();
        }
        let count = errors.len();
        let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        Self {
            count,
            bias: errors.iter().sum::<f64>() / count as f64,
            median: median(sizes.clone()),
            mean: sizes.iter().sum::<f64>() / count as f64,
            p95: percentile_95(sizes),
        }
    }
}

/// The value that 95 % are not above; NaN of none.
fn percentile_95(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() * 95).div_ceil(100).max(1) - 1;
    values.get(rank).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(microbatch: usize, predicted_ns: u64, corrected_ns: Option<u64>, spread: f64) -> Checked {
        Checked {
            module: Module::Llm,
            microbatch,
            samples: 2,
            tokens: 100,
            predicted_ns,
            corrected_ns,
            measured_ns: 1000,
            spread,
            runs_ns: vec![1000; 5],
        }
    }

    fn module(rows: &[Checked]) -> ModuleCheck {
        ModuleCheck::new(Module::Llm, &rows.iter().collect::<Vec<_>>(), 0)
    }

    #[test]
    fn errors_are_held_against_both_bounds() {
        let mut rows: Vec<Checked> = (0..20).map(|index| row(index, 1040, None, 0.01)).collect();
        let good = module(&rows);
        assert!(
            good.is_within
                && (good.errors.median - 0.04).abs() < 1e-9
                && (good.errors.bias - 0.04).abs() < 1e-9
        );
        assert!((good.p95_bound - 0.12).abs() < 1e-9);
        rows[0].predicted_ns = 700;
        assert!(module(&rows).is_within, "one in twenty may be further off");
        rows[1].predicted_ns = 870;
        assert!(!module(&rows).is_within, "two may not");
        rows[2].spread = 0.1;
        rows[3].spread = 0.1;
        let noisy = module(&rows);
        assert!(
            noisy.is_within && (noisy.p95_bound - 0.15).abs() < 1e-9,
            "unless runs are as far apart: {noisy:?}"
        );
        for row in &mut rows {
            row.predicted_ns = 1051;
        }
        assert!(!module(&rows).is_within, "the median's bound does not move");
    }

    #[test]
    fn the_second_half_alone_says_what_a_correction_is_worth() {
        let rows = [row(0, 2000, None, 0.0), row(1, 1200, Some(1010), 0.0), row(2, 1200, Some(990), 0.0)];
        let found = module(&rows);
        assert_eq!((found.errors.count, found.second_half.count, found.corrected.count), (3, 2, 2));
        assert!((found.second_half.mean - 0.2).abs() < 1e-9 && (found.corrected.mean - 0.01).abs() < 1e-9);
        assert!(found.corrected.bias.abs() < 1e-9);
    }
}
