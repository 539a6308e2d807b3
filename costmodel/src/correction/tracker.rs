//! Tracks measured microbatches, learns tables from them, and decides when measuring pays.

use std::collections::VecDeque;

use serde::Serialize;

use super::bins::{BINS, bin};
use super::estimator::{Equation, factors};
use super::table::{CorrectionTable, FACTOR_MAX, FACTOR_ONE};
use super::tracking_rule::{CorrectionOptions, TrackingMode, TrackingRule};
use crate::error::{Error, Result};
use crate::module::Module;

/// Measured time of one module over one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Measured module.
    pub module: Module,
    /// Measured forward and backward in nanoseconds.
    pub measured_ns: u64,
    /// Size and predicted time of each sample with work for the module: tokens inside the module, and
    /// nanoseconds **without** correction, as [`crate::CostModel::predict_uncorrected`] returns them.
    pub samples: Vec<(u64, u64)>,
}

/// Result of an interval of steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IntervalReport {
    /// Number of steps since the start of the run.
    pub steps: u64,
    /// Mode during the interval.
    pub mode: TrackingMode,
    /// Mode during the next interval.
    pub next_mode: TrackingMode,
    /// Number of observations: one per microbatch and module.
    pub observations: usize,
    /// Mean error without correction, as a fraction of measured time.
    pub error_uncorrected: f64,
    /// Mean error with the table that was learned before the interval, if there was one.
    pub error_corrected: Option<f64>,
    /// Gain `B`: the error without correction less the error with it.
    pub gain: Option<f64>,
    /// Cost `C`, to compare the gain with.
    pub tracking_cost: f64,
    /// Table that all ranks have to use from its step on; `None` if nothing changes.
    pub table: Option<CorrectionTable>,
}

/// Learns corrections from the measured times of a run.
///
/// Pure and deterministic: no clock, no randomness; the same observations in the same order give the same
/// tables. Either one rank runs it, over the observations of all ranks in rank order, and sends the tables;
/// or all ranks run it, over the same gathered observations.
#[derive(Debug, Clone)]
pub struct CorrectionTracker {
    options: CorrectionOptions,
    rule: TrackingRule,
    steps: u64,
    /// Observations per interval, the current one last.
    window: VecDeque<Vec<BinnedObservation>>,
    /// Table learned last, in force or not.
    learned: Option<CorrectionTable>,
    /// Table sent to the ranks last.
    sent: CorrectionTable,
}

/// Observation with its samples sorted into bins.
#[derive(Debug, Clone)]
struct BinnedObservation {
    module: Module,
    measured_ns: f64,
    predicted_ns: f64,
    equation: Equation,
}

impl CorrectionTracker {
    /// Starts tracking at step 0, with no correction.
    ///
    /// # Errors
    /// [`Error::Correction`] for an invalid setting.
    pub fn new(options: CorrectionOptions) -> Result<Self> {
        options.check()?;
        Ok(Self {
            options,
            rule: TrackingRule::new(options),
            steps: 0,
            window: VecDeque::from([Vec::new()]),
            learned: None,
            sent: CorrectionTable::blank(0, 0),
        })
    }

    /// Continues a run that was interrupted: counts steps from `steps` on, and numbers tables after the last
    /// one that was sent. What was measured before is learned again.
    ///
    /// - `sent`: the table that ranks got last, if there was one
    #[must_use]
    pub fn resume(mut self, steps: u64, sent: Option<CorrectionTable>) -> Self {
        self.steps = steps;
        self.sent = sent.unwrap_or(self.sent);
        self
    }

    /// Returns whether microbatches of the current step should be measured.
    #[must_use]
    pub fn is_tracking(&self) -> bool {
        self.rule.mode() != TrackingMode::Resting
    }

    /// Adds a measurement of the current step; ignored while tracking rests.
    ///
    /// # Errors
    /// [`Error::Correction`] if the measured or the predicted time is 0.
    pub fn observe(&mut self, observation: &Observation) -> Result<()> {
        let observed = BinnedObservation::new(observation)?;
        if self.is_tracking()
            && let Some(current) = self.window.back_mut()
        {
            current.push(observed);
        }
        Ok(())
    }

    /// Ends a step; returns a report at the end of an interval.
    pub fn end_step(&mut self) -> Option<IntervalReport> {
        self.steps += 1;
        self.steps.is_multiple_of(self.options.interval_steps).then(|| self.end_interval())
    }

    fn end_interval(&mut self) -> IntervalReport {
        let mode = self.rule.mode();
        let current = self.window.back().map_or(&[][..], Vec::as_slice);
        let observations = current.len();
        let error_uncorrected = error(current, None);
        let error_corrected =
            self.learned.as_ref().filter(|_| observations > 0).map(|table| error(current, Some(table)));
        let gain = error_corrected.map(|corrected| error_uncorrected - corrected);
        // An interval without observations shows nothing, so the mode stays; only a rest counts such
        // intervals.
        let next_mode = if observations == 0 && mode != TrackingMode::Resting {
            mode
        } else {
            self.rule.end_interval(gain)
        };
        // The version counts up only when a table is sent, so ranks see consecutive versions.
        let version = self.sent.version() + 1;
        let effective_step = self.steps + self.options.lead_steps;
        self.learned = match next_mode {
            TrackingMode::Resting | TrackingMode::Learning => None,
            TrackingMode::Probing | TrackingMode::Correcting => Some(self.learn(version, effective_step)),
        };
        let table = self.send(next_mode, version, effective_step);
        self.start_interval(next_mode);
        IntervalReport {
            steps: self.steps,
            mode,
            next_mode,
            observations,
            error_uncorrected,
            error_corrected,
            gain,
            tracking_cost: self.options.tracking_cost,
            table,
        }
    }

    /// Learns a table from all observations in the window.
    fn learn(&self, version: u64, effective_step: u64) -> CorrectionTable {
        let mut table = CorrectionTable::blank(version, effective_step);
        for module in Module::ALL {
            let of_module = self.window.iter().flatten().filter(|observed| observed.module == module);
            let equations: Vec<Equation> = of_module.map(|observed| observed.equation.clone()).collect();
            let factors = factors(&equations);
            for bin in 0..BINS {
                let factor = factors.bins.get(&bin).copied().unwrap_or(factors.common);
                table.put(module, bin, to_fixed_point(factor));
            }
        }
        table
    }

    /// Returns the table that ranks have to use next, if it differs from the one they have.
    fn send(&mut self, mode: TrackingMode, version: u64, effective_step: u64) -> Option<CorrectionTable> {
        // A blank table withdraws the one in force.
        let wanted = match (&self.learned, mode) {
            (Some(table), TrackingMode::Correcting) => table.clone(),
            _ => CorrectionTable::blank(version, effective_step),
        };
        if wanted.changes().eq(self.sent.changes()) {
            return None;
        }
        self.sent = wanted.clone();
        Some(wanted)
    }

    fn start_interval(&mut self, mode: TrackingMode) {
        // Observations from before a rest would hide what has changed since.
        if matches!(mode, TrackingMode::Resting | TrackingMode::Learning) {
            self.window.clear();
        }
        self.window.push_back(Vec::new());
        while self.window.len() > self.options.window_intervals {
            self.window.pop_front();
        }
    }
}

impl BinnedObservation {
    fn new(observation: &Observation) -> Result<Self> {
        let mut by_bin = [0.0; BINS];
        for &(size, predicted_ns) in &observation.samples {
            by_bin[bin(size)] += predicted_ns as f64;
        }
        let predicted_ns: f64 = by_bin.iter().sum();
        if predicted_ns <= 0.0 || observation.measured_ns == 0 {
            let (module, measured_ns) = (observation.module, observation.measured_ns);
            let reason = format!(
                "expected times above 0 for a microbatch of {module}, found {predicted_ns} ns predicted and {measured_ns} ns measured"
            );
            return Err(Error::Correction { reason });
        }
        let shares = by_bin.iter().enumerate().filter(|(_, ns)| **ns > 0.0);
        let shares = shares.map(|(bin, ns)| (bin, ns / predicted_ns)).collect();
        let measured_ns = observation.measured_ns as f64;
        let equation = Equation { target: measured_ns / predicted_ns - 1.0, shares };
        Ok(Self { module: observation.module, measured_ns, predicted_ns, equation })
    }

    fn corrected_ns(&self, table: &CorrectionTable) -> f64 {
        let factor = |bin: usize| f64::from(table.factor_of_bin(self.module, bin)) / f64::from(FACTOR_ONE);
        let scale: f64 = self.equation.shares.iter().map(|(bin, share)| share * factor(*bin)).sum();
        self.predicted_ns * scale
    }
}

/// Returns the sum of absolute errors over the sum of measured times; 0 without measurements.
fn error(observed: &[BinnedObservation], table: Option<&CorrectionTable>) -> f64 {
    let (mut errors, mut measured) = (0.0, 0.0);
    for observed in observed {
        let predicted_ns = table.map_or(observed.predicted_ns, |table| observed.corrected_ns(table));
        errors += (observed.measured_ns - predicted_ns).abs();
        measured += observed.measured_ns;
    }
    if measured > 0.0 { errors / measured } else { 0.0 }
}

/// Converts a factor to a fraction of [`FACTOR_ONE`], within its limits.
fn to_fixed_point(factor: f64) -> u32 {
    let (one, most) = (f64::from(FACTOR_ONE), f64::from(FACTOR_MAX));
    (factor.clamp(1.0 / most, most) * one).round() as u32
}
