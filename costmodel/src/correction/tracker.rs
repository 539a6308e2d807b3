//! Tracks measured microbatches, learns tables from them, and decides when measuring pays.

use std::collections::VecDeque;

use serde::Serialize;

use super::learned::{BinnedObservation, Learned};
use super::microbatch_fit::SlowRank;
use super::observation::Observation;
use super::table::CorrectionTable;
use super::tracking_rule::{CorrectionOptions, TrackingMode, TrackingRule};
use crate::error::Result;
use crate::module::{MODULES_MAX, Module};

/// Number of observations for a module, or for whole microbatches, after which the first interval ends if
/// predictions are off as a whole, so that a run does not go on with wrong costs; then twice as many, and so
/// on.
const START_OBSERVATIONS: usize = 24;

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
    /// Mean error with the table that was learned before the interval, if there was a table.
    pub error_corrected: Option<f64>,
    /// Gain `B`: the error without correction minus the error with correction.
    pub gain: Option<f64>,
    /// Cost `C`, compared with the gain.
    pub tracking_cost: f64,
    /// Ranks that take longer for the same work.
    pub slow_ranks: Vec<SlowRank>,
    /// Table that all ranks have to use from the table's step on; `None` if nothing changes.
    pub table: Option<CorrectionTable>,
}

/// Learns corrections from a run's measured times.
///
/// Pure and deterministic: no clock, no randomness; the same observations in the same order give the same
/// tables. Either a single rank runs it, over all ranks' observations in rank order, and sends the tables; or
/// all ranks run it, over the same gathered observations.
#[derive(Debug, Clone)]
pub struct CorrectionTracker {
    options: CorrectionOptions,
    rule: TrackingRule,
    steps: u64,
    /// Number of observations at which the first interval may end early; `None` after it.
    next_start: Option<usize>,
    /// Observations per interval, the current one last.
    window: VecDeque<Vec<BinnedObservation>>,
    slow_ranks: Vec<SlowRank>,
    /// Last learned table, in force or not.
    learned: Option<CorrectionTable>,
    /// Last table sent to the ranks.
    sent: CorrectionTable,
}

impl CorrectionTracker {
    /// Starts tracking at step 0, with no correction.
    ///
    /// # Errors
    /// [`crate::Error::Correction`] for an invalid setting.
    pub fn new(options: CorrectionOptions) -> Result<Self> {
        options.check()?;
        Ok(Self {
            options,
            rule: TrackingRule::new(options),
            steps: 0,
            next_start: Some(START_OBSERVATIONS),
            window: VecDeque::from([Vec::new()]),
            slow_ranks: Vec::new(),
            learned: None,
            sent: CorrectionTable::blank(0, 0),
        })
    }

    /// Continues an interrupted run: counts steps from `steps` on, and numbers tables after the last sent
    /// table. Earlier measurements are learned again.
    ///
    /// - `sent`: last table sent to the ranks, if there was a table
    #[must_use]
    pub fn resume(mut self, steps: u64, sent: Option<CorrectionTable>) -> Self {
        self.steps = steps;
        // A table in force is better than a start.
        self.next_start = self.next_start.filter(|_| sent.is_none());
        self.sent = sent.unwrap_or(self.sent);
        self
    }

    /// Returns whether microbatches of the current step should be measured.
    #[must_use]
    pub fn is_tracking(&self) -> bool {
        self.rule.mode() != TrackingMode::Resting
    }

    /// Adds a measurement in the current step; ignored while tracking rests.
    ///
    /// # Errors
    /// [`crate::Error::Correction`] if the measured or the predicted time is 0.
    pub fn observe(&mut self, observation: &Observation) -> Result<()> {
        let observed = BinnedObservation::new(observation)?;
        if self.is_tracking()
            && let Some(current) = self.window.back_mut()
        {
            current.push(observed);
        }
        Ok(())
    }

    /// Ends a step; returns a report at the end of an interval. The first interval ends as soon as 24
    /// observations show that predictions are off as a whole.
    pub fn end_step(&mut self) -> Option<IntervalReport> {
        self.steps += 1;
        let is_end = self.steps.is_multiple_of(self.options.interval_steps) || self.starts_early();
        is_end.then(|| self.end_interval())
    }

    fn starts_early(&mut self) -> bool {
        let count = |target: Option<Module>| {
            self.window.iter().flatten().filter(|observed| observed.module == target).count()
        };
        let observed = Module::ALL.map(Some).into_iter().chain([None]).map(count).max().unwrap_or(0);
        let Some(next) = self.next_start.filter(|next| observed >= *next) else { return false };
        self.next_start = Some(2 * next.max(observed));
        self.learned_targets().iter().any(|(_, learned)| learned.is_off)
    }

    /// Learns from the observations in the window: for each module, then for all modules together.
    fn learned_targets(&self) -> Vec<(Option<Module>, Learned)> {
        let targets = Module::ALL.map(Some).into_iter().chain([None]);
        let learn = |target: Option<Module>| {
            let observed = self.window.iter().flatten().filter(|observed| observed.module == target);
            Some((target, Learned::new(&observed.collect::<Vec<_>>())?))
        };
        targets.filter_map(learn).collect()
    }

    fn end_interval(&mut self) -> IntervalReport {
        let mode = self.rule.mode();
        self.next_start = None;
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
            slow_ranks: self.slow_ranks.clone(),
            table,
        }
    }

    /// Learns a table from all observations in the window.
    fn learn(&mut self, version: u64, effective_step: u64) -> CorrectionTable {
        let mut table = CorrectionTable::blank(version, effective_step);
        self.slow_ranks.clear();
        let mut is_measured = [false; MODULES_MAX];
        for (target, learned) in self.learned_targets() {
            for slow in &learned.slow_ranks {
                match self.slow_ranks.iter_mut().find(|known| known.rank == slow.rank) {
                    Some(known) => known.factor = known.factor.max(slow.factor),
                    None => self.slow_ranks.push(*slow),
                }
            }
            // Module times say more than whole-microbatch times, whose constants go with their scales.
            if target.is_none() && is_measured.contains(&true) {
                continue;
            }
            if let Some(constants) = learned.constants {
                table.put_constants(target, constants);
            }
            for module in Module::ALL.into_iter().filter(|module| target.is_none_or(|own| own == *module)) {
                is_measured[module as usize] = target.is_some();
                learned.write(&mut table, module);
            }
        }
        self.slow_ranks.sort_by_key(|slow| slow.rank);
        table
    }

    /// Returns the next table for all ranks, if it differs from the present table.
    fn send(&mut self, mode: TrackingMode, version: u64, effective_step: u64) -> Option<CorrectionTable> {
        // A blank table withdraws the table in force.
        let wanted = match (&self.learned, mode) {
            (Some(table), TrackingMode::Correcting) => table.clone(),
            _ => CorrectionTable::blank(version, effective_step),
        };
        if wanted.is_like(&self.sent) {
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

/// Returns the sum of absolute errors divided by the sum of measured times; 0 without measurements.
fn error(observed: &[BinnedObservation], table: Option<&CorrectionTable>) -> f64 {
    let (mut errors, mut measured) = (0.0, 0.0);
    for observed in observed {
        errors += (observed.timed.measured_ns - observed.predicted_ns(table)).abs();
        measured += observed.timed.measured_ns;
    }
    if measured > 0.0 { errors / measured } else { 0.0 }
}
