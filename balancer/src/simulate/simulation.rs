//! Result of a simulated step: passes, busy times, critical path.

use std::fmt;

use crate::schedule::{Part, Pass, PassKind};

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
#[derive(Debug, Default)]
pub(super) struct History {
    steps: Vec<CriticalStep>,
    /// Step that ended when each step started; `None` at the start of the simulation.
    causes: Vec<Option<u32>>,
}

impl History {
    /// Adds a step that starts when the cause ends; returns the step number.
    pub(super) fn push(&mut self, activity: Activity, rank: usize, cause: Option<u32>, time_ns: u64) -> u32 {
        let start_ns = cause.map_or(0, |cause| self.end_ns(cause));
        self.steps.push(CriticalStep { activity, rank, start_ns, end_ns: start_ns + time_ns });
        self.causes.push(cause);
        self.steps.len() as u32 - 1
    }

    pub(super) fn end_ns(&self, step: u32) -> u64 {
        self.steps[step as usize].end_ns
    }

    /// Returns the later of two steps; the first if they end together.
    pub(super) fn later(&self, first: Option<u32>, second: Option<u32>) -> Option<u32> {
        let end_ns = |step: Option<u32>| step.map_or(0, |step| self.end_ns(step));
        if end_ns(second) > end_ns(first) { second } else { first }
    }

    /// Returns all steps, in the order in which they were found.
    pub(super) fn steps(&self) -> &[CriticalStep] {
        &self.steps
    }

    /// Returns the chain of steps that ends last.
    pub(super) fn critical_path(&self) -> Vec<CriticalStep> {
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
