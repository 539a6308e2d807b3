//! Outcome of a simulated step: passes, busy times, critical path.

use super::critical_path::CriticalStep;
use crate::schedule::PassKind;

/// One pass of one microbatch through one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Index of the rank.
    pub rank: usize,
    /// Index of the stage; the rank itself where ranks hold one stage each.
    pub stage: usize,
    /// Index of the microbatch.
    pub microbatch: u32,
    /// Kind of the pass.
    pub kind: PassKind,
    /// Start of the pass, nanoseconds from the start of the step.
    pub start_ns: u64,
    /// End of the pass, nanoseconds from the start of the step.
    pub end_ns: u64,
}

/// Timeline of a simulated step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// End of the last pass, message or sum of gradients, nanoseconds.
    pub makespan_ns: u64,
    /// Computing time of each rank, `[ranks]` nanoseconds.
    pub busy_ns: Vec<u64>,
    /// Time of the messages that each rank sends and of the sums and gathers that it takes part in, `[ranks]`
    /// nanoseconds.
    pub communication_ns: Vec<u64>,
    /// Part of the communication that each rank waits for, `[ranks]` nanoseconds: what no pass hides. A wait
    /// for the pass that makes a message is none.
    pub exposed_ns: Vec<u64>,
    /// All passes, rank by rank, each rank's in order of time.
    pub events: Vec<Event>,
    /// Activities that make up the makespan: one after another from 0 to its end, without a gap.
    pub critical_path: Vec<CriticalStep>,
}

impl Simulation {
    /// Returns the share of all ranks' time in which they do not compute, in `0..=1`.
    #[must_use]
    pub fn bubble_fraction(&self) -> f64 {
        if self.makespan_ns == 0 {
            return 0.0;
        }
        let busy: f64 = self.busy_ns.iter().map(|busy| *busy as f64).sum();
        1.0 - busy / (self.makespan_ns as f64 * self.busy_ns.len() as f64)
    }
}
