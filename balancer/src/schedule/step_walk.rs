//! Walks through a step: passes on every lane and messages between them, each after everything it waits for.
//!
//! A stage has one *lane* per rank, or a single lane if all ranks share the stage: then the forward pass sends
//! to the next stage on every rank, and the backward pass waits for all ranks. The last module's first stage
//! receives the outputs from all parallel encoders. The schedule orders the passes.
//!
//! This is the only place that connects the passes in a step. [`StepNodes`] turns what a walk visits into end
//! times, or into a graph for many evaluations; [`simulate`](crate::simulate) runs action lists instead, and
//! tests compare both.

use super::step_order::{StagePass, StepOrder};
use super::step_shape::StepShape;

/// Values that a walk computes.
pub trait StepNodes {
    /// Moment in the step: a time, or the graph node that ends then.
    type Node: Copy;
    /// Passes for a slot on all lanes in a stage.
    type Passes: Copy;
    /// Messages for a slot between a stage and the next.
    type Messages: Copy;

    /// Returns the start of the step.
    fn start(&self) -> Self::Node;

    /// Looks up the passes for a slot.
    fn passes(&self, pass: StagePass) -> Self::Passes;

    /// Looks up the messages for a slot, between a stage and the next.
    fn messages(&self, stage: usize, slot: usize) -> Self::Messages;

    /// Returns the later of two inputs to a pass; the second if the first is the start.
    fn later(&mut self, passes: Self::Passes, lane: usize, inputs: [Self::Node; 2]) -> Self::Node;

    /// Sends a pass output; returns the arrival.
    ///
    /// - `rank`: rank at either end; 0 between stages with a single lane
    /// - `previous`: arrival of the previous message on the link in the same direction, then of this message
    fn send(
        &mut self,
        messages: Self::Messages,
        rank: usize,
        previous: &mut Self::Node,
        output: Self::Node,
    ) -> Self::Node;

    /// Runs a pass after the previous pass on the rank and the last input; returns the end.
    fn run(
        &mut self,
        passes: Self::Passes,
        lane: usize,
        previous: Self::Node,
        input: Self::Node,
    ) -> Self::Node;

    /// Announces the number of messages that each pass output is sent in, before the first is sent.
    fn announce(&mut self, passes: Self::Passes, outputs: &[Self::Node], messages: usize);
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
    /// Last inputs to the present pass, `[ranks]`.
    inputs: Vec<T>,
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
        let (lanes, links, start) = (self.lanes(), self.stages.len() * self.ranks, nodes.start());
        for (own, count) in
            [(&mut state.last, lanes)].into_iter().chain(state.sent.each_mut().map(|own| (own, links)))
        {
            own.clear();
            own.resize(count, start);
        }
        // Every output and input is written before it is read.
        state.inputs.resize(self.ranks, start);
        for own in &mut state.outputs {
            own.resize(lanes * self.slots, start);
        }
        for pass in &self.order.passes {
            self.run(nodes, state, *pass);
        }
        &state.last
    }

    /// Runs a pass on all lanes of the stage.
    fn run<N: StepNodes>(&self, nodes: &mut N, state: &mut WalkState<N::Node>, pass: StagePass) {
        let (stage, slot) = (pass.stage as usize, pass.slot as usize);
        let own = &self.stages[stage];
        let (passes, direction) = (nodes.passes(pass), usize::from(!pass.is_forward));
        let inputs = &mut state.inputs[..own.lanes];
        inputs.fill(nodes.start());
        for &sender in &own.senders[direction] {
            let (link, from) = (sender.min(stage), &self.stages[sender]);
            let messages = nodes.messages(link, slot);
            let outputs =
                &state.outputs[direction][from.first_lane * self.slots + slot * from.lanes..][..from.lanes];
            let sent = &mut state.sent[direction][link * self.ranks..];
            for (rank, previous) in sent[..own.lanes.max(from.lanes)].iter_mut().enumerate() {
                let output = outputs[rank.min(from.lanes - 1)];
                let lane = rank.min(own.lanes - 1);
                let arrival = nodes.send(messages, rank, previous, output);
                inputs[lane] = nodes.later(passes, lane, [inputs[lane], arrival]);
            }
        }
        let outputs =
            &mut state.outputs[direction][own.first_lane * self.slots + slot * own.lanes..][..own.lanes];
        let last = &mut state.last[own.queue..][..own.lanes];
        for (lane, ((output, last), input)) in outputs.iter_mut().zip(last).zip(inputs).enumerate() {
            *last = nodes.run(passes, lane, *last, *input);
            *output = *last;
        }
        nodes.announce(passes, outputs, own.messages[direction]);
    }
}
