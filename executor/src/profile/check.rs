//! Compares predictions with measured times for random microbatches.
//!
//! Microbatches are drawn from a seed, packed as in training, and run several times through complete
//! single-stage modules, all microbatches once per round. [`dflop_costmodel::measure`] defines the time and
//! the spread of repeated runs, and the error bounds.
//!
//! All runs in the first half of the microbatches then go to the adaptive correction, in two intervals, so
//! that it turns itself off if it does not pay. The second half shows its value. An accurate profile leaves
//! nothing to correct; then errors with and without correction are the same.

use std::sync::Arc;

use dflop_costmodel::correction::{
    CorrectionOptions, CorrectionTable, CorrectionTracker, Observation, SampleTime,
};
use dflop_costmodel::measure::{PredictionCheck, RepeatedRuns};
use dflop_costmodel::{CostModel, ErrorSummary, MicrobatchConstants, Module, SampleShape};
use serde::{Serialize, Serializer};

use super::clock::Clock;
use super::module_under_test::time_passes;
use super::random_batches::{RandomMicrobatch, RandomMicrobatches, numbers, text_context};
use super::{MeasuredModel, module_kind};
use crate::error::Result;
use dflop_device::Device;
use dflop_models::weights::Seed;
use dflop_models::{Activations, BlockStage, FrozenModules, MicrobatchContext, Stage, StageRange};

/// Number and size of the microbatches to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckOptions {
    /// Number of microbatches, at least 2. Default: 48.
    pub microbatches: usize,
    /// Number of runs per microbatch, at least 1. Default: 7.
    pub repeats: usize,
    /// Maximum number of tokens in a microbatch in each module. Default: 2048.
    pub tokens_max: u32,
    /// Seed for microbatches and weights. Default: 1.
    pub seed: u64,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { microbatches: 48, repeats: 7, tokens_max: 2048, seed: 1 }
    }
}

/// Result for a module over a microbatch, forward and backward.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckedMicrobatch {
    /// The module.
    pub module: Module,
    /// Microbatch number, from 0.
    pub microbatch: usize,
    /// Number of samples in the microbatch.
    pub samples: usize,
    /// Number of tokens inside the module.
    pub tokens: usize,
    /// Time predicted from the profile, in nanoseconds.
    pub predicted_ns: u64,
    /// Prediction with the correction learned from the first half; `None` in the first half.
    pub corrected_ns: Option<u64>,
    /// Median run time in nanoseconds.
    pub measured_ns: u64,
    /// Run spread, as a fraction of the median.
    pub spread: f64,
    /// All run times in nanoseconds, in order.
    #[serde(skip)]
    pub runs_ns: Vec<u64>,
}

/// Module result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModuleCheck {
    /// The module.
    pub module: Module,
    /// Errors over all microbatches, without correction.
    #[serde(serialize_with = "serialize_errors")]
    pub errors: ErrorSummary,
    /// Median microbatch spread.
    pub spread_median: f64,
    /// 95th percentile microbatch spread.
    pub spread_p95: f64,
    /// Bound for the 95th percentile error.
    pub p95_bound: f64,
    /// Whether median and 95th percentile are within bounds.
    pub is_within: bool,
    /// Errors over the second half, without correction.
    #[serde(serialize_with = "serialize_errors")]
    pub second_half: ErrorSummary,
    /// Errors over the second half, with correction.
    #[serde(serialize_with = "serialize_errors")]
    pub corrected: ErrorSummary,
    /// Number of shape bins with a correction factor different from 1.
    pub corrected_bins: usize,
}

/// Check results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckReport {
    /// Clock that measured the runs.
    pub clock: Clock,
    /// Results by module, encoders first.
    pub modules: Vec<ModuleCheck>,
    /// Results by microbatch and module.
    pub microbatches: Vec<CheckedMicrobatch>,
}

/// Runs microbatches and compares measured times with predictions; `progress` is called with single lines of
/// text.
///
/// - `predictor`: cost model for the same model, without a correction
///
/// # Errors
/// Errors from stages and predictions; [`dflop_models::Error::Input`] if encoder and cost model count
/// different media tokens.
pub fn check<D: Device>(
    model: &MeasuredModel,
    predictor: &CostModel,
    device: &D,
    options: &CheckOptions,
    mut progress: impl FnMut(&str),
) -> Result<CheckReport> {
    let mut source = RandomMicrobatches::new(&model.spec, options.seed);
    let mut runs = Vec::new();
    for _ in 0..options.microbatches.max(2) {
        // All microbatches are built first, so that rounds only compute.
        let drawn = source.microbatch(options.tokens_max)?;
        runs.push(MicrobatchRuns::new(model, device, drawn)?);
    }
    let mut stages = Vec::new();
    for module in model.modules() {
        let kind = module_kind(module);
        let range = StageRange { module: kind, layers: 0..model.config.layers(kind) };
        let seed = Seed(options.seed);
        stages.push((
            module,
            model.config.stage(device, &range, FrozenModules::default(), Activations::Stored, &seed)?,
        ));
    }
    // The first round touches memory for the first time and is not counted.
    for round in 0..=options.repeats.max(1) {
        for runs in &mut runs {
            runs.run(model, &mut stages, round > 0)?;
        }
        progress(&format!("round {round} of {}: {} microbatches", options.repeats, runs.len()));
    }
    compare(&runs, predictor, Clock::of(device))
}

/// Microbatch and measured times.
struct MicrobatchRuns<D: Device> {
    drawn: RandomMicrobatch,
    contexts: Vec<(Module, Arc<MicrobatchContext<D>>)>,
    media_rows: usize,
    /// Run times in nanoseconds by context, then by run.
    taken_ns: Vec<Vec<u64>>,
}

impl<D: Device> MicrobatchRuns<D> {
    fn new(model: &MeasuredModel, device: &D, drawn: RandomMicrobatch) -> Result<Self> {
        let mut contexts = Vec::new();
        let mut rows = 0;
        for (module, media) in &drawn.media {
            let context = media.context(device, model.encoder(*module)?)?;
            rows += context.inputs.encoder()?.tokens;
            contexts.push((*module, Arc::new(context)));
        }
        let media_rows: usize = drawn.samples.iter().map(|sample| sample.media).sum();
        if media_rows != rows {
            let problem = format!("has {rows} tokens in the encoders, {media_rows} in the cost model");
            return Err(dflop_models::Error::Input { input: "media", problem }.into());
        }
        contexts.push((Module::Llm, Arc::new(text_context(device, &model.config.llm, &drawn.samples)?)));
        let taken_ns = vec![Vec::new(); contexts.len()];
        Ok(Self { drawn, contexts, media_rows, taken_ns })
    }

    /// Runs all modules that have work, encoders first.
    fn run(
        &mut self,
        model: &MeasuredModel,
        stages: &mut [(Module, BlockStage<D>)],
        is_kept: bool,
    ) -> Result<()> {
        for ((module, context), runs) in self.contexts.iter().zip(&mut self.taken_ns) {
            let Some((_, stage)) = stages.iter_mut().find(|(of, _)| of == module) else { continue };
            let device = stage.device().clone();
            let is_fed = *module == Module::Llm && self.media_rows > 0;
            let input =
                is_fed.then(|| device.upload(&numbers(self.media_rows * model.config.llm.input_width())));
            let passes = time_passes(Clock::of(&device), stage, context, input.transpose()?)?;
            if is_kept {
                runs.push((passes.forward + passes.backward).as_nanos() as u64);
            }
        }
        Ok(())
    }

    fn checked(&self, microbatch: usize, predictor: &CostModel) -> Result<Vec<CheckedMicrobatch>> {
        let predicted = predictor.predict_microbatch(&self.drawn.shapes)?;
        let mut all = Vec::new();
        for ((module, context), runs) in self.contexts.iter().zip(&self.taken_ns) {
            let place = predictor.modules().iter().position(|of| of == module);
            let Some(predicted_ns) = place.map(|place| predicted.as_slice()[place]) else { continue };
            let measured = RepeatedRuns::new(&runs.iter().map(|&ns| ns as f64).collect::<Vec<f64>>());
            all.push(CheckedMicrobatch {
                module: *module,
                microbatch,
                samples: self.drawn.shapes.len(),
                tokens: context.layers.rows,
                predicted_ns,
                corrected_ns: None,
                measured_ns: measured.median.round() as u64,
                spread: measured.spread,
                runs_ns: runs.clone(),
            });
        }
        Ok(all)
    }
}

fn compare<D: Device>(
    runs: &[MicrobatchRuns<D>],
    predictor: &CostModel,
    clock: Clock,
) -> Result<CheckReport> {
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
        let rows: Vec<&CheckedMicrobatch> = microbatches.iter().filter(|row| row.module == module).collect();
        let bins = table.iter().flat_map(CorrectionTable::changes).filter(|(of, ..)| *of == module).count();
        (!rows.is_empty()).then(|| ModuleCheck::new(module, &rows, bins))
    };
    let modules = predictor.modules().iter().filter_map(of_module).collect();
    Ok(CheckReport { clock, modules, microbatches })
}

/// Fits a correction to all runs of these microbatches, with a step for each microbatch; `None` if there is
/// nothing to correct.
fn learn<D: Device>(
    runs: &[MicrobatchRuns<D>],
    checked: &[CheckedMicrobatch],
    predictor: &CostModel,
) -> Result<Option<CorrectionTable>> {
    let mut learned = Vec::new();
    for row in checked.iter().filter(|row| row.microbatch < runs.len()) {
        let shapes = &runs[row.microbatch].drawn.shapes;
        let samples = shares(predictor, row.module, shapes, row.predicted_ns);
        let observation = |&measured_ns: &u64| Observation {
            module: Some(row.module),
            rank: 0,
            measured_ns,
            // The shares below add up to the complete time for the pack.
            constants: MicrobatchConstants::default(),
            samples: samples.clone(),
        };
        learned.extend(row.runs_ns.iter().filter(|_| !samples.is_empty()).map(observation));
    }
    // Two intervals: the table learned in the first must reduce errors in the second, or tracking stops.
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

/// Returns sample sizes inside a module, with shares in the predicted pack time.
fn shares(
    predictor: &CostModel,
    module: Module,
    shapes: &[SampleShape],
    predicted_ns: u64,
) -> Vec<SampleTime> {
    let samples: Vec<SampleTime> =
        shapes.iter().flat_map(|shape| predictor.sample_times(Some(module), shape)).collect();
    let sum: u64 = samples.iter().map(|sample| sample.ns).sum();
    let scale = predicted_ns as f64 / sum.max(1) as f64;
    let scaled = |sample: SampleTime| SampleTime { ns: (sample.ns as f64 * scale).round() as u64, ..sample };
    samples.into_iter().map(scaled).collect()
}

impl ModuleCheck {
    fn new(module: Module, rows: &[&CheckedMicrobatch], corrected_bins: usize) -> Self {
        let errors = |predicted_ns: fn(&CheckedMicrobatch) -> Option<u64>| -> Vec<f64> {
            let error = |row: &&CheckedMicrobatch| {
                Some(predicted_ns(row)? as f64 / (row.measured_ns as f64).max(1.0) - 1.0)
            };
            rows.iter().filter_map(error).collect()
        };
        let spreads: Vec<f64> = rows.iter().map(|row| row.spread).collect();
        let PredictionCheck { errors: all, spread_median, spread_p95, p95_bound, is_within } =
            PredictionCheck::new(&errors(|row| Some(row.predicted_ns)), &spreads);
        let second_half = errors(|row| row.corrected_ns.and(Some(row.predicted_ns)));
        Self {
            module,
            errors: all,
            spread_median,
            spread_p95,
            p95_bound,
            is_within,
            second_half: ErrorSummary::from_errors(&second_half),
            corrected: ErrorSummary::from_errors(&errors(|row| row.corrected_ns)),
            corrected_bins,
        }
    }
}

/// Writes errors with the field names in `dflop profile --check --json`.
fn serialize_errors<S: Serializer>(
    errors: &ErrorSummary,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Errors {
        count: usize,
        bias: f64,
        median: f64,
        mean: f64,
        p95: f64,
    }
    let ErrorSummary { count, bias, mape: mean, p50: median, p95, .. } = *errors;
    Errors { count, bias, median, mean, p95 }.serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(
        microbatch: usize,
        predicted_ns: u64,
        corrected_ns: Option<u64>,
        spread: f64,
    ) -> CheckedMicrobatch {
        CheckedMicrobatch {
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

    fn module(rows: &[CheckedMicrobatch]) -> ModuleCheck {
        ModuleCheck::new(Module::Llm, &rows.iter().collect::<Vec<_>>(), 0)
    }

    #[test]
    fn the_second_half_alone_says_what_a_correction_is_worth() {
        let rows = [row(0, 2000, None, 0.0), row(1, 1200, Some(1010), 0.0), row(2, 1200, Some(990), 0.0)];
        let found = module(&rows);
        assert_eq!((found.errors.count, found.second_half.count, found.corrected.count), (3, 2, 2));
        assert!((found.second_half.mape - 0.2).abs() < 1e-9 && (found.corrected.mape - 0.01).abs() < 1e-9);
        assert!(found.corrected.bias.abs() < 1e-9);
    }

    #[test]
    fn errors_are_written_with_the_names_of_the_command() {
        let written = serde_json::to_value(module(&[row(0, 1200, Some(1100), 0.0)])).unwrap();
        let mut names: Vec<&String> = written["errors"].as_object().unwrap().keys().collect();
        names.sort_unstable();
        assert_eq!(names, ["bias", "count", "mean", "median", "p95"]);
    }
}
