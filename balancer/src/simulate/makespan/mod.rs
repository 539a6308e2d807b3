//! Computes a schedule's makespan fast, without events.
//!
//! A search needs millions of makespans for the same schedule with different times. A [`CompiledSchedule`]
//! lists all passes once, each pass after all inputs; computing a makespan is then a walk over that list with
//! two look-ups and a maximum for each pass.

mod compile;

use crate::error::{Error, Result};
use crate::schedule::{PipelineLayout, ScheduleKind};
use crate::simulate::communication::Communication;
use crate::simulate::times::StageTimes;

/// Schedule whose passes are sorted by dependencies.
///
/// Stages with the same times (the stages in a module) share a *row* of times, so each time is written only
/// once.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::ScheduleKind;
/// use dflop_balancer::{CompiledSchedule, StageTimes};
///
/// // an encoder stage and two LLM stages, two microbatches
/// let mut compiled = CompiledSchedule::new(ScheduleKind::OneForwardOneBackward, &[0, 1, 1], 2)?;
/// let times = StageTimes::split(2, 2, &[3, 3, 6, 6])?;
/// assert_eq!(compiled.makespan_ns(&times), 21);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CompiledSchedule {
    rows: usize,
    microbatches: usize,
    steps: Vec<Step>,
    /// Input message time for each step.
    delay_ns: Vec<u64>,
    /// Whether every step is a forward pass or a whole backward pass, and no input takes time.
    is_plain: bool,
    /// Steps that no step waits for.
    last: Vec<u32>,
    /// End time for each step; the last cell, always 0, is the input to the first steps.
    end_ns: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    /// Previous step on the same rank, and the step that sends the input.
    waits_for: [u32; 2],
    /// Index into the rows.
    time: u32,
    kind: StepKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepKind {
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
    /// Takes no time itself, but the input may.
    Wait,
}

impl CompiledSchedule {
    /// Compiles a single pipeline's schedule, with zero-time messages.
    ///
    /// - `rows`: `[stages]`, each stage's row in [`StageTimes`]; if ranks hold several chunks, the stages
    ///   over all chunks
    ///
    /// # Errors
    /// [`Error::Config`] if `rows` is empty, or the length is not a multiple of the chunks.
    pub fn new(kind: ScheduleKind, rows: &[usize], microbatches: usize) -> Result<Self> {
        if rows.is_empty() || !rows.len().is_multiple_of(kind.chunks()) {
            let reason =
                format!("{} stages do not divide into {} chunks per rank", rows.len(), kind.chunks());
            return Err(Error::Config { setting: "rows", reason });
        }
        let layout = PipelineLayout::chain(rows.len() / kind.chunks(), kind.chunks(), microbatches)?;
        Self::from_layout(kind, &layout, rows, &Communication::free(rows.len(), microbatches))
    }

    /// Compiles the schedule for a whole layout, with times for all messages and sums.
    ///
    /// - `rows`: `[stages]`, each stage's row in [`StageTimes`]
    ///
    /// # Errors
    /// The errors of [`PipelineLayout::schedule`]; [`Error::Length`] if `rows` or `communication` do not fit
    /// the layout.
    ///
    /// # Examples
    /// ```
    /// use dflop_balancer::schedule::{PipelineLayout, ModuleStages, ScheduleKind};
    /// use dflop_balancer::{Communication, CompiledSchedule, StageTimes};
    ///
    /// // one encoder rank feeds two LLM ranks, one microbatch each
    /// let layout = PipelineLayout::from_modules(&[ModuleStages::new(1, 1), ModuleStages::new(1, 2)], 1)?;
    /// let kind = ScheduleKind::OneForwardOneBackward;
    /// let mut compiled = CompiledSchedule::from_layout(kind, &layout, &[0, 1], &Communication::free(2, 2))?;
    /// let times = StageTimes::split(2, 2, &[3, 3, 6, 6])?;
    /// assert_eq!(compiled.makespan_ns(&times), 1 + 2 + 4 + 2 + 2);
    /// # Ok::<(), dflop_balancer::Error>(())
    /// ```
    pub fn from_layout(
        kind: ScheduleKind,
        layout: &PipelineLayout,
        rows: &[usize],
        communication: &Communication,
    ) -> Result<Self> {
        if rows.len() != layout.stages() {
            return Err(Error::Length { field: "rows", found: rows.len(), expected: layout.stages() });
        }
        communication.check(layout.stages(), layout.microbatches())?;
        compile::Compiler::new(layout, rows, communication).compile(kind)
    }

    /// Returns the time when all steps have ended, nanoseconds; equal to the makespan from
    /// [`simulate`](crate::simulate).
    ///
    /// # Panics
    /// If `times` has fewer rows or a different number of microbatches than the schedule.
    pub fn makespan_ns(&mut self, times: &StageTimes) -> u64 {
        let fits = times.stages() >= self.rows && times.microbatches() == self.microbatches;
        assert!(fits, "times of {} rows, {} microbatches", times.stages(), times.microbatches());
        self.walk(times.forward_ns(), times.backward_ns(), |cell| times.cell_weight_ns(cell))
    }

    fn walk(&mut self, forward_ns: &[u64], backward_ns: &[u64], weight_of: impl Fn(usize) -> u64) -> u64 {
        if self.is_plain {
            return self.walk_plain(forward_ns, backward_ns);
        }
        let end_ns = &mut self.end_ns[..];
        for (at, (step, delay_ns)) in self.steps.iter().zip(&self.delay_ns).enumerate() {
            let [before, input] = step.waits_for;
            let start = end_ns[before as usize].max(end_ns[input as usize] + delay_ns);
            let cell = step.time as usize;
            let of = |times: &[u64]| times.get(cell).copied().unwrap_or(0);
            let (forward, backward, weight) = (of(forward_ns), of(backward_ns), weight_of(cell));
            // Selected without a branch: passes come in an order that no branch predictor could learn.
            end_ns[at] = start + [forward, backward, backward - weight, weight, 0][step.kind as usize];
        }
        self.makespan()
    }

    /// Walks the common case: whole passes only, messages that take no time.
    fn walk_plain(&mut self, forward_ns: &[u64], backward_ns: &[u64]) -> u64 {
        let end_ns = &mut self.end_ns[..];
        // Both times are loaded and the right time is selected, again without a branch.
        let count = forward_ns.len().min(backward_ns.len());
        let (forward_ns, backward_ns) = (&forward_ns[..count], &backward_ns[..count]);
        for (at, step) in self.steps.iter().enumerate() {
            let [before, input] = step.waits_for;
            let start = end_ns[before as usize].max(end_ns[input as usize]);
            let (forward, backward) = (forward_ns[step.time as usize], backward_ns[step.time as usize]);
            end_ns[at] = start + if step.kind == StepKind::Forward { forward } else { backward };
        }
        self.makespan()
    }

    fn makespan(&self) -> u64 {
        self.last.iter().map(|&step| self.end_ns[step as usize]).max().unwrap_or(0)
    }
}
