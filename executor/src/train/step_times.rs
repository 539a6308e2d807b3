//! Divides step time into passes, update and device waits, and corrects plans by measured pass times.
//!
//! A device is idle from the end of an update until the next step's first work is queued, and from the end of
//! a step's passes until the update is queued. The host records its activity during that time, part by part.
//!
//! [`MeasuredTimes`] are the CPU times of all passes; corrections to the plan are learned from them.

use super::correction_record::CorrectionRecorder;
use super::step_end::{self, StepEnd};
use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{
    CommunicationLane, DeviceTimes, Job, PassTimes, RankRole, StepOutcome, TimedCommunication,
};
use dflop_balancer::schedule::Part;
use dflop_comm::{Comm, StepContext};
use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable, CorrectionTracker, SlowRank};
use dflop_loader::{StepPlan, StepPlanner};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Number of words in [`StepTimes`].
pub(super) const WORDS: usize = 9;

/// Rank times in a step, or sums over ranks, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "units come last")]
pub(super) struct StepTimes {
    /// Wall time in passes.
    pub(super) pass_ns: u64,
    /// Device time between passes: waits for communication and for other stages, late launches.
    pub(super) between_ns: u64,
    pub(super) update_ns: u64,
    pub(super) data_ns: u64,
    pub(super) input_ns: u64,
    pub(super) plan_ns: u64,
    pub(super) result_ns: u64,
    pub(super) report_ns: u64,
    pub(super) checkpoint_ns: u64,
}

/// Mean time per rank without a pass on the device, by cause, in seconds. The device is idle for all causes
/// except the update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct IdleTimes {
    /// Weight update: gradient norm, clipping, `AdamW`.
    pub update_seconds: f64,
    /// Wait for step samples.
    pub data_wait_seconds: f64,
    /// Wait for inputs to be packed from samples and copied to the device.
    pub input_seconds: f64,
    /// Step checks and planning on the host, until the first work is queued.
    pub plan_seconds: f64,
    /// Transfer to the host for loss and gradient norm.
    pub result_seconds: f64,
    /// Measured time exchange, corrections, traces, records and output.
    pub report_seconds: f64,
    /// Copies for a checkpoint (weights and optimizer state).
    pub checkpoint_seconds: f64,
}

impl IdleTimes {
    /// Returns the device idle time between steps.
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

/// Host work category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostPart {
    /// Wait for samples.
    Data,
    /// Wait for inputs to be packed and copied.
    Input,
    /// Step checks and planning, until the first work is queued.
    Plan,
    /// Wait for step results.
    Result,
    /// Everything after the results until the next step is requested, except checkpoints.
    Report,
    /// Copies for a checkpoint, within a report.
    Checkpoint,
}

/// Recent host activity with time ranges.
#[derive(Debug, Default)]
pub(super) struct HostTimes(Vec<(HostPart, [Instant; 2])>);

impl HostTimes {
    /// Adds a part.
    pub(super) fn add(&mut self, part: HostPart, begin: Instant, end: Instant) {
        self.0.push((part, [begin, end]));
    }

    /// Removes activity that ended before a time.
    pub(super) fn forget_before(&mut self, time: Instant) {
        self.0.retain(|(_, [_, end])| *end >= time);
    }

    /// Returns the host time for a part between `begin` and `end`, in nanoseconds.
    fn within(&self, part: HostPart, [begin, end]: [Instant; 2]) -> u64 {
        let own = self.0.iter().filter(|(own, _)| *own == part);
        let common = own.map(|(_, [from, to])| (*to).min(end).saturating_duration_since((*from).max(begin)));
        common.sum::<Duration>().as_nanos() as u64
    }
}

/// Times when the host queued a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queued {
    /// Time when inputs were requested.
    pub(super) asked: Instant,
    /// Time when the first pass work was queued.
    pub(super) passes: Instant,
    /// Time when the first update work was queued.
    pub(super) update: Instant,
}

impl StepTimes {
    /// Divides the gaps before passes and before the update by host activity, and adds the device times.
    ///
    /// A gap ends when the host queues the next work. Before the first step, the gap begins with the wait for
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

    /// Sum over all host parts, in nanoseconds.
    const fn host_ns(&self) -> u64 {
        self.data_ns + self.input_ns + self.plan_ns + self.result_ns + self.report_ns + self.checkpoint_ns
    }

    /// Sets the pass time and subtracts it from the time between passes.
    pub(super) fn passes(mut self, pass_ns: u64) -> Self {
        (self.pass_ns, self.between_ns) = (pass_ns, self.between_ns.saturating_sub(pass_ns));
        self
    }

    /// Returns the means over ranks from summed times.
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

    pub(super) fn from_words(words: [u64; WORDS]) -> Self {
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

/// CPU time for every pass in a step; equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredTimes {
    /// CPU time used by the computing thread.
    passes: PassTimes,
    /// First stage in every module, then the number of stages.
    first_stages: Vec<usize>,
    /// Step parts, summed over all ranks.
    pub(super) parts: StepTimes,
    /// Wall time from start to end for the slowest rank's action list, in nanoseconds.
    pub(super) pipeline_ns: u64,
    /// Time in sends and collectives, and time spent waiting for communication, both summed over all ranks,
    /// in nanoseconds.
    pub(super) communication_ns: [u64; 2],
    /// Rank reports, summed over all ranks.
    pub(super) end: StepEnd,
}

impl MeasuredTimes {
    /// Sums the times measured on all ranks. Collective: every rank must call it.
    ///
    /// - `rounds`: microbatches per LLM DP rank
    /// - `parts`: step parts on this rank, without passes
    /// - `end`: report from this rank, also summed
    pub(super) fn exchange(
        comm: &dyn Comm,
        job: &Job,
        roles: &[RankRole],
        (step, rounds): (u64, usize),
        (outcome, parts): (&StepOutcome, StepTimes),
        end: StepEnd,
    ) -> Result<Self> {
        let (timeline, communication) = (&outcome.timeline, communication_ns(&outcome.communication));
        let (mut passes, mut pass_ns) = (PassTimes::zero(job, rounds), 0);
        for timed in timeline {
            let Some(pass) = timed.action.pass() else { continue };
            pass_ns += timed.end_ns - timed.start_ns;
            // All TP ranks of a stage run the same pass; the first one counts.
            let is_first = |role: &RankRole| role.tp_rank == 0 && role.stages.contains(&pass.part.stage);
            if roles.iter().any(is_first) {
                passes.add(pass, timed.busy_ns);
            }
        }
        // One all-reduce for everything: times of passes, parts of the step, times of communication, the
        // report, then the time of the last action of each rank.
        let mut ends_ns = vec![0; comm.size()];
        ends_ns[comm.rank()] = timeline.iter().map(|timed| timed.end_ns).max().unwrap_or(0);
        let own = passes.as_mut_slice();
        let parts = parts.passes(pass_ns).words();
        let mut ns = [&*own, &parts, &communication, &end.words(), &ends_ns].concat();
        comm.all_reduce(StepContext::step(step, "sum times"), ns.as_mut_slice().into())?;
        let (summed, rest) = ns.split_at(own.len());
        own.copy_from_slice(summed);
        let first_stages = (0..=job.modules().len()).map(|module| first_stage(job, module)).collect();
        let (parts, rest) = rest.split_first_chunk().unwrap_or((&[0; WORDS], &[]));
        let parts = StepTimes::from_words(*parts);
        let (&communication_ns, rest) = rest.split_first_chunk().unwrap_or((&[0; 2], &[]));
        let (end, ends_ns) = rest.split_first_chunk().unwrap_or((&[0; step_end::WORDS], &[]));
        let (end, pipeline_ns) = (StepEnd::from_words(*end), ends_ns.iter().copied().max().unwrap_or(0));
        Ok(Self { passes, first_stages, parts, pipeline_ns, communication_ns, end })
    }

    /// Returns the time for every pass.
    #[must_use]
    pub fn passes(&self) -> &PassTimes {
        &self.passes
    }

    /// Returns a module's time for a microbatch, forward and backward in all module stages.
    ///
    /// # Panics
    /// If there is no such module.
    #[must_use]
    pub fn module_ns(&self, module: usize, microbatch: usize) -> u64 {
        let stages = self.first_stages[module]..self.first_stages[module + 1];
        let part = |stage: usize| Part { microbatch: microbatch as u32, stage: stage as u16 };
        stages.flat_map(|stage| self.passes.part_ns(part(stage))).sum()
    }
}

/// Returns the time in sends and collectives, and the exposed time for all communication. A message counts on
/// the sending rank.
fn communication_ns(all: &[TimedCommunication]) -> [u64; 2] {
    let own = all.iter().filter(|timed| !matches!(timed.lane, CommunicationLane::Receive { .. }));
    let length = |timed: &TimedCommunication| u64::try_from(timed.end_ns - timed.start_ns).unwrap_or(0);
    [own.map(length).sum(), all.iter().map(|timed| timed.exposed_ns).sum()]
}

fn first_stage(job: &Job, module: usize) -> usize {
    job.modules()[..module].iter().map(|module| module.stages.len()).sum()
}

/// Settings for learned corrections.
#[derive(Debug, Clone, Default)]
pub struct CorrectionSettings {
    /// Rule by which tables are learned from measured times.
    pub options: CorrectionOptions,
    /// Whether learned tables correct later plans. If so, the plans and the last digits in losses depend on
    /// machine load.
    pub is_applied: bool,
    /// Tables from a restored state, [`crate::checkpoint::RunState::corrections`].
    pub restored: Vec<CorrectionTable>,
}

/// Prediction errors over a step interval, and the table learned from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CorrectionReport {
    /// Mean error without correction, as a fraction of the measured time.
    pub error_uncorrected: f64,
    /// Mean error with the table that was learned before the interval, if there was one.
    pub error_corrected: Option<f64>,
    /// New table version, if the table differs from the previous table.
    pub version: Option<u64>,
    /// Data-parallel ranks in a module that need longer for the same work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slow_ranks: Vec<SlowRank>,
    /// Whether the table corrects plans.
    pub is_applied: bool,
}

/// Updates correction tables from measured times; every rank computes the same tables.
pub(super) struct PlanCorrector {
    tracker: CorrectionTracker,
    is_applied: bool,
    recorder: Option<CorrectionRecorder>,
    /// Tables that plans for the next or later steps may need, in order.
    tables: Vec<CorrectionTable>,
}

impl PlanCorrector {
    /// Starts learning, or continues at a step after 0.
    pub(super) fn new(settings: CorrectionSettings, step: u64) -> Result<Self> {
        let CorrectionSettings { options, is_applied, restored: tables } = settings;
        let tracker = CorrectionTracker::new(options)?.resume(step, tables.last().cloned());
        Ok(Self { tracker, is_applied, recorder: None, tables })
    }

    /// Records the tables from this step on.
    pub(super) fn record(&mut self, recorder: CorrectionRecorder) {
        self.recorder = Some(recorder);
    }

    /// Adds step times. At the end of an interval, returns a report and may pass a new table to the planner
    /// for later steps.
    pub(super) fn add_step(
        &mut self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        predicted: &PredictedTimes,
        times: &MeasuredTimes,
    ) -> Result<Option<CorrectionReport>> {
        if self.tracker.is_tracking() {
            let measured = |module, microbatch| times.module_ns(module, microbatch);
            for observation in predicted.observations(job, planner, plan, measured) {
                self.tracker.observe(&observation)?;
            }
        }
        let interval = self.tracker.end_step();
        let table = interval.as_ref().and_then(|interval| interval.table.as_ref());
        if let Some(recorder) = &mut self.recorder {
            recorder.step(plan.step, table)?;
        }
        if let Some(table) = table {
            if self.is_applied {
                planner.correct(table.clone())?;
            }
            self.tables.push(table.clone());
        }
        // a table ends when a later one is in force
        let next = plan.step + 1;
        let ended = self.tables.iter().skip(1).take_while(|table| table.effective_step() <= next).count();
        self.tables.drain(..ended);
        Ok(interval.map(|interval| CorrectionReport {
            error_uncorrected: interval.error_uncorrected,
            error_corrected: interval.error_corrected,
            version: interval.table.as_ref().map(CorrectionTable::version),
            slow_ranks: interval.slow_ranks,
            is_applied: self.is_applied,
        }))
    }

    /// Returns the tables that a run resuming at the next step needs, in order.
    pub(super) fn tables(&self) -> &[CorrectionTable] {
        &self.tables
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
        assert_eq!(StepTimes::from_words(times.words()), times);
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
