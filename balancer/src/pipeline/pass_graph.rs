//! The graph of passes of a step: of one pipeline, or of several that a shared module couples.
//!
//! A stage of a *shared* module runs once for each slot, for all pipelines: its forward pass sends to the
//! next stage of every rank, and its backward pass waits for all of them. So that every pass has two inputs
//! and two receivers, fans are chains of passes that take no time. The schedule orders the passes.

use crate::schedule::{ScheduleKind, StepOrder, StepShape};

/// A pass, in an order in which every pass comes after its inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Stage of one rank, or of all ranks, whose passes run one after the other.
    pub(super) lane: usize,
    pub(super) microbatch: usize,
    /// Index into the times.
    pub(super) time: u32,
    /// Previous pass of the lane and the pass that sends the input, or the number of passes.
    pub(super) before: [u32; 2],
    /// Next pass of the lane and the pass that receives the output, or the number of passes; of a fan both
    /// receivers.
    pub(super) after: [u32; 2],
}

/// Stages, ranks and microbatches of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassShape<'a> {
    /// Module of every stage.
    pub(crate) rows: &'a [usize],
    /// Whether a module is shared by all ranks.
    pub(crate) is_shared: &'a [bool],
    pub(crate) ranks: usize,
    /// Microbatches of each rank.
    pub(crate) microbatches: usize,
    /// Schedule that runs them.
    pub(crate) kind: ScheduleKind,
}

impl PassShape<'_> {
    /// Returns the number of times; one more is 0, for fans.
    pub(crate) fn cells(&self) -> usize {
        2 * self.is_shared.len() * self.ranks * self.microbatches
    }

    /// Returns the index of a microbatch's forward time; the backward time follows. Shared modules have times
    /// at rank 0 only.
    pub(crate) fn cell(&self, rank: usize, microbatch: usize, module: usize) -> usize {
        let rank = if self.is_shared[module] { 0 } else { rank };
        2 * ((rank * self.microbatches + microbatch) * self.is_shared.len() + module)
    }

    fn is_shared_stage(&self, stage: usize) -> bool {
        self.is_shared[self.rows[stage]]
    }

    /// Orders the passes of the stages.
    fn order(&self) -> StepOrder {
        let last = self.rows.last();
        StepOrder::new(&StepShape {
            kind: self.kind,
            encoder_stages: self.rows.iter().take_while(|module| Some(*module) != last).count(),
            stages: self.rows.len(),
            slots: self.microbatches,
            has_encoder_backward: true,
        })
    }

    /// Returns the ranks that run a stage for themselves; one if it is shared.
    fn lanes_of(&self, stage: usize) -> usize {
        if self.is_shared_stage(stage) { 1 } else { self.ranks }
    }
}

/// Passes of a step, in order.
#[derive(Debug)]
pub(super) struct PassGraph {
    pub(super) passes: Vec<Pass>,
    /// Passes of every lane, in order, with the fans at shared stages.
    pub(super) lanes: Vec<Vec<u32>>,
    /// Lanes of each rank, shared ones included.
    pub(super) lanes_of_rank: Vec<Vec<usize>>,
}

/// Passes under construction.
struct Builder<'a> {
    shape: PassShape<'a>,
    passes: Vec<Pass>,
    /// First lane of every stage.
    first_lane: Vec<usize>,
    /// Last pass of every lane that takes time.
    last: Vec<u32>,
    /// Passes that sent the outputs of every lane, forward and backward, `[lanes * microbatches]`.
    sent: [Vec<u32>; 2],
    /// Passes from which each rank takes the outputs of a shared stage, `[stages * microbatches]`.
    fanned: [Vec<Vec<u32>>; 2],
    lanes: Vec<Vec<u32>>,
}

/// No pass, until the number of passes is known.
const NONE: u32 = u32::MAX;

impl PassGraph {
    pub(super) fn new(shape: PassShape<'_>) -> Self {
        let stages = shape.rows.len();
        let mut first_lane = Vec::with_capacity(stages);
        let mut lanes = 0;
        for stage in 0..stages {
            first_lane.push(lanes);
            lanes += shape.lanes_of(stage);
        }
        let lanes_of_rank = |rank: usize| {
            let lane = |stage: usize| first_lane[stage] + rank.min(shape.lanes_of(stage) - 1);
            (0..stages).map(lane).collect()
        };
        let lanes_of_rank = (0..shape.ranks).map(lanes_of_rank).collect();
        let sent = || vec![NONE; lanes * shape.microbatches];
        let fanned = || vec![Vec::new(); stages * shape.microbatches];
        let mut builder = Builder {
            shape,
            passes: Vec::new(),
            last: vec![NONE; lanes],
            sent: [sent(), sent()],
            fanned: [fanned(), fanned()],
            lanes: vec![Vec::new(); lanes],
            first_lane,
        };
        for pass in shape.order().passes {
            builder.run(pass.stage as usize, pass.slot as usize, !pass.is_forward);
        }
        let Builder { mut passes, lanes, .. } = builder;
        let nothing = passes.len() as u32;
        for edge in passes.iter_mut().flat_map(|pass| pass.before.iter_mut().chain(&mut pass.after)) {
            *edge = (*edge).min(nothing);
        }
        Self { passes, lanes, lanes_of_rank }
    }
}

impl Builder<'_> {
    /// Adds a pass of a stage on all of its lanes, with the fans around it.
    fn run(&mut self, stage: usize, microbatch: usize, is_backward: bool) {
        let direction = usize::from(is_backward);
        let sender = if is_backward { stage.checked_add(1) } else { stage.checked_sub(1) };
        let sender = sender.filter(|sender| *sender < self.shape.rows.len());
        for rank in 0..self.shape.lanes_of(stage) {
            let input = sender.map_or(NONE, |sender| self.input(stage, rank, sender, microbatch, direction));
            let lane = self.first_lane[stage] + rank;
            let module = self.shape.rows[stage];
            let time = (self.shape.cell(rank, microbatch, module) + direction) as u32;
            let before = [self.last[lane], input];
            let at = self.push(Pass { lane, microbatch, time, before, after: [NONE; 2] });
            self.connect(before[0], at, 0);
            self.connect(input, at, 1);
            self.last[lane] = at;
            self.sent[direction][lane * self.shape.microbatches + microbatch] = at;
        }
        let receiver = if is_backward { stage.checked_sub(1) } else { stage.checked_add(1) };
        let receiver = receiver.filter(|receiver| *receiver < self.shape.rows.len());
        if receiver.is_some_and(|receiver| self.fans(stage, receiver)) {
            self.fan_out(stage, microbatch, direction);
        }
    }

    /// Whether a shared stage sends to the stages of several ranks.
    fn fans(&self, shared: usize, ranked: usize) -> bool {
        self.shape.lanes_of(shared) == 1 && self.shape.lanes_of(ranked) > 1
    }

    /// Returns the pass that sends the input of a stage's pass.
    fn input(
        &mut self,
        stage: usize,
        rank: usize,
        sender: usize,
        microbatch: usize,
        direction: usize,
    ) -> u32 {
        if self.fans(sender, stage) {
            return self.fanned[direction][sender * self.shape.microbatches + microbatch][rank];
        }
        if !self.fans(stage, sender) {
            return self.sent(sender, rank, microbatch, direction);
        }
        // The shared stage waits for the output of all ranks.
        let mut joined = self.sent(sender, 0, microbatch, direction);
        for other in 1..self.shape.lanes_of(sender) {
            let before = [joined, self.sent(sender, other, microbatch, direction)];
            let at = self.push_fan(stage, microbatch, before);
            for from in before {
                self.connect(from, at, 1);
            }
            joined = at;
        }
        joined
    }

    /// Returns the pass of a stage that sent the output of a microbatch.
    fn sent(&self, stage: usize, rank: usize, microbatch: usize, direction: usize) -> u32 {
        self.sent[direction][(self.first_lane[stage] + rank) * self.shape.microbatches + microbatch]
    }

    /// Adds passes from which each rank takes the output of a shared stage.
    fn fan_out(&mut self, stage: usize, microbatch: usize, direction: usize) {
        let mut from = self.sent(stage, 0, microbatch, direction);
        let mut outputs = Vec::with_capacity(self.shape.ranks);
        for _ in 1..self.shape.ranks {
            let at = self.push_fan(stage, microbatch, [NONE, from]);
            self.connect(from, at, 1);
            outputs.push(at);
            from = at;
        }
        // The last fan has two ranks as receivers.
        outputs.push(from);
        self.fanned[direction][stage * self.shape.microbatches + microbatch] = outputs;
    }

    fn push_fan(&mut self, stage: usize, microbatch: usize, before: [u32; 2]) -> u32 {
        let (lane, time) = (self.first_lane[stage], self.shape.cells() as u32);
        self.push(Pass { lane, microbatch, time, before, after: [NONE; 2] })
    }

    fn push(&mut self, pass: Pass) -> u32 {
        let at = self.passes.len() as u32;
        self.lanes[pass.lane].push(at);
        self.passes.push(pass);
        at
    }

    /// Notes a receiver of a pass: the next of the lane as the first, others wherever there is room.
    fn connect(&mut self, from: u32, to: u32, edge: usize) {
        let Some(from) = self.passes.get_mut(from as usize) else { return };
        let edge = if from.after[edge] == NONE { edge } else { 1 - edge };
        from.after[edge] = to;
    }
}
