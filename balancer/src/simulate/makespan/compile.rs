//! Compiles a schedule to steps, sorted so that every step comes after all inputs.

use super::{CompiledSchedule, Step, StepKind};
use crate::error::Result;
use crate::schedule::{PassGraph, PassKind, PipelineLayout, ScheduleKind};
use crate::simulate::communication::Communication;
use std::collections::BTreeMap;

/// Placeholder for a step that every step may wait for, until the number of steps is known.
const NOTHING: u32 = u32::MAX;

pub(super) struct Compiler<'a> {
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
    pub(super) fn new(
        layout: &'a PipelineLayout,
        rows: &'a [usize],
        communication: &'a Communication,
    ) -> Self {
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

    pub(super) fn compile(mut self, kind: ScheduleKind) -> Result<CompiledSchedule> {
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
