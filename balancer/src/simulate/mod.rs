//! Runs a pipeline schedule on predicted times, without devices: passes, busy times, critical path.
//!
//! Ranks run their lists in order; a rank waits while an input is missing. A message leaves when the
//! producing pass ends, wherever the send is in the list: an executor starts it at that moment, and only a
//! transport with blocking sends depends on the position. Messages between the same two ranks travel
//! sequentially. All times are integer nanoseconds. [`CompiledSchedule`] is the fast way to compute only the
//! makespan.

mod makespan;
mod run;
mod times;

use super::error::{Error, Result};
use super::schedule::{Action, Part, Pass, PassKind, PipelineLayout};
use run::{Recorder, Run};
use std::fmt;

pub use makespan::CompiledSchedule;
pub use times::{Communication, StageTimes, split_time};

/// Runs a single pipeline's action lists, one per rank, with zero-time messages.
///
/// The lists need not come from [`schedule`](crate::schedule::schedule): an action that never gets the
/// required input is an error. Rank `r` of `n` holds the stages `r`, `r + n`, … in `times`.
///
/// # Errors
/// [`Error::Length`] if the number of lists does not divide the stages; [`Error::Deadlock`] with the first
/// rank that never completes, because it waits for a message or for an earlier pass, or for an action that
/// cannot be done twice or on that rank.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{ScheduleKind, schedule};
/// use dflop_balancer::{StageTimes, simulate};
///
/// // two stages, three microbatches, 3 ns each: (2 - 1) / 3 of the ideal time is added by the bubble
/// let lists: Vec<_> = (0..2).map(|s| schedule(ScheduleKind::OneForwardOneBackward, s, 2, 3)).collect();
/// let simulation = simulate(&lists, &StageTimes::split(2, 3, &[3; 6])?)?;
/// assert_eq!(simulation.makespan_ns, 12);
/// assert!((simulation.bubble_fraction() - 0.25).abs() < 1e-12);
/// let first = simulation.critical_path[0].to_string();
/// assert_eq!(first, "forward 0 in stage 0 on rank 0: 1 ns");
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn simulate(lists: &[Vec<Action>], times: &StageTimes) -> Result<Simulation> {
    let (stages, ranks) = (times.stages(), lists.len());
    if ranks == 0 || !stages.is_multiple_of(ranks) {
        return Err(Error::Length { field: "lists", found: ranks, expected: stages });
    }
    let layout = PipelineLayout::chain(ranks, stages / ranks, times.microbatches())?;
    Ok(Run::new(&layout, None, History::new(times)).run(lists)?.into_simulation())
}

impl PipelineLayout {
    /// Runs the action lists on all ranks.
    ///
    /// - `lists`: `[ranks]`, from [`PipelineLayout::schedule`] or elsewhere
    /// - `times`: for all stages and microbatches
    ///
    /// # Errors
    /// The errors of [`simulate`]; [`Error::Length`] if times are missing.
    ///
    /// # Examples
    /// ```
    /// use dflop_balancer::schedule::{PipelineLayout, ScheduleKind};
    /// use dflop_balancer::{Communication, StageTimes};
    ///
    /// // two stages, one microbatch, messages of 10 ns, 5 ns to sum the gradients of the first stage
    /// let layout = PipelineLayout::chain(2, 1, 1)?;
    /// let lists = layout.schedule(ScheduleKind::OneForwardOneBackward)?;
    /// let times = StageTimes::split(2, 1, &[3, 3])?;
    /// let communication =
    ///     Communication::free(2, 1).messages(&[10, 0], &[10, 0])?.reduce_grads(vec![5, 0], false)?;
    /// let simulation = layout.simulate(&lists, &times, &communication)?;
    /// assert_eq!(simulation.makespan_ns, 1 + 10 + 1 + 2 + 10 + 2 + 5);
    /// assert_eq!(simulation.critical_path[1].to_string(), "activations 0 in stage 0 to rank 1: 10 ns");
    /// # Ok::<(), dflop_balancer::Error>(())
    /// ```
    pub fn simulate(
        &self,
        lists: &[Vec<Action>],
        times: &StageTimes,
        communication: &Communication,
    ) -> Result<Simulation> {
        let (stages, microbatches) = (self.stages(), self.microbatches());
        if lists.len() != self.ranks() {
            return Err(Error::Length { field: "lists", found: lists.len(), expected: self.ranks() });
        }
        if times.stages() != stages || times.microbatches() != microbatches {
            let (found, expected) = (times.forward_ns().len(), stages * microbatches);
            return Err(Error::Length { field: "times", found, expected });
        }
        communication.check(stages, microbatches)?;
        Ok(Run::new(self, Some(communication), History::new(times)).run(lists)?.into_simulation())
    }
}

/// Microbatch pass through a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Rank index.
    pub rank: usize,
    /// Stage index; equal to the rank if ranks hold one stage each.
    pub stage: usize,
    /// Microbatch index.
    pub microbatch: u32,
    /// Pass kind.
    pub kind: PassKind,
    /// Start time, nanoseconds after the step begins.
    pub start_ns: u64,
    /// End time, nanoseconds after the step begins.
    pub end_ns: u64,
}

/// Timeline of a simulated step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// End time of the last pass, message or gradient sum, nanoseconds.
    pub makespan_ns: u64,
    /// Computing time per rank, `[ranks]` nanoseconds.
    pub busy_ns: Vec<u64>,
    /// Time for the messages that each rank sends and for the sums and gathers that it takes part in,
    /// `[ranks]` nanoseconds.
    pub communication_ns: Vec<u64>,
    /// Exposed communication that each rank waits for, `[ranks]` nanoseconds: what no pass hides. Waiting for
    /// the pass that produces a message does not count.
    pub exposed_ns: Vec<u64>,
    /// All passes, rank by rank, in time order per rank.
    pub events: Vec<Event>,
    /// Activities that make up the makespan: sequential from 0 to the end, without a gap.
    pub critical_path: Vec<CriticalStep>,
}

impl Simulation {
    /// Returns the share of all ranks' time without computation, in `0..=1`.
    #[must_use]
    pub fn bubble_fraction(&self) -> f64 {
        if self.makespan_ns == 0 {
            return 0.0;
        }
        let busy: f64 = self.busy_ns.iter().map(|busy| *busy as f64).sum();
        1.0 - busy / (self.makespan_ns as f64 * self.busy_ns.len() as f64)
    }
}

/// Activity that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// A rank computes.
    Pass(Pass),
    /// A stage's activations are in transit; the rank is the receiver.
    Activations(Part),
    /// The gradient for a stage's activations is in transit to it; the rank is the receiver.
    Gradients(Part),
    /// A stage's gradients are summed; the rank is the last ready rank.
    ReduceGrads(u16),
    /// A stage's weights are gathered; the rank is the waiting rank.
    GatherWeights(u16),
}

/// Step on the critical path: it starts when the previous step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CriticalStep {
    /// Activity during the step.
    pub activity: Activity,
    /// Rank index.
    pub rank: usize,
    /// Start time, nanoseconds after the step begins.
    pub start_ns: u64,
    /// End time, nanoseconds after the step begins.
    pub end_ns: u64,
}

impl fmt::Display for CriticalStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, time_ns) = (self.rank, self.end_ns - self.start_ns);
        match self.activity {
            Activity::Pass(pass) => write!(f, "{pass} on rank {rank}: {time_ns} ns"),
            Activity::Activations(part) => write!(f, "activations {part} to rank {rank}: {time_ns} ns"),
            Activity::Gradients(part) => write!(f, "gradient {part} to rank {rank}: {time_ns} ns"),
            Activity::ReduceGrads(stage) => {
                write!(f, "sum of stage {stage}'s gradients on rank {rank}: {time_ns} ns")
            }
            Activity::GatherWeights(stage) => {
                write!(f, "gather of stage {stage}'s weights on rank {rank}: {time_ns} ns")
            }
        }
    }
}

/// All activities in a simulation, with causes.
#[derive(Debug)]
struct History<'a> {
    times: &'a StageTimes,
    steps: Vec<CriticalStep>,
    /// Step that ended when each step started; `None` at the start of the simulation.
    causes: Vec<Option<u32>>,
}

impl Recorder for History<'_> {
    /// Step number.
    type End = u32;

    fn pass(&mut self, pass: Pass, rank: usize, cause: Option<u32>) -> u32 {
        self.push(Activity::Pass(pass), rank, cause, self.times.pass_ns(pass))
    }

    fn push(&mut self, activity: Activity, rank: usize, cause: Option<u32>, time_ns: u64) -> u32 {
        let start_ns = cause.map_or(0, |cause| self.end(cause).0);
        self.steps.push(CriticalStep { activity, rank, start_ns, end_ns: start_ns + time_ns });
        self.causes.push(cause);
        self.steps.len() as u32 - 1
    }

    fn later(&mut self, first: Option<u32>, second: Option<u32>) -> Option<u32> {
        let end_ns = |step: Option<u32>| step.map_or(0, |step| self.end(step).0);
        if end_ns(second) > end_ns(first) { second } else { first }
    }

    fn end(&self, step: u32) -> (u64, usize) {
        let CriticalStep { end_ns, rank, .. } = self.steps[step as usize];
        (end_ns, rank)
    }
}

impl<'a> History<'a> {
    fn new(times: &'a StageTimes) -> Self {
        Self { times, steps: Vec::new(), causes: Vec::new() }
    }

    /// Returns all steps, in the order in which they were found.
    fn steps(&self) -> &[CriticalStep] {
        &self.steps
    }

    /// Returns the chain of steps that ends last.
    fn critical_path(&mut self) -> Vec<CriticalStep> {
        let mut at = (0..self.steps.len() as u32).fold(None, |last, step| self.later(last, Some(step)));
        let mut path = Vec::new();
        while let Some(step) = at {
            path.push(self.steps[step as usize]);
            at = self.causes[step as usize];
        }
        path.reverse();
        path
    }
}
