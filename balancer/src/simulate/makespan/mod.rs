//! Computes a schedule's makespan fast: compiles it to sorted steps, and runs these without events.
//!
//! A search needs millions of makespans for the same schedule with different times. A [`CompiledSchedule`]
//! lists all passes once, each pass after all inputs; computing a makespan is then a walk over that list with
//! two look-ups and a maximum for each pass.

use super::times::{Communication, StageTimes};
use crate::error::{Error, Result};
use crate::schedule::{PassGraph, PassKind, PipelineLayout, ScheduleKind};
use std::collections::BTreeMap;

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
        Compiler::new(layout, rows, communication).compile(kind)
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

/// Placeholder for a step that every step may wait for, until the number of steps is known.
const NOTHING: u32 = u32::MAX;

struct Compiler<'a> {
    layout: &'a PipelineLayout,
    rows: &'a [usize],
    communication: &'a Communication,
    steps: Vec<Step>,
    delay_ns: Vec<u64>,
    /// Last step on each rank.
    before: Vec<u32>,
    /// Last backward step in each stage, by replica.
    backward: Vec<Vec<u32>>,
    /// Overlapped sums, which no rank waits for.
    sums: Vec<u32>,
    /// Message steps, by sending and receiving pass.
    messages: BTreeMap<(usize, usize), u32>,
    /// Last message between two ranks.
    lanes: BTreeMap<(usize, usize), u32>,
    /// Stages whose weights a rank has waited for.
    gathered: Vec<(usize, usize)>,
}

impl<'a> Compiler<'a> {
    fn new(layout: &'a PipelineLayout, rows: &'a [usize], communication: &'a Communication) -> Self {
        Self {
            layout,
            rows,
            communication,
            steps: Vec::new(),
            delay_ns: Vec::new(),
            before: vec![NOTHING; layout.ranks()],
            backward: (0..layout.stages())
                .map(|stage| vec![NOTHING; layout.holders(stage).count()])
                .collect(),
            sums: Vec::new(),
            messages: BTreeMap::new(),
            lanes: BTreeMap::new(),
            gathered: Vec::new(),
        }
    }

    fn compile(mut self, kind: ScheduleKind) -> Result<CompiledSchedule> {
        let lists = self.layout.passes(kind)?;
        let graph = PassGraph::new(self.layout, &lists);
        let ticks = graph.ticks()?;
        let mut sums: Vec<(u32, usize)> = graph.sum_ticks(&ticks).into_iter().zip(0..).collect();
        sums.sort_unstable();
        let mut order: Vec<usize> = (0..graph.passes.len()).collect();
        // Ticks follow all dependencies, so that this order is topological.
        order.sort_by_key(|&number| (ticks[number], graph.rank(number)));

        let mut takers = vec![Vec::new(); graph.passes.len()];
        for number in 0..graph.passes.len() {
            for input in graph.inputs(number) {
                takers[input].push(number);
            }
        }
        let mut sums = sums.into_iter().peekable();
        let mut step_of = vec![NOTHING; graph.passes.len()];
        for number in order {
            while let Some((_, stage)) = sums.next_if(|(tick, _)| *tick < ticks[number]) {
                self.push_sum(stage);
            }
            step_of[number] = self.push_pass(&graph, number, &step_of);
            for &taker in &takers[number] {
                self.push_message(&graph, number, taker, step_of[number]);
            }
        }
        for (_, stage) in sums {
            self.push_sum(stage);
        }
        Ok(self.finish())
    }

    /// Adds a pass; a pass with several inputs waits for a chain of steps that take no time.
    fn push_pass(&mut self, graph: &PassGraph<'_>, number: usize, step_of: &[u32]) -> u32 {
        let (pass, rank) = (graph.passes[number], graph.rank(number));
        let stage = pass.part.stage as usize;
        let of_input = |input| self.messages.get(&(input, number)).copied().unwrap_or(step_of[input]);
        let mut inputs: Vec<u32> = graph.inputs(number).map(of_input).collect();
        if pass.kind == PassKind::Forward {
            inputs.extend(self.push_gather(rank, stage));
        }
        let input = match inputs[..] {
            [] => NOTHING,
            [input] => input,
            [..] => {
                // A step has two inputs; more are joined by waits.
                let join = |joined, input| self.push([joined, input], 0, StepKind::Wait, 0);
                inputs.iter().copied().fold(NOTHING, join)
            }
        };
        let time = self.rows[stage] * self.layout.microbatches() + pass.part.microbatch as usize;
        let kind = match pass.kind {
            PassKind::Forward => StepKind::Forward,
            PassKind::Backward => StepKind::Backward,
            PassKind::BackwardInput => StepKind::BackwardInput,
            PassKind::BackwardWeight => StepKind::BackwardWeight,
        };
        let step = self.push([self.before[rank], input], time as u32, kind, 0);
        self.before[rank] = step;
        if pass.kind.is_backward() {
            self.backward[stage][self.layout.replica(pass.part)] = step;
        }
        step
    }

    /// Adds a message between two passes, after the previous message in the lane, if it takes time.
    fn push_message(&mut self, graph: &PassGraph<'_>, from: usize, to: usize, made: u32) {
        let time_ns = self.delay_ns(graph, from, to);
        if time_ns == 0 {
            return;
        }
        let lane = (graph.rank(from), graph.rank(to));
        let before = self.lanes.get(&lane).copied().unwrap_or(NOTHING);
        let free = self.push([before, made], 0, StepKind::Wait, 0);
        let sent = self.push([NOTHING, free], 0, StepKind::Wait, time_ns);
        self.lanes.insert(lane, sent);
        self.messages.insert((from, to), sent);
    }

    /// Adds a stage's weight gather before the first forward pass on a rank, if it takes time.
    fn push_gather(&mut self, rank: usize, stage: usize) -> Option<u32> {
        let time_ns = self.communication.gather_ns[stage];
        if time_ns == 0 || self.gathered.contains(&(rank, stage)) {
            return None;
        }
        self.gathered.push((rank, stage));
        Some(self.push([NOTHING, NOTHING], 0, StepKind::Wait, time_ns))
    }

    /// Returns the message time between two passes.
    fn delay_ns(&self, graph: &PassGraph<'_>, from: usize, to: usize) -> u64 {
        if graph.rank(from) == graph.rank(to) {
            return 0;
        }
        let (is_gradient, producer, consumer) =
            (graph.passes[to].kind.is_backward(), graph.passes[from].part, graph.passes[to].part);
        let part = if is_gradient { consumer } else { producer };
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
        for (replica, &rank) in holders.iter().enumerate() {
            let is_overlapped = self.communication.is_overlapped;
            let ready = if is_overlapped { self.backward[stage][replica] } else { self.before[rank] };
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

    fn finish(mut self) -> CompiledSchedule {
        let nothing = self.steps.len() as u32;
        for step in &mut self.steps {
            // `NOTHING` becomes the cell after the last step, which always ends at 0.
            step.waits_for = step.waits_for.map(|other| other.min(nothing));
        }
        let is_plain = |step: &Step| matches!(step.kind, StepKind::Forward | StepKind::Backward);
        let ends = self.before.iter().chain(&self.sums).copied();
        CompiledSchedule {
            rows: self.rows.iter().max().map_or(0, |row| row + 1),
            microbatches: self.layout.microbatches(),
            is_plain: self.delay_ns.iter().all(|delay| *delay == 0) && self.steps.iter().all(is_plain),
            end_ns: vec![0; self.steps.len() + 1],
            last: ends.filter(|step| *step != NOTHING).collect(),
            steps: self.steps,
            delay_ns: self.delay_ns,
        }
    }
}
