//! Runs a pipeline schedule on predicted times, without devices.
//!
//! Ranks run their lists in order; a rank waits while an input is missing. A message leaves when the
//! producing pass ends, wherever the send is in the list: an executor starts it at that moment, and only a
//! transport with blocking sends depends on the position. Messages between the same two ranks travel
//! sequentially. All times are integer nanoseconds. [`CompiledSchedule`] is the fast way to compute only the
//! makespan.

mod communication;
mod makespan;
mod run;
mod simulation;
mod times;

pub use communication::Communication;
pub use makespan::CompiledSchedule;
pub use simulation::{Activity, CriticalStep, Event, Simulation};
pub use times::{StageTimes, split_time};

use crate::error::{Error, Result};
use crate::schedule::{Action, PipelineLayout};
use run::Run;

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
    Run::new(&layout, times, None).run(lists)
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
        Run::new(self, times, Some(communication)).run(lists)
    }
}
