//! Pass graph for a step: a single pipeline, or several pipelines coupled by a shared module.
//!
//! A [`StepWalk`] connects the passes; messages take no time. So that every pass has at most two inputs and
//! two receivers, fans are chains of zero-time passes.

use crate::schedule::{LanePasses, StageLanes, StepLanes, StepNodes, StepShape, StepWalk, WalkState};

/// Pass, listed after all inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass {
    pub(crate) microbatch: usize,
    /// Index into the times.
    pub(crate) time: u32,
    /// Previous pass on the rank's lanes and the pass that sends the input, or the number of passes.
    pub(crate) before: [u32; 2],
    /// Next pass on the rank's lanes and the pass that receives the output, or the number of passes; for a
    /// fan, both receivers.
    pub(crate) after: [u32; 2],
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
}

/// Ordered passes in a step.
#[derive(Debug)]
pub(crate) struct PassGraph {
    pub(crate) passes: Vec<Pass>,
    /// Passes on every lane, in order, including fans at shared stages.
    pub(super) lanes: Vec<Vec<u32>>,
    /// Lanes on each rank, shared lanes included.
    pub(super) lanes_of_rank: Vec<Vec<usize>>,
}

/// Passes under construction.
struct Builder<'a> {
    shape: PassShape<'a>,
    walk: &'a StepWalk,
    passes: Vec<Pass>,
    /// Relays that the next and the last receiver of a pass output read; the pass itself without relays.
    outlets: Vec<[u32; 2]>,
    lanes: Vec<Vec<u32>>,
}

/// Placeholder for a missing pass, until the number of passes is known.
const NONE: u32 = u32::MAX;

impl PassGraph {
    pub(crate) fn new(shape: PassShape<'_>) -> Self {
        let ranks = shape.ranks;
        // Passes are timed by cell, and messages take no time.
        let stage = |module: &usize| {
            let lanes = if shape.is_shared[*module] { 1 } else { ranks };
            StageLanes { lanes, passes: [0; 2], messages: 0 }
        };
        let stages: Vec<StageLanes> = shape.rows.iter().map(stage).collect();
        let count = stages.len();
        let walk = StepWalk::new(&shape.step, &StepLanes { ranks, stages });
        let lanes_of_rank = |rank: usize| {
            let lane = |stage: usize| {
                let lanes = walk.stage_lanes(stage);
                lanes.start + rank.min(lanes.len() - 1)
            };
            (0..count).map(lane).collect()
        };
        let lanes_of_rank = (0..ranks).map(lanes_of_rank).collect();
        let lanes = vec![Vec::new(); walk.stage_lanes(count - 1).end];
        let mut builder = Builder { shape, walk: &walk, passes: Vec::new(), outlets: Vec::new(), lanes };
        walk.walk(&mut builder, &mut WalkState::default());
        let Builder { mut passes, lanes, .. } = builder;
        let nothing = passes.len() as u32;
        for edge in passes.iter_mut().flat_map(|pass| pass.before.iter_mut().chain(&mut pass.after)) {
            *edge = (*edge).min(nothing);
        }
        Self { passes, lanes, lanes_of_rank }
    }
}

impl StepNodes for Builder<'_> {
    /// Index of a pass.
    type Node = u32;

    fn start(&self) -> u32 {
        NONE
    }

    fn later(&mut self, passes: &LanePasses, lane: usize, inputs: [u32; 2]) -> u32 {
        if inputs[0] == NONE {
            return inputs[1];
        }
        let at = self.push_fan(passes, lane, inputs);
        for input in inputs {
            self.connect(input, at, 1);
        }
        at
    }

    /// Returns the relay for the next receiver; the last two receivers share a relay.
    fn send(&mut self, _: usize, _: &mut u32, output: u32) -> u32 {
        let [next, last] = &mut self.outlets[output as usize];
        let outlet = *next;
        *next = (outlet + 1).min(*last);
        outlet
    }

    fn run(&mut self, passes: &LanePasses, lane: usize, previous: u32, input: u32) -> u32 {
        let module = self.shape.rows[passes.pass.stage as usize];
        let time =
            self.shape.cell(lane, passes.pass.slot as usize, module) + usize::from(!passes.pass.is_forward);
        let at = self.push(passes, lane, time, [previous, input]);
        self.connect(previous, at, 0);
        self.connect(input, at, 1);
        at
    }

    fn gather(&mut self, _: &LanePasses, _: usize, previous: u32) -> u32 {
        previous
    }

    /// Adds zero-time relay passes, so that no pass has more than two receivers.
    fn announce(&mut self, passes: &LanePasses, outputs: &[u32], messages: usize) {
        for (lane, &output) in outputs.iter().enumerate() {
            let first = self.passes.len() as u32;
            let mut from = output;
            for _ in 1..messages {
                let at = self.push_fan(passes, lane, [NONE, from]);
                self.connect(from, at, 1);
                from = at;
            }
            self.outlets[output as usize] = [first.min(from), from];
        }
    }
}

impl Builder<'_> {
    fn push_fan(&mut self, passes: &LanePasses, lane: usize, before: [u32; 2]) -> u32 {
        self.push(passes, lane, self.shape.cells(), before)
    }

    fn push(&mut self, passes: &LanePasses, lane: usize, time: usize, before: [u32; 2]) -> u32 {
        let at = self.passes.len() as u32;
        self.lanes[self.walk.stage_lanes(passes.pass.stage as usize).start + lane].push(at);
        self.outlets.push([at; 2]);
        let (microbatch, time) = (passes.pass.slot as usize, time as u32);
        self.passes.push(Pass { microbatch, time, before, after: [NONE; 2] });
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
