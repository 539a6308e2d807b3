//! Tracks measured microbatches, learns tables from them, and decides whether measuring is worth its cost.

use super::learned::{BinnedObservation, Learned};
use super::microbatch_fit::SlowRank;
use super::table::{CorrectionTable, Observation};
use crate::error::{Error, Result};
use crate::{MODULES_MAX, Module};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

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

/// Settings for the rule that switches tracking on and off.
///
/// The gain `B` in an interval of `I` steps is the share of measured time that the correction predicts and
/// the bare profile does not: `(sum |measured - predicted| - sum |measured - corrected|) / sum measured`,
/// with the table that was learned **before** the interval, so that a fit to noise shows no gain. The cost
/// `C` is the share of throughput that measuring takes. Tracking ends when `B < C`; while it rests, an
/// interval is measured now and then, and tracking resumes when `B > C (1 + hysteresis)`. Each time that it
/// does not resume, the rest doubles.
///
/// # Source
/// An et al., PACMMOD 2026, arXiv:2603.25120, section 3.4.3: `B` per shape against `C`, measured at the start
/// by turning tracking off and on. The paper does not define the average of `B`, the interval and the
/// resumption; they are defined here.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CorrectionOptions {
    /// Number of steps in an interval, `I`: once per interval a table is learned and the gain is checked.
    /// Default: 32.
    pub interval_steps: u64,
    /// Maximum number of intervals whose observations a table is learned from. Default: 4.
    pub window_intervals: usize,
    /// Cost `C`: throughput lost by measuring, as a fraction; 0 if stage times are reported anyway. Default:
    /// 0.005.
    pub tracking_cost: f64,
    /// Margin above `C` that the gain needs for tracking to resume, as a fraction of `C`. Default: 0.25.
    pub hysteresis: f64,
    /// Number of intervals in the first rest. Default: 4.
    pub rest_intervals: u64,
    /// Maximum rest in intervals. Default: 64.
    pub rest_intervals_max: u64,
    /// Number of steps from the end of an interval to the first step with its table: as far as any rank plans
    /// ahead. Default: 8.
    pub lead_steps: u64,
}

impl Default for CorrectionOptions {
    fn default() -> Self {
        Self {
            interval_steps: 32,
            window_intervals: 4,
            tracking_cost: 0.005,
            hysteresis: 0.25,
            rest_intervals: 4,
            rest_intervals_max: 64,
            lead_steps: 8,
        }
    }
}

impl CorrectionOptions {
    pub(super) fn check(&self) -> Result<()> {
        let is_fraction = |value: f64| value.is_finite() && value >= 0.0;
        for (is_good, reason) in [
            (self.interval_steps > 0, "`interval_steps` must be at least 1"),
            (self.window_intervals > 0, "`window_intervals` must be at least 1"),
            (is_fraction(self.tracking_cost), "`tracking_cost` must be finite and not negative"),
            (is_fraction(self.hysteresis), "`hysteresis` must be finite and not negative"),
            (self.rest_intervals > 0, "`rest_intervals` must be at least 1"),
            (
                self.rest_intervals <= self.rest_intervals_max,
                "`rest_intervals` must not exceed `rest_intervals_max`",
            ),
        ] {
            if !is_good {
                return Err(Error::Correction { reason: reason.to_owned() });
            }
        }
        Ok(())
    }
}

/// Tracker mode during an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrackingMode {
    /// Measuring without a table yet: the first interval, or the first after a rest.
    Learning,
    /// Measuring, and comparing a table that was learned after a rest but is not in force.
    Probing,
    /// Measuring and correcting.
    Correcting,
    /// Not measuring; nothing is corrected.
    Resting,
}

/// Rule state.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrackingRule {
    options: CorrectionOptions,
    mode: TrackingMode,
    has_rested: bool,
    rest_intervals: u64,
    rested: u64,
}

impl TrackingRule {
    pub(super) fn new(options: CorrectionOptions) -> Self {
        let rest_intervals = options.rest_intervals;
        Self { options, mode: TrackingMode::Learning, has_rested: false, rest_intervals, rested: 0 }
    }

    pub(super) const fn mode(&self) -> TrackingMode {
        self.mode
    }

    /// Ends an interval with a gain; `None` if there was no table to compare with.
    pub(super) fn end_interval(&mut self, gain: Option<f64>) -> TrackingMode {
        let cost = self.options.tracking_cost;
        self.mode = match (self.mode, gain) {
            // After a rest, a table is compared before it is used.
            (TrackingMode::Learning, _) if self.has_rested => TrackingMode::Probing,
            // Even a free correction ends if it gains nothing.
            (TrackingMode::Correcting, Some(gain)) if gain < cost || gain <= 0.0 => self.rest(),
            (TrackingMode::Probing, Some(gain)) if gain > cost * (1.0 + self.options.hysteresis) => {
                self.rest_intervals = self.options.rest_intervals;
                TrackingMode::Correcting
            }
            (TrackingMode::Probing, _) => {
                self.rest_intervals =
                    self.rest_intervals.saturating_mul(2).min(self.options.rest_intervals_max);
                self.rest()
            }
            (TrackingMode::Resting, _) => {
                self.rested += 1;
                if self.rested < self.rest_intervals { TrackingMode::Resting } else { TrackingMode::Learning }
            }
            (TrackingMode::Learning | TrackingMode::Correcting, _) => TrackingMode::Correcting,
        };
        self.mode
    }

    fn rest(&mut self) -> TrackingMode {
        self.has_rested = true;
        self.rested = 0;
        TrackingMode::Resting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modes(rule: &mut TrackingRule, gains: &[Option<f64>]) -> Vec<TrackingMode> {
        gains.iter().map(|gain| rule.end_interval(*gain)).collect()
    }

    #[test]
    fn tracking_ends_below_its_cost_and_resumes_only_clearly_above_it() {
        use TrackingMode::{Correcting, Learning, Probing, Resting};
        let options =
            CorrectionOptions { tracking_cost: 0.04, rest_intervals: 2, ..CorrectionOptions::default() };
        let mut rule = TrackingRule::new(options);
        assert_eq!(modes(&mut rule, &[None, Some(0.10), Some(0.041)]), [Correcting; 3]);
        assert_eq!(modes(&mut rule, &[Some(0.039), None, None]), [Resting, Resting, Learning]);
        // A gain of 0.045 would have kept tracking on, but does not resume it.
        assert_eq!(modes(&mut rule, &[None, Some(0.045)]), [Probing, Resting]);
        assert_eq!(modes(&mut rule, &[None; 4]), [Resting, Resting, Resting, Learning]);
        assert_eq!(modes(&mut rule, &[None, Some(0.06)]), [Probing, Correcting]);
    }

    #[test]
    fn without_any_cost_a_correction_that_gains_nothing_still_ends() {
        let mut rule =
            TrackingRule::new(CorrectionOptions { tracking_cost: 0.0, ..CorrectionOptions::default() });
        assert_eq!(modes(&mut rule, &[None, Some(0.0)])[1], TrackingMode::Resting);
    }

    #[test]
    fn invalid_settings_are_errors() {
        let good = CorrectionOptions::default();
        assert!(good.check().is_ok());
        for bad in [
            CorrectionOptions { interval_steps: 0, ..good },
            CorrectionOptions { tracking_cost: f64::NAN, ..good },
            CorrectionOptions { hysteresis: -1.0, ..good },
            CorrectionOptions { rest_intervals: 65, ..good },
        ] {
            assert!(matches!(bad.check(), Err(Error::Correction { .. })));
        }
    }
}
