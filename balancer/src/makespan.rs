//! The makespan of a schedule and nothing else, fast.
//!
//! A search asks for millions of makespans of one schedule on other times. A [`CompiledSchedule`] lists
//! all passes once in an order in which every pass comes after what it waits for; a makespan is then one
//! walk over that list, two look-ups and a maximum for each pass.

use crate::error::{Error, Result};
use crate::schedule::{Layout, PassGraph, PassKind, ScheduleKind};
use crate::simulate::{Communication, StageTimes, weight_part};

/// A schedule whose passes are sorted by what waits for what.
///
/// Stages that share their times (those of one module) share a *row* of times, so that a time is written
/// once for all of them.
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
    passes: usize,
    steps: Vec<Step>,
    /// What the input of each step takes on its way.
    delay_ns: Vec<u64>,
    /// Whether every step is a forward pass or a whole backward pass, and no input takes time.
    is_plain: bool,
    /// The steps that nothing waits for.
    last: Vec<u32>,
    /// When each step ends; the last cell, always 0, is what the first steps wait for.
    end_ns: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    /// The step before on the same rank, and the one that sends the input.
    waits_for: [u32; 2],
    /// Index in the rows of times.
    time: u32,
    kind: StepKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepKind {
    Forward,
    Backward,
    BackwardInput,
    BackwardWeight,
    /// Takes no time itself, but its input may.
    Wait,
}

impl CompiledSchedule {
    /// Sorts the passes of one pipeline's schedule, messages taking no time.
    ///
    /// - `rows`: `[stages]`, which row of [`StageTimes`] each stage takes; if ranks hold several chunks, the
    ///   stages are those of all chunks
    ///
    /// # Errors
    /// [`Error::Config`] if `rows` is empty, or no multiple of the chunks.
    pub fn new(kind: ScheduleKind, rows: &[usize], microbatches: usize) -> Result<Self> {
        if rows.is_empty() || !rows.len().is_multiple_of(kind.chunks()) {
            let reason = format!("{} stages for {} chunks a rank", rows.len(), kind.chunks());
            return Err(Error::Config { setting: "rows", reason });
        }
        let layout = Layout::chain(rows.len() / kind.chunks(), kind.chunks(), microbatches)?;
        Self::of_layout(kind, &layout, rows, &Communication::free(rows.len(), microbatches))
    }

    /// Sorts the passes of a whole layout, with times of everything that ranks exchange.
    ///
    /// - `rows`: `[stages]`, which row of [`StageTimes`] each stage takes
    ///
    /// # Errors
    /// Those of [`Layout::schedule`]; [`Error::Length`] if `rows` or `communication` do not fit the layout.
    ///
    /// # Examples
    /// ```
    /// use dflop_balancer::schedule::{Layout, ModuleStages, ScheduleKind};
    /// use dflop_balancer::{Communication, CompiledSchedule, StageTimes};
    ///
    /// // one encoder rank feeds two LLM ranks, one microbatch each
    /// let layout = Layout::of_modules(&[ModuleStages::new(1, 1), ModuleStages::new(1, 2)], 1)?;
    /// let kind = ScheduleKind::OneForwardOneBackward;
    /// let mut compiled = CompiledSchedule::of_layout(kind, &layout, &[0, 1], &Communication::free(2, 2))?;
    /// let times = StageTimes::split(2, 2, &[3, 3, 6, 6])?;
    /// assert_eq!(compiled.makespan_ns(&times), 2 * 1 + 6 + 2);
    /// # Ok::<(), dflop_balancer::Error>(())
    /// ```
    pub fn of_layout(
        kind: ScheduleKind,
        layout: &Layout,
        rows: &[usize],
        communication: &Communication,
    ) -> Result<Self> {
        if rows.len() != layout.stages() {
            return Err(Error::Length { field: "rows", found: rows.len(), expected: layout.stages() });
        }
        communication.check(layout.stages(), layout.microbatches())?;
        Compiler::new(layout, rows, communication).compile(kind)
    }

    /// Returns when everything has ended, nanoseconds; the same as [`simulate`](crate::simulate) says.
    ///
    /// # Panics
    /// If `times` has fewer rows or another number of microbatches than the schedule.
    pub fn makespan_ns(&mut self, times: &StageTimes) -> u64 {
        let fits = times.stages() >= self.rows && times.microbatches() == self.microbatches;
        assert!(fits, "times of {} rows, {} microbatches", times.stages(), times.microbatches());
        self.walk(times.forward_ns(), times.backward_ns(), |cell| times.weight_of(cell))
    }

    /// The same on bare times, `[rows * microbatches]` each.
    pub(crate) fn makespan_of(&mut self, forward_ns: &[u64], backward_ns: &[u64]) -> u64 {
        self.walk(forward_ns, backward_ns, |cell| weight_part(backward_ns.get(cell).copied().unwrap_or(0)))
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
            // One of all, without a branch: passes come in no order that a branch could learn.
            end_ns[at] = start + [forward, backward, backward - weight, weight, 0][step.kind as usize];
        }
        self.makespan()
    }

    /// The common case: nothing but whole passes, messages that take no time.
    fn walk_plain(&mut self, forward_ns: &[u64], backward_ns: &[u64]) -> u64 {
        let end_ns = &mut self.end_ns[..];
        // Both times are loaded and one is taken, again without a branch.
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

/// Stands for the step that everything may wait for, until the number of steps is known.
const NOTHING: u32 = u32::MAX;

struct Compiler<'a> {
    layout: &'a Layout,
    rows: &'a [usize],
    communication: &'a Communication,
    steps: Vec<Step>,
    delay_ns: Vec<u64>,
    /// The last step of each rank.
    before: Vec<u32>,
    /// The last backward step of each rank.
    backward: Vec<u32>,
    /// Sums that nobody waits for.
    sums: Vec<u32>,
}

impl<'a> Compiler<'a> {
    fn new(layout: &'a Layout, rows: &'a [usize], communication: &'a Communication) -> Self {
        Self {
            layout,
            rows,
            communication,
            steps: Vec::new(),
            delay_ns: Vec::new(),
            before: vec![NOTHING; layout.ranks()],
            backward: vec![NOTHING; layout.ranks() * layout.stages()],
            sums: Vec::new(),
        }
    }

    fn compile(mut self, kind: ScheduleKind) -> Result<CompiledSchedule> {
        let lists = self.layout.passes(kind)?;
        let graph = PassGraph::new(self.layout, &lists);
        let ticks = graph.ticks()?;
        let mut sums: Vec<(u32, usize)> = graph.sum_ticks(&ticks).into_iter().zip(0..).collect();
        sums.sort_unstable();
        let mut order: Vec<usize> = (0..graph.passes.len()).collect();
        order.sort_by_key(|&number| (ticks[number], graph.rank(number)));

        let mut sums = sums.into_iter().peekable();
        let mut step_of = vec![NOTHING; graph.passes.len()];
        for number in order {
            while let Some((_, stage)) = sums.next_if(|(tick, _)| *tick < ticks[number]) {
                self.push_sum(stage);
            }
            step_of[number] = self.push_pass(&graph, number, &step_of);
        }
        for (_, stage) in sums {
            self.push_sum(stage);
        }
        Ok(self.finish(graph.passes.len()))
    }

    /// Adds a pass; passes with several inputs wait for a chain of steps that take no time.
    fn push_pass(&mut self, graph: &PassGraph<'_>, number: usize, step_of: &[u32]) -> u32 {
        let (pass, rank) = (graph.passes[number], graph.rank(number));
        let inputs: Vec<(u32, u64)> =
            graph.inputs(number).map(|input| (step_of[input], self.delay_ns(graph, input, number))).collect();
        let (input, delay_ns) = match inputs[..] {
            [] => (NOTHING, 0),
            [input] => input,
            [..] => {
                let join =
                    |joined, (input, delay_ns)| self.push([joined, input], 0, StepKind::Wait, delay_ns);
                (inputs.iter().copied().fold(NOTHING, join), 0)
            }
        };
        let stage = pass.part.stage as usize;
        let time = self.rows[stage] * self.layout.microbatches() + pass.part.microbatch as usize;
        let kind = match pass.kind {
            PassKind::Forward => StepKind::Forward,
            PassKind::Backward => StepKind::Backward,
            PassKind::BackwardInput => StepKind::BackwardInput,
            PassKind::BackwardWeight => StepKind::BackwardWeight,
        };
        let step = self.push([self.before[rank], input], time as u32, kind, delay_ns);
        self.before[rank] = step;
        if pass.kind.is_backward() {
            self.backward[rank * self.layout.stages() + stage] = step;
        }
        step
    }

    /// How long a message between two passes takes.
    fn delay_ns(&self, graph: &PassGraph<'_>, from: usize, to: usize) -> u64 {
        if graph.rank(from) == graph.rank(to) {
            return 0;
        }
        let (is_gradient, giver, taker) =
            (graph.passes[to].kind.is_backward(), graph.passes[from].part, graph.passes[to].part);
        let part = if is_gradient { taker } else { giver };
        let cell = part.stage as usize * self.layout.microbatches() + part.microbatch as usize;
        let times = self.communication;
        if is_gradient { times.gradient_ns[cell] } else { times.activation_ns[cell] }
    }

    fn push_sum(&mut self, stage: usize) {
        let time_ns = self.communication.reduce_ns[stage];
        if time_ns == 0 {
            return;
        }
        let mut joined = NOTHING;
        let holders: Vec<usize> = self.layout.holders(stage).collect();
        for &rank in &holders {
            let ready = if self.communication.is_overlapped {
                self.backward[rank * self.layout.stages() + stage]
            } else {
                self.before[rank]
            };
            joined = self.push([joined, ready], 0, StepKind::Wait, 0);
        }
        let sum = self.push([NOTHING, joined], 0, StepKind::Wait, time_ns);
        if self.communication.is_overlapped {
            self.sums.push(sum);
        } else {
            for rank in holders {
                self.before[rank] = sum;
            }
        }
    }

    fn push(&mut self, waits_for: [u32; 2], time: u32, kind: StepKind, delay_ns: u64) -> u32 {
        self.steps.push(Step { waits_for, time, kind });
        self.delay_ns.push(delay_ns);
        self.steps.len() as u32 - 1
    }

    fn finish(mut self, passes: usize) -> CompiledSchedule {
        let nothing = self.steps.len() as u32;
        for step in &mut self.steps {
            step.waits_for = step.waits_for.map(|other| other.min(nothing));
        }
        let is_plain = |step: &Step| matches!(step.kind, StepKind::Forward | StepKind::Backward);
        let ends = self.before.iter().chain(&self.sums).copied();
        CompiledSchedule {
            rows: self.rows.iter().max().map_or(0, |row| row + 1),
            microbatches: self.layout.microbatches(),
            passes,
            is_plain: self.delay_ns.iter().all(|delay| *delay == 0) && self.steps.iter().all(is_plain),
            end_ns: vec![0; self.steps.len() + 1],
            last: ends.filter(|step| *step != NOTHING).collect(),
            steps: self.steps,
            delay_ns: self.delay_ns,
        }
    }
}
