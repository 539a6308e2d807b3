//! Measured microbatch times, and corrections to the plan from them.

use super::correction_record::CorrectionRecorder;
use super::step_end::StepEnd;
use super::step_times::StepTimes;
use super::{step_end, step_times};
use crate::error::Result;
use crate::inputs::PredictedTimes;
use crate::pipeline::{CommunicationLane, Job, PassTimes, RankRole, StepOutcome, TimedCommunication};
use dflop_balancer::schedule::Part;
use dflop_comm::{Comm, StepContext};
use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable, CorrectionTracker, SlowRank};
use dflop_loader::{StepPlan, StepPlanner};
use serde::Serialize;

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
        let (parts, rest) = rest.split_first_chunk().unwrap_or((&[0; step_times::WORDS], &[]));
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
