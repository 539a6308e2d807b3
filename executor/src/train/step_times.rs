//! Divides the time of a step: passes, the update, and what a device waits for between two steps.
//!
//! A device has nothing to do from the end of an update until the first work of the next step is queued, and
//! from the end of the passes of a step until its update is queued. The host knows what it does in that time,
//! part by part.

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

/// Part of the work of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostPart {
    /// Wait for samples.
    Data,
    /// Wait for inputs that are packed and copied.
    Input,
    /// Checks and plan of a step, until its first work is queued.
    Plan,
    /// Wait for the results of a step.
    Result,
    /// Everything from there until the next step is asked for, but for checkpoints.
    Report,
    /// Copies for a checkpoint, within a report.
    Checkpoint,
}

/// What the host did lately, and when.
#[derive(Debug, Default)]
pub(super) struct HostTimes(Vec<(HostPart, [Instant; 2])>);

impl HostTimes {
    /// Adds a part.
    pub(super) fn add(&mut self, part: HostPart, begin: Instant, end: Instant) {
        self.0.push((part, [begin, end]));
    }

    /// Forgets what ended before a time.
    pub(super) fn forget_before(&mut self, time: Instant) {
        self.0.retain(|(_, [_, end])| *end >= time);
    }

    /// Returns the time that the host spent on a part from one time to another one, in nanoseconds.
    fn within(&self, part: HostPart, [begin, end]: [Instant; 2]) -> u64 {
        let own = self.0.iter().filter(|(own, _)| *own == part);
        let common = own.map(|(_, [from, to])| (*to).min(end).saturating_duration_since((*from).max(begin)));
        common.sum::<Duration>().as_nanos() as u64
    }
}

/// When the host queued a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queued {
    /// Inputs were asked for.
    pub(super) asked: Instant,
    /// First work of the passes was queued.
    pub(super) passes: Instant,
    /// First work of the update was queued.
    pub(super) update: Instant,
}

impl StepTimes {
    /// Divides the gaps before the passes and before the update of a step as the host spent them, and adds
    /// the device's own times.
    ///
    /// A gap ends when the host queues the work behind it. Before a first step it begins with the wait for
    /// inputs.
    pub(super) fn new(host: &HostTimes, queued: Queued, device: DeviceTimes) -> Self {
        let before = |end: Instant, ns: u64| [end.checked_sub(Duration::from_nanos(ns)).unwrap_or(end), end];
        let first = device.gap_ns.map_or([queued.asked, queued.passes], |ns| before(queued.passes, ns));
        let gaps = [first, before(queued.update, device.late_ns)];
        let part = |part| gaps.into_iter().map(|gap| host.within(part, gap)).sum::<u64>();
        let checkpoint_ns = part(HostPart::Checkpoint);
        let times = Self {
            pass_ns: 0,
            between_ns: device.passes_ns,
            update_ns: device.update_ns,
            data_ns: part(HostPart::Data),
            input_ns: part(HostPart::Input),
            plan_ns: part(HostPart::Plan),
            result_ns: part(HostPart::Result),
            report_ns: part(HostPart::Report).saturating_sub(checkpoint_ns),
            checkpoint_ns,
        };
        // what is left is between parts: calls of the driver
        let gap_ns = gaps.map(|[begin, end]| (end - begin).as_nanos() as u64).into_iter().sum::<u64>();
        Self { plan_ns: times.plan_ns + gap_ns.saturating_sub(times.host_ns()), ..times }
    }

    /// Time of all parts of the host.
    const fn host_ns(&self) -> u64 {
        self.data_ns + self.input_ns + self.plan_ns + self.result_ns + self.report_ns + self.checkpoint_ns
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
    fn the_gaps_of_the_device_are_divided_as_the_host_spent_them() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let mut host = HostTimes::default();
        host.add(HostPart::Result, at(0), at(50));
        host.add(HostPart::Report, at(50), at(60));
        host.add(HostPart::Checkpoint, at(52), at(59));
        host.add(HostPart::Data, at(60), at(80));
        host.add(HostPart::Input, at(80), at(85));
        host.add(HostPart::Plan, at(85), at(87));
        host.add(HostPart::Report, at(100), at(103));
        let milliseconds = |ns: u64| ns / 1_000_000;
        let queued = Queued { asked: at(60), passes: at(87), update: at(104) };
        let device = DeviceTimes {
            gap_ns: Some(41_000_000),
            passes_ns: 500_000_000,
            late_ns: 2_000_000,
            update_ns: 60_000_000,
        };
        let times = StepTimes::new(&host, queued, device).passes(450_000_000);
        assert_eq!(
            times.words().map(milliseconds),
            [450, 50, 60, 20, 5, 3, 4, 4, 7],
            "the parts of the gaps add up to them"
        );
        assert_eq!(StepTimes::of_words(times.words()), times);
        let idle = times.idle(1.0);
        assert!((idle.gap_seconds() - 0.043).abs() < 1e-9, "{idle:?}");
        // Before the first step the device has had no work; a device that is kept busy waits for nothing.
        let first = DeviceTimes { gap_ns: None, late_ns: 0, ..device };
        assert_eq!(StepTimes::new(&host, queued, first).words().map(milliseconds)[3..], [20, 5, 2, 0, 0, 0]);
        let busy = DeviceTimes { gap_ns: Some(0), late_ns: 0, ..device };
        assert_eq!(StepTimes::new(&host, queued, busy).words().map(milliseconds)[3..], [0; 6]);
        host.forget_before(at(84));
        assert_eq!(host.0.len(), 3);
    }
}
