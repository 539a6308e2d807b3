//! Walks through a step: passes on every lane and messages between them, each after everything it waits for.
//!
//! A stage has one *lane* per rank, or a single lane if all ranks share the stage: then the forward pass sends
//! to the next stage on every rank, and the backward pass waits for all ranks. The last module's first stage
//! receives the outputs from all parallel encoders. The schedule orders the passes.
//!
//! This is the only place that connects the passes in a step. [`StepNodes`] turns what a walk visits into end
//! times, or into a graph for many evaluations; [`simulate`](crate::simulate) runs action lists instead, and
//! tests compare both.

use super::step_order::StepOrder;
use super::step_shape::StepShape;

/// Pass through a stage on one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LanePass {
    /// Stage index.
    pub stage: usize,
    /// Lane index in the stage.
    pub lane: usize,
    /// Microbatch index on the rank.
    pub slot: usize,
    /// Whether the pass is a forward pass.
    pub is_forward: bool,
}

/// Output of a pass on the way to an adjacent stage; messages on the same link in the same direction travel
/// sequentially.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneMessage {
    /// Stage at the end of the link that is nearer to the input.
    pub stage: usize,
    /// Rank index; 0 between stages with a single lane.
    pub rank: usize,
    /// Microbatch index on the rank.
    pub slot: usize,
}

/// Values that a walk computes.
pub trait StepNodes {
    /// Moment in the step: a time, or the graph node that ends then.
    type Node: Copy;

    /// Returns the start of the step.
    fn start(&self) -> Self::Node;

    /// Returns the later of two inputs to a pass.
    fn later(&mut self, pass: LanePass, inputs: [Self::Node; 2]) -> Self::Node;

    /// Sends a pass output; returns the arrival.
    ///
    /// - `previous`: arrival of the previous message on the link, then of this message
    fn send(&mut self, message: LaneMessage, previous: &mut Self::Node, output: Self::Node) -> Self::Node;

    /// Runs a pass after the previous pass on the rank and the last input; returns the end.
    fn run(&mut self, pass: LanePass, previous: Self::Node, input: Self::Node) -> Self::Node;

    /// Announces the number of messages that a pass output is sent in.
    fn announce(&mut self, pass: LanePass, output: Self::Node, messages: usize);
}

/// Stage in a walk.
#[derive(Debug, Clone)]
struct WalkStage {
    lanes: usize,
    /// Index of the first lane, over all stages.
    first_lane: usize,
    /// First lane of the rank's first stage: a rank with several stages runs one pass at a time.
    queue: usize,
    /// Stages that send an input forward, and backward.
    senders: [Vec<usize>; 2],
    /// Number of messages for an output forward, and backward.
    messages: [usize; 2],
}

/// Connected passes in a step.
#[derive(Debug, Clone)]
pub struct StepWalk {
    order: StepOrder,
    slots: usize,
    ranks: usize,
    stages: Vec<WalkStage>,
}

/// State during a walk; reused between walks to avoid allocation.
#[derive(Debug, Clone, Default)]
pub struct WalkState<T> {
    /// Last pass on every lane; for a rank with several stages, on the first stage's lane.
    last: Vec<T>,
    /// Outputs forward and backward, `[lanes * slots]`: by stage, slot and lane.
    outputs: [Vec<T>; 2],
    /// Last message on every link, forward and backward, `[stages * ranks]`, by the stage nearer to the input.
    sent: [Vec<T>; 2],
}

impl StepWalk {
    /// Connects the passes in a step that [`StepShape::check`] accepts.
    ///
    /// - `is_shared`: whether all ranks share a stage
    #[must_use]
    pub fn new(shape: &StepShape, ranks: usize, is_shared: impl Fn(usize) -> bool) -> Self {
        let lanes = |stage: usize| if is_shared(stage) { 1 } else { ranks };
        let mut first_lanes = vec![0];
        for stage in 0..shape.stages {
            first_lanes.push(first_lanes[stage] + lanes(stage));
        }
        let stage = |stage: usize| {
            let before: Vec<usize> = shape.senders(stage).collect();
            let after: Vec<usize> = shape.receiver(stage).into_iter().collect();
            let messages = |receivers: &[usize]| -> usize {
                receivers.iter().map(|receiver| if lanes(stage) == 1 { lanes(*receiver) } else { 1 }).sum()
            };
            WalkStage {
                lanes: lanes(stage),
                first_lane: first_lanes[stage],
                queue: first_lanes[shape.first_of_rank(stage)],
                messages: [messages(&after), messages(&before)],
                senders: [before, after],
            }
        };
        let stages = (0..shape.stages).map(stage).collect();
        Self { order: StepOrder::new(shape), slots: shape.slots, ranks, stages }
    }

    /// Returns the number of lanes in all stages.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.stages.iter().map(|stage| stage.lanes).sum()
    }

    /// Returns a stage's lanes, as indices over all stages.
    ///
    /// # Panics
    /// If the stage does not exist.
    #[must_use]
    pub fn stage_lanes(&self, stage: usize) -> std::ops::Range<usize> {
        let WalkStage { first_lane, lanes, .. } = self.stages[stage];
        first_lane..first_lane + lanes
    }

    /// Walks through the step; returns the last pass on every lane, where a rank with several stages has all
    /// passes on the first stage's lane.
    pub fn walk<'a, N: StepNodes>(&self, nodes: &mut N, state: &'a mut WalkState<N::Node>) -> &'a [N::Node] {
        let (lanes, links) = (self.lanes(), self.stages.len() * self.ranks);
        let WalkState { last, outputs: [forward, backward], sent: [sent, returned] } = &mut *state;
        let sizes = [
            (last, lanes),
            (forward, lanes * self.slots),
            (backward, lanes * self.slots),
            (sent, links),
            (returned, links),
        ];
        for (own, count) in sizes {
            own.clear();
            own.resize(count, nodes.start());
        }
        for pass in &self.order.passes {
            let (stage, slot, is_forward) = (pass.stage as usize, pass.slot as usize, pass.is_forward);
            self.run(nodes, state, LanePass { stage, lane: 0, slot, is_forward });
        }
        &state.last
    }

    /// Runs a pass on all lanes of its stage.
    fn run<N: StepNodes>(&self, nodes: &mut N, state: &mut WalkState<N::Node>, first: LanePass) {
        let stage = &self.stages[first.stage];
        let direction = usize::from(!first.is_forward);
        let outputs = stage.first_lane * self.slots + first.slot * stage.lanes;
        for lane in 0..stage.lanes {
            let pass = LanePass { lane, ..first };
            let input = self.input(nodes, state, pass);
            let last = &mut state.last[stage.queue + lane];
            *last = nodes.run(pass, *last, input);
            state.outputs[direction][outputs + lane] = *last;
        }
        for lane in 0..stage.lanes {
            let output = state.outputs[direction][outputs + lane];
            nodes.announce(LanePass { lane, ..first }, output, stage.messages[direction]);
        }
    }

    /// Returns the last input to a pass.
    fn input<N: StepNodes>(&self, nodes: &mut N, state: &mut WalkState<N::Node>, pass: LanePass) -> N::Node {
        let stage = &self.stages[pass.stage];
        let direction = usize::from(!pass.is_forward);
        let mut joined = None;
        for &sender in &stage.senders[direction] {
            let from = &self.stages[sender];
            let own = pass.lane.min(from.lanes - 1);
            let senders = if stage.lanes == 1 { 0..from.lanes } else { own..own + 1 };
            let outputs = from.first_lane * self.slots + pass.slot * from.lanes;
            for lane in senders {
                let (link, rank) = (sender.min(pass.stage), lane.max(pass.lane));
                let message = LaneMessage { stage: link, rank, slot: pass.slot };
                let previous = &mut state.sent[direction][link * self.ranks + rank];
                let input = nodes.send(message, previous, state.outputs[direction][outputs + lane]);
                joined = Some(joined.map_or(input, |joined| nodes.later(pass, [joined, input])));
            }
        }
        joined.unwrap_or_else(|| nodes.start())
    }
}
