//! Runs a pipeline schedule on predicted times, without devices.
//!
//! Ranks run their lists in order; a rank waits where its input is not there yet. A message leaves when
//! the pass that makes it ends, wherever its send stands in the list: an executor starts it there and then, and
//! only a transport whose sends wait cares for the place. All times are whole nanoseconds.
//! [`crate::makespan`] is the fast way to the makespan alone.

mod communication;
mod critical_path;
mod run;
mod times;

pub use communication::Communication;
pub use critical_path::{Activity, CriticalStep};
pub use times::{StageTimes, split_time};

use crate::error::{Error, Result};
use crate::schedule::{Action, Layout, PassKind};
use run::Run;

/// One pass of one microbatch through one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Index of the rank.
    pub rank: usize,
    /// Index of the stage; the rank itself where ranks hold one stage each.
    pub stage: usize,
    /// Index of the microbatch.
    pub microbatch: u32,
    /// What the pass computes.
    pub kind: PassKind,
    /// When the pass begins, nanoseconds since the step's begin.
    pub start_ns: u64,
    /// When the pass ends.
    pub end_ns: u64,
}

/// What running a schedule takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// When the last pass, message or sum of gradients ends, nanoseconds.
    pub makespan_ns: u64,
    /// How long each rank computes, `[ranks]` nanoseconds.
    pub busy_ns: Vec<u64>,
    /// All passes, rank by rank, each in the order of time.
    pub events: Vec<Event>,
    /// What the makespan is made of: one thing after the other from 0 to its end, without a gap.
    pub critical_path: Vec<CriticalStep>,
}

impl Simulation {
    /// Returns how long each rank waits or communicates, `[ranks]` nanoseconds.
    #[must_use]
    pub fn idle_ns(&self) -> Vec<u64> {
        self.busy_ns.iter().map(|busy| self.makespan_ns - busy).collect()
    }

    /// Returns the share of each rank's time in which it does not compute, `[ranks]` in `0..=1`.
    #[must_use]
    pub fn bubbles(&self) -> Vec<f64> {
        let makespan_ns = self.makespan_ns.max(1) as f64;
        self.idle_ns().into_iter().map(|idle| idle as f64 / makespan_ns).collect()
    }

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

/// Runs the action lists of one pipeline, one per rank, with messages that take no time.
///
/// The lists need not come from [`schedule`](crate::schedule::schedule): whatever never gets its input is
/// an error. Rank `r` of `n` holds the stages `r`, `r + n`, … of `times`.
///
/// # Errors
/// [`Error::Length`] if there is not a list per rank; [`Error::Deadlock`] with the first rank that waits
/// for ever, be it for a message, for a pass of its own, or for something that cannot be done twice or
/// there.
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
    let layout = Layout::chain(ranks, stages / ranks, times.microbatches())?;
    Run::new(&layout, times, None).run(lists)
}

impl Layout {
    /// Runs the action lists of all ranks.
    ///
    /// - `lists`: `[ranks]`, those of [`Layout::schedule`] or others
    /// - `times`: of all stages and microbatches
    ///
    /// # Errors
    /// Those of [`simulate`]; [`Error::Length`] if times are missing.
    ///
    /// # Examples
    /// ```
    /// use dflop_balancer::schedule::{Layout, ScheduleKind};
    /// use dflop_balancer::{Communication, StageTimes};
    ///
    /// // two stages, one microbatch, messages of 10 ns, 5 ns to sum the gradients of the first stage
    /// let layout = Layout::chain(2, 1, 1)?;
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
        Run::new(self, times, Some(communication)).run(lists)
    }
}
