//! Divides the time of a step: passes, the update, and what a device waits for between two steps.
//!
//! A device has nothing to do from the end of an update until the first work of the next step is queued. The
//! host knows what it does in that time, part by part. What is left of the device's gap is the time in which
//! the results of the step are on their way to the host.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::pipeline::DeviceTimes;

/// Number of words of [`StepTimes`].
pub(super) const WORDS: usize = 9;

/// Times of one rank in a step, or their sums over ranks, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "units come last")]
pub(super) struct StepTimes {
    /// Wall time of passes.
    pub(super) pass_ns: u64,
    /// Time of the device between passes: waits for communication and for other stages, late launches.
    pub(super) between_ns: u64,
    pub(super) update_ns: u64,
    pub(super) data_ns: u64,
    pub(super) input_ns: u64,
    pub(super) plan_ns: u64,
    pub(super) result_ns: u64,
    pub(super) report_ns: u64,
    pub(super) checkpoint_ns: u64,
}

/// Mean time of a rank in which its device runs no pass, by what it is. Everything but the update is time in
/// which the device has nothing to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct IdleTimes {
    /// Update of the weights: norm of the gradients, clipping, `AdamW`.
    pub update_seconds: f64,
    /// Wait for the samples of the step.
    pub data_wait_seconds: f64,
    /// Wait for inputs that are packed from samples and copied to the device.
    pub input_seconds: f64,
    /// Checks and plan of the step on the host, until its first work is queued.
    pub plan_seconds: f64,
    /// Way of the loss and the gradient norm to the host.
    pub result_seconds: f64,
    /// Exchange of measured times, corrections, traces, records and output.
    pub report_seconds: f64,
    /// Copies of weights and optimizer state for a checkpoint.
    pub checkpoint_seconds: f64,
}

impl IdleTimes {
    /// Time between steps in which the device has nothing to do.
    #[must_use]
    pub fn gap_seconds(&self) -> f64 {
        self.data_wait_seconds
            + self.input_seconds
            + self.plan_seconds
            + self.result_seconds
            + self.report_seconds
            + self.checkpoint_seconds
    }
}

/// Times of the host from the results of a step to the first work of the next one.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostTimes {
    /// Results of the step before were read.
    pub(super) read: Instant,
    /// Time of checkpoints since then.
    pub(super) checkpoint: Duration,
    /// Inputs were asked for.
    pub(super) asked: Instant,
    /// Wait for samples since then.
    pub(super) data: Duration,
    /// Inputs were there.
    pub(super) ready: Instant,
    /// First work was queued.
    pub(super) queued: Instant,
}

impl StepTimes {
    /// Divides the gap before a step as the host spent it, and adds the device's own times.
    pub(super) fn new(host: &HostTimes, device: DeviceTimes) -> Self {
        let HostTimes { read, checkpoint, asked, data, ready, queued } = *host;
        let ns = |time: Duration| time.as_nanos() as u64;
        let on_host = ns(queued.saturating_duration_since(read));
        Self {
            pass_ns: 0,
            between_ns: device.passes_ns,
            update_ns: device.update_ns,
            data_ns: ns(data),
            input_ns: ns((ready - asked).saturating_sub(data)),
            plan_ns: ns(queued.saturating_duration_since(ready)),
            result_ns: device.gap_ns.unwrap_or(0).saturating_sub(on_host),
            report_ns: ns(asked.saturating_duration_since(read).saturating_sub(checkpoint)),
            checkpoint_ns: ns(checkpoint),
        }
    }

    /// Sets the time of passes, which is no longer time between them.
    pub(super) fn passes(mut self, pass_ns: u64) -> Self {
        (self.pass_ns, self.between_ns) = (pass_ns, self.between_ns.saturating_sub(pass_ns));
        self
    }

    /// Returns the mean over ranks, of sums.
    pub(super) fn idle(&self, ranks: f64) -> IdleTimes {
        let mean = |ns: u64| ns as f64 / 1e9 / ranks;
        IdleTimes {
            update_seconds: mean(self.update_ns),
            data_wait_seconds: mean(self.data_ns),
            input_seconds: mean(self.input_ns),
            plan_seconds: mean(self.plan_ns),
            result_seconds: mean(self.result_ns),
            report_seconds: mean(self.report_ns),
            checkpoint_seconds: mean(self.checkpoint_ns),
        }
    }

    pub(super) fn words(self) -> [u64; WORDS] {
        let Self { pass_ns, between_ns, update_ns, data_ns, input_ns, plan_ns, result_ns, .. } = self;
        let Self { report_ns, checkpoint_ns, .. } = self;
        [pass_ns, between_ns, update_ns, data_ns, input_ns, plan_ns, result_ns, report_ns, checkpoint_ns]
    }

    pub(super) fn of_words(words: [u64; WORDS]) -> Self {
        let [pass_ns, between_ns, update_ns, data_ns, input_ns, plan_ns, host @ ..] = words;
        let [result_ns, report_ns, checkpoint_ns] = host;
        Self {
            pass_ns,
            between_ns,
            update_ns,
            data_ns,
            input_ns,
            plan_ns,
            result_ns,
            report_ns,
            checkpoint_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_of_the_device_is_divided_as_the_host_spent_it() {
        let read = Instant::now();
        let at = |milliseconds| read + Duration::from_millis(milliseconds);
        let host = HostTimes {
            read,
            checkpoint: Duration::from_millis(7),
            asked: at(10),
            data: Duration::from_millis(20),
            ready: at(35),
            queued: at(37),
        };
        let milliseconds = |ns: u64| ns / 1_000_000;
        let device = DeviceTimes { gap_ns: Some(41_000_000), passes_ns: 500_000_000, update_ns: 60_000_000 };
        let times = StepTimes::new(&host, device).passes(450_000_000);
        assert_eq!(
            times.words().map(milliseconds),
            [450, 50, 60, 20, 5, 2, 4, 3, 7],
            "the parts of the gap add up to it"
        );
        assert_eq!(StepTimes::of_words(times.words()), times);
        let idle = times.idle(1.0);
        assert!((idle.gap_seconds() - 0.041).abs() < 1e-9, "{idle:?}");
        // Before the first step the device has had no work, and a slow clock of the device gives no negative
        // time.
        for gap_ns in [None, Some(30_000_000)] {
            assert_eq!(StepTimes::new(&host, DeviceTimes { gap_ns, ..device }).result_ns, 0);
        }
    }
}
