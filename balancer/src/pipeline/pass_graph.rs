//! Pass graph for a step: a single pipeline, or several pipelines coupled by a shared module.
//!
//! A *shared* module's stage runs once per slot, for all pipelines: the forward pass sends to the next stage
//! on every rank, and the backward pass waits for all ranks. The last module's first stage receives the
//! outputs from all parallel encoders. So that every pass has at most two inputs and two receivers, fans are
//! chains of zero-time passes. The schedule orders the passes.

use crate::schedule::{StepOrder, StepShape};

/// Pass, listed after all inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Stage on a rank, or on all ranks, whose passes run sequentially.
    pub(super) lane: usize,
    pub(super) microbatch: usize,
    /// Index into the times.
    pub(super) time: u32,
    /// Previous pass on the rank's lanes and the pass that sends the input, or the number of passes.
    pub(super) before: [u32; 2],
    /// Next pass on the rank's lanes and the pass that receives the output, or the number of passes; for a
    /// fan, both receivers.
    pub(super) after: [u32; 2],
}

/// Stages, ranks and microbatches in a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassShape<'a> {
    /// Stages, encoders first, microbatches per rank, and the schedule.
    pub(crate) step: StepShape,
    /// Module for every stage.
    pub(crate) rows: &'a [usize],
    /// Whether all ranks share a module.
    pub(crate) is_shared: &'a [bool],
    pub(crate) ranks: usize,
}

impl PassShape<'_> {
    /// Returns the number of times; an extra 0 follows for fans.
    pub(crate) fn cells(&self) -> usize {
        2 * self.is_shared.len() * self.ranks * self.step.slots
    }

    /// Returns the index for a microbatch's forward time; the backward time follows. Shared modules have
    /// times only at rank 0.
    pub(crate) fn cell(&self, rank: usize, microbatch: usize, module: usize) -> usize {
        let rank = if self.is_shared[module] { 0 } else { rank };
        2 * ((rank * self.step.slots + microbatch) * self.is_shared.len() + module)
    }

    /// Returns the number of ranks that run a stage separately; 1 if it is shared.
    fn stage_lanes(&self, stage: usize) -> usize {
        if self.is_shared[self.rows[stage]] { 1 } else { self.ranks }
    }

    /// Returns the number of passes in a receiver stage that receive a pass output from a stage.
    fn takers(&self, stage: usize, receiver: usize) -> usize {
        if self.stage_lanes(stage) == 1 { self.stage_lanes(receiver) } else { 1 }
    }

    /// Lists the stages that send a pass input.
    fn senders(&self, stage: usize, direction: usize) -> Vec<usize> {
        if direction == 0 {
            self.step.senders(stage).collect()
        } else {
            self.step.receiver(stage).into_iter().collect()
        }
    }

    /// Returns a stage's links in one direction.
    fn links(&self, stage: usize, direction: usize) -> Links {
        let takers = |sender: usize, receivers: &[usize]| -> usize {
            receivers.iter().map(|receiver| self.takers(sender, *receiver)).sum()
        };
        // Senders in one direction are receivers in the opposite direction.
        let receivers = |stage: usize| self.senders(stage, 1 - direction);
        let sender = |sender: usize| {
            let receivers = receivers(sender);
            let before = receivers.iter().take_while(|receiver| **receiver != stage).count();
            (sender, takers(sender, &receivers[..before]))
        };
        Links {
            senders: self.senders(stage, direction).into_iter().map(sender).collect(),
            takers: takers(stage, &receivers(stage)),
        }
    }
}

/// Ordered passes in a step.
#[derive(Debug)]
pub(super) struct PassGraph {
    pub(super) passes: Vec<Pass>,
    /// Passes on every lane, in order, including fans at shared stages.
    pub(super) lanes: Vec<Vec<u32>>,
    /// Lanes on each rank, shared lanes included.
    pub(super) lanes_of_rank: Vec<Vec<usize>>,
}

/// Stages that send to or receive from a stage, in one direction.
struct Links {
    /// Input senders, each with the number of receivers before this stage.
    senders: Vec<(usize, usize)>,
    /// Number of passes that receive an output.
    takers: usize,
}

/// Passes under construction.
struct Builder<'a> {
    shape: PassShape<'a>,
    passes: Vec<Pass>,
    /// First lane for every stage.
    first_lane: Vec<usize>,
    /// Last pass with nonzero time on every lane; for a rank with several stages, stored at the first stage's
    /// lane.
    last: Vec<u32>,
    /// Links for every stage, forward and backward.
    links: Vec<[Links; 2]>,
    /// First relay pass in each output's fan-out chain, forward and backward, `[lanes * microbatches]`;
    /// consumer `i` reads relay `i`, the last two consumers share a relay.
    outlets: [Vec<u32>; 2],
    lanes: Vec<Vec<u32>>,
}

/// Placeholder for a missing pass, until the number of passes is known.
const NONE: u32 = u32::MAX;

impl PassGraph {
    pub(super) fn new(shape: PassShape<'_>) -> Self {
        let stages = shape.rows.len();
        let mut first_lane = Vec::with_capacity(stages);
        let mut lanes = 0;
        for stage in 0..stages {
            first_lane.push(lanes);
            lanes += shape.stage_lanes(stage);
        }
        let lanes_of_rank = |rank: usize| {
            let lane = |stage: usize| first_lane[stage] + rank.min(shape.stage_lanes(stage) - 1);
            (0..stages).map(lane).collect()
        };
        let lanes_of_rank = (0..shape.ranks).map(lanes_of_rank).collect();
        let outlets = || vec![NONE; lanes * shape.step.slots];
        let links = (0..stages).map(|stage| [0, 1].map(|direction| shape.links(stage, direction))).collect();
        let mut builder = Builder {
            shape,
            passes: Vec::new(),
            last: vec![NONE; lanes],
            links,
            outlets: [outlets(), outlets()],
            lanes: vec![Vec::new(); lanes],
            first_lane,
        };
        for pass in StepOrder::new(&shape.step).passes {
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
    /// Adds a stage's pass on all lanes, with the surrounding fans.
    fn run(&mut self, stage: usize, microbatch: usize, is_backward: bool) {
        let direction = usize::from(is_backward);
        let module = self.shape.rows[stage];
        for rank in 0..self.shape.stage_lanes(stage) {
            let lane = self.first_lane[stage] + rank;
            let input = self.input(stage, rank, microbatch, direction);
            let time = (self.shape.cell(rank, microbatch, module) + direction) as u32;
            let queue = self.first_lane[self.shape.step.first_of_rank(stage)] + rank;
            let before = [self.last[queue], input];
            let at = self.push(Pass { lane, microbatch, time, before, after: [NONE; 2] });
            self.connect(before[0], at, 0);
            self.connect(input, at, 1);
            self.last[queue] = at;
            self.outlets[direction][lane * self.shape.step.slots + microbatch] = at;
        }
        for rank in 0..self.shape.stage_lanes(stage) {
            self.fan_out(stage, self.first_lane[stage] + rank, microbatch, direction);
        }
    }

    /// Returns the pass that sends the last input to a stage's pass; several inputs are joined.
    fn input(&mut self, stage: usize, rank: usize, microbatch: usize, direction: usize) -> u32 {
        let lanes_here = self.shape.stage_lanes(stage);
        let mut joined = NONE;
        for at in 0..self.links[stage][direction].senders.len() {
            let (sender, takers_before) = self.links[stage][direction].senders[at];
            let lanes = self.shape.stage_lanes(sender);
            let own = rank.min(lanes - 1);
            let (first, count) = if lanes_here == 1 { (0, lanes) } else { (own, 1) };
            let taker = takers_before + if self.shape.takers(sender, stage) > 1 { rank } else { 0 };
            let last_fan = self.links[sender][direction].takers.saturating_sub(2);
            for lane in first..first + count {
                let output = (self.first_lane[sender] + lane) * self.shape.step.slots + microbatch;
                let other = self.outlets[direction][output] + taker.min(last_fan) as u32;
                joined =
                    if joined == NONE { other } else { self.join(stage, rank, microbatch, [joined, other]) };
            }
        }
        joined
    }

    /// Adds a pass that waits for two inputs to a stage's pass.
    fn join(&mut self, stage: usize, rank: usize, microbatch: usize, before: [u32; 2]) -> u32 {
        let at = self.push_fan(self.first_lane[stage] + rank, microbatch, before);
        for from in before {
            self.connect(from, at, 1);
        }
        at
    }

    /// Adds zero-time relay passes, so that no pass has more than two receivers.
    fn fan_out(&mut self, stage: usize, lane: usize, microbatch: usize, direction: usize) {
        let output = lane * self.shape.step.slots + microbatch;
        let mut from = self.outlets[direction][output];
        for fan in 1..self.links[stage][direction].takers {
            let at = self.push_fan(lane, microbatch, [NONE, from]);
            self.connect(from, at, 1);
            if fan == 1 {
                self.outlets[direction][output] = at;
            }
            from = at;
        }
    }

    fn push_fan(&mut self, lane: usize, microbatch: usize, before: [u32; 2]) -> u32 {
        let time = self.shape.cells() as u32;
        self.push(Pass { lane, microbatch, time, before, after: [NONE; 2] })
    }

    fn push(&mut self, pass: Pass) -> u32 {
        let at = self.passes.len() as u32;
        self.lanes[pass.lane].push(at);
        self.passes.push(pass);
        at
    }

    /// Connects a receiver to a pass: the lane's next pass as the first receiver, other receivers in any free
    /// place.
    fn connect(&mut self, from: u32, to: u32, edge: usize) {
        let Some(from) = self.passes.get_mut(from as usize) else { return };
        let edge = if from.after[edge] == NONE { edge } else { 1 - edge };
        from.after[edge] = to;
    }
}
