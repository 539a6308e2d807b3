//! Sums measured pass times over the ranks that run the passes.

use dflop_balancer::schedule::Part;

use super::step_end::{self, StepEnd};
use super::step_times::{self, StepTimes};
use crate::error::Result;
use crate::pipeline::{CommunicationLane, Job, PassTimes, RankRole, StepOutcome, TimedCommunication};
use dflop_comm::{Comm, StepContext};

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
