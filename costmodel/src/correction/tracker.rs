//! The tracker: takes measured microbatches, makes tables, and says when measuring pays.

use std::collections::VecDeque;

use serde::Serialize;

use super::bins::{BINS, bin};
use super::estimator::{Equation, factors};
use super::table::{CorrectionTable, FACTOR_MAX, FACTOR_ONE};
use super::tracking_rule::{CorrectionOptions, TrackingMode, TrackingRule};
use crate::error::{Error, Result};
use crate::module::Module;

/// One module's measured time over one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// The module.
    pub module: Module,
    /// Forward and backward in nanoseconds.
    pub measured_ns: u64,
    /// Of each sample with work for the module: its size, tokens inside the module, and its predicted time in
    /// nanoseconds **without** correction.
    pub samples: Vec<(u64, u64)>,
}

/// What an interval of steps has shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IntervalReport {
    /// Steps so far.
    pub steps: u64,
    /// What was done in the interval.
    pub mode: TrackingMode,
    /// What is done in the next one.
    pub next_mode: TrackingMode,
    /// Microbatches and modules that were measured.
    pub observations: usize,
    /// Mean error without correction, as a fraction of measured time.
    pub error_uncorrected: f64,
    /// Mean error with the table that was learned before the interval, if there was one.
    pub error_corrected: Option<f64>,
    /// `B`: the difference of the two.
    pub gain: Option<f64>,
    /// `C`, for comparison.
    pub tracking_cost: f64,
    /// A table that all ranks are to take, if it has changed.
    pub table: Option<CorrectionTable>,
}

/// Learns corrections from the measured times of a run.
///
/// Pure and deterministic: no clock, no randomness; the same observations in the same order give the same tables. One
/// rank runs it, over the observations of all ranks in rank order, and sends the tables; or all ranks do, over the same
/// gathered observations.
#[derive(Debug, Clone)]
pub struct CorrectionTracker {
    options: CorrectionOptions,
    rule: TrackingRule,
    steps: u64,
    /// Observations per interval, the current one last.
    window: VecDeque<Vec<BinnedObservation>>,
    /// What was learned last, in force or not.
    learned: Option<CorrectionTable>,
    /// What was sent to the ranks last.
    sent: CorrectionTable,
}

/// An observation by bins.
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
    /// [`Error::Correction`] for a setting that makes no sense.
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

    /// Returns whether microbatches of the current step are to be measured.
    #[must_use]
    pub fn is_tracking(&self) -> bool {
        self.rule.mode() != TrackingMode::Resting
    }

    /// Takes a measurement of the current step; ignored while tracking rests.
    ///
    /// # Errors
    /// [`Error::Correction`] if nothing was predicted or measured of it.
    pub fn observe(&mut self, observation: &Observation) -> Result<()> {
        let observed = BinnedObservation::new(observation)?;
        if self.is_tracking()
            && let Some(current) = self.window.back_mut()
        {
            current.push(observed);
        }
        Ok(())
    }

    /// Ends a step; at the end of an interval returns what it has shown.
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
        let next_mode = if observations == 0 && mode != TrackingMode::Resting {
            mode
        } else {
            self.rule.end_interval(gain)
        };
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

    /// The table of all that the window holds.
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

    /// The table that ranks have to take now, if it is another than they have.
    fn send(&mut self, mode: TrackingMode, version: u64, effective_step: u64) -> Option<CorrectionTable> {
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
                "a microbatch of {module} with {predicted_ns} ns predicted and {measured_ns} ns measured"
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

/// Sum of absolute errors over the sum of measured times; 0 where nothing was measured.
fn error(observed: &[BinnedObservation], table: Option<&CorrectionTable>) -> f64 {
    let (mut errors, mut measured) = (0.0, 0.0);
    for observed in observed {
        let predicted_ns = table.map_or(observed.predicted_ns, |table| observed.corrected_ns(table));
        errors += (observed.measured_ns - predicted_ns).abs();
        measured += observed.measured_ns;
    }
    if measured > 0.0 { errors / measured } else { 0.0 }
}

/// A factor as a fraction of [`FACTOR_ONE`], within its limits.
fn to_fixed_point(factor: f64) -> u32 {
    let (one, most) = (f64::from(FACTOR_ONE), f64::from(FACTOR_MAX));
    (factor.clamp(1.0 / most, most) * one).round() as u32
}
