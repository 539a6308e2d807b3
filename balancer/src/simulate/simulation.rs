//! Result of a simulated step: passes, busy times, critical path.

use super::critical_path::CriticalStep;
use crate::schedule::PassKind;

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
