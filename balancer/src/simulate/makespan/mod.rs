//! Computes a schedule's makespan fast: compiles it to sorted steps, and runs these without events.
//!
//! A search needs millions of makespans for the same schedule with different times. A [`CompiledSchedule`]
//! records a run of the action lists once, each step after everything it waits for; computing a makespan is
//! then a walk over the steps with two look-ups and a maximum for each.

use super::Activity;
use super::run::{Recorder, Run};
use super::times::{Communication, StageTimes};
use crate::error::{Error, Result};
use crate::schedule::{Pass, PassKind, PipelineLayout, ScheduleKind};

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
    /// Number of microbatches in all rows.
    cells: usize,
    microbatches: usize,
    steps: Vec<Step>,
    /// Steps that no step waits for.
    last: Vec<u32>,
    /// Forward, backward, input and weight times, `[4 * cells]`, then 0 and the constant times.
    times_ns: Vec<u64>,
    /// Whether backward passes are split, so that input and weight times are needed.
    is_split: bool,
    /// End time for each step; the last cell, always 0, is the input to the first steps.
    end_ns: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    waits_for: [u32; 2],
    /// Index into the times.
    time: u32,
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
        let recorder = Compiler::new(rows, layout.microbatches());
        let run = Run::new(layout, Some(communication), recorder).run(&layout.schedule(kind)?)?;
        Ok(run.into_recorder().finish())
    }

    /// Returns the time when all steps have ended, nanoseconds; equal to the makespan from
    /// [`simulate`](crate::simulate).
    ///
    /// # Panics
    /// If `times` has fewer rows or a different number of microbatches than the schedule.
    pub fn makespan_ns(&mut self, times: &StageTimes) -> u64 {
        let fits = times.forward_ns().len() >= self.cells && times.microbatches() == self.microbatches;
        assert!(fits, "times of {} rows, {} microbatches", times.stages(), times.microbatches());
        let cells = self.cells;
        self.times_ns[..cells].copy_from_slice(&times.forward_ns()[..cells]);
        self.times_ns[cells..2 * cells].copy_from_slice(&times.backward_ns()[..cells]);
        for cell in (0..cells).filter(|_| self.is_split) {
            let weight_ns = times.cell_weight_ns(cell);
            self.times_ns[2 * cells + cell] = times.backward_ns()[cell] - weight_ns;
            self.times_ns[3 * cells + cell] = weight_ns;
        }
        let (times_ns, end_ns) = (&self.times_ns[..], &mut self.end_ns[..]);
        for (at, step) in self.steps.iter().enumerate() {
            let [first, second] = step.waits_for.map(|other| end_ns[other as usize]);
            end_ns[at] = first.max(second) + times_ns[step.time as usize];
        }
        self.last.iter().map(|&step| end_ns[step as usize]).max().unwrap_or(0)
    }
}

/// Placeholder for a missing step, until the number of steps is known.
const NOTHING: u32 = u32::MAX;

/// Steps under construction.
struct Compiler<'a> {
    rows: &'a [usize],
    microbatches: usize,
    /// Number of microbatches in all rows.
    cells: usize,
    steps: Vec<Step>,
    times_ns: Vec<u64>,
    is_split: bool,
}

impl<'a> Compiler<'a> {
    fn new(rows: &'a [usize], microbatches: usize) -> Self {
        let cells = rows.iter().max().map_or(0, |row| row + 1) * microbatches;
        let times_ns = vec![0; 4 * cells + 1];
        Self { rows, microbatches, cells, steps: Vec::new(), times_ns, is_split: false }
    }

    fn push_step(&mut self, waits_for: [u32; 2], time: usize) -> [u32; 2] {
        self.steps.push(Step { waits_for, time: time as u32 });
        [self.steps.len() as u32 - 1, NOTHING]
    }

    fn finish(mut self) -> CompiledSchedule {
        let nothing = self.steps.len() as u32;
        let mut is_last = vec![true; self.steps.len() + 1];
        for step in &mut self.steps {
            // `NOTHING` becomes the cell after the last step, which always ends at 0.
            step.waits_for = step.waits_for.map(|other| other.min(nothing));
            step.waits_for.iter().for_each(|other| is_last[*other as usize] = false);
        }
        CompiledSchedule {
            cells: self.cells,
            microbatches: self.microbatches,
            last: (0..nothing).filter(|step| is_last[*step as usize]).collect(),
            end_ns: vec![0; self.steps.len() + 1],
            steps: self.steps,
            times_ns: self.times_ns,
            is_split: self.is_split,
        }
    }
}

impl Recorder for Compiler<'_> {
    /// Up to two steps, of which the later counts.
    type End = [u32; 2];

    fn pass(&mut self, pass: Pass, _: usize, cause: Option<[u32; 2]>) -> [u32; 2] {
        let kind = match pass.kind {
            PassKind::Forward => 0,
            PassKind::Backward => 1,
            PassKind::BackwardInput => 2,
            PassKind::BackwardWeight => 3,
        };
        self.is_split |= kind > 1;
        let row = self.rows[pass.part.stage as usize];
        let cell = row * self.microbatches + pass.part.microbatch as usize;
        self.push_step(cause.unwrap_or([NOTHING; 2]), kind * self.cells + cell)
    }

    fn push(&mut self, _: Activity, _: usize, cause: Option<[u32; 2]>, time_ns: u64) -> [u32; 2] {
        self.times_ns.push(time_ns);
        self.push_step(cause.unwrap_or([NOTHING; 2]), self.times_ns.len() - 1)
    }

    /// Adds a step that takes no time for every two inputs beyond two.
    fn later(&mut self, first: Option<[u32; 2]>, second: Option<[u32; 2]>) -> Option<[u32; 2]> {
        let (Some(first), Some(second)) = (first, second) else { return first.or(second) };
        let zero = 4 * self.cells;
        let [first, second] = [first, second]
            .map(|[one, other]| if other == NOTHING { one } else { self.push_step([one, other], zero)[0] });
        Some([first, second])
    }

    fn end(&self, _: [u32; 2]) -> (u64, usize) {
        (0, 0)
    }
}
