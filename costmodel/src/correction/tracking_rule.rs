//! Decides whether tracking pays: compares the correction gain with the measuring cost.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

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
