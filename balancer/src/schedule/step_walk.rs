//! Walks through a step: passes on every lane and messages between them, each after everything it waits for.
//!
//! A stage has one *lane* per rank, or a single lane if all ranks share the stage: then the forward pass
//! sends to the next stage on every rank, and the backward pass waits for all ranks. The last module's first
//! stage receives the outputs from all parallel encoders. The schedule orders the passes.
//!
//! This is the only place that connects the passes in a step. [`StepNodes`] turns what a walk visits into end
//! times, or into a graph for many evaluations; [`simulate`](crate::simulate) runs action lists instead, and
//! tests compare both.

use super::step_order::{StagePass, StepOrder};
use super::step_shape::StepShape;
use std::ops::Range;

/// Lanes in a step, and the order of its times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepLanes {
    /// Number of ranks.
    pub ranks: usize,
    /// All stages.
    pub stages: Vec<StageLanes>,
}

/// Lanes in a stage, and the first indices of its times; the times for all slots follow, `[slots * lanes]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageLanes {
    /// Number of lanes: 1 or the number of ranks.
    pub lanes: usize,
    /// First forward and first backward time; stages may share times.
    pub passes: [usize; 2],
    /// First time of a message to the next stage, or back.
    pub messages: usize,
}

/// Pass on all lanes of a stage.
#[derive(Debug, Clone)]
pub struct LanePasses {
    /// Stage, slot and direction.
    pub pass: StagePass,
    /// Index of the first lane's time.
    pub time: u32,
    lanes: u32,
    /// First lane of the rank's first stage: a rank with several stages runs one pass at a time.
    queue: u32,
    /// Index of the first lane's output.
    output: u32,
    /// Number of messages for each output.
    messages: u32,
    inputs: Inputs,
}

/// Links to a pass.
#[derive(Debug, Clone)]
enum Inputs {
    /// Every lane has one sender.
    Lanes(Link),
    /// There are several senders or none, or one end of the link has a single lane.
    Joined(Vec<Link>),
}

/// Link from a stage to a pass.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// Number of lanes at the sender.
    lanes: u32,
    /// Index of the output on the sender's first lane.
    output: u32,
    /// Index of the last message on the first lane.
    sent: u32,
    /// Index of the first lane's message time, and the number of times.
    time: u32,
    times: u32,
}

/// Values that a walk computes.
pub trait StepNodes {
    /// Moment in the step: a time, or the graph node that ends then.
    type Node: Copy;

    /// Returns the start of the step.
    fn start(&self) -> Self::Node;

    /// Returns the later of two inputs to a pass; the second if the first is the start.
    fn later(&mut self, passes: &LanePasses, lane: usize, inputs: [Self::Node; 2]) -> Self::Node;

    /// Sends a pass output; returns the arrival.
    ///
    /// - `time`: message time index
    /// - `previous`: arrival of the previous message on the link in the same direction, then of this message
    fn send(&mut self, time: usize, previous: &mut Self::Node, output: Self::Node) -> Self::Node;

    /// Runs a pass after the previous pass on the rank and the last input; returns the end.
    fn run(
        &mut self,
        passes: &LanePasses,
        lane: usize,
        previous: Self::Node,
        input: Self::Node,
    ) -> Self::Node;

    /// Gathers the weights for the first pass in a stage, after the previous pass on the rank; returns when
    /// the pass may start.
    fn gather(&mut self, passes: &LanePasses, lane: usize, previous: Self::Node) -> Self::Node;

    /// Announces that each pass output is sent in several messages, before the first is sent.
    fn announce(&mut self, passes: &LanePasses, outputs: &[Self::Node], messages: usize);
}

/// Connected passes in a step.
#[derive(Debug, Clone)]
pub struct StepWalk {
    /// Passes, each after all inputs.
    passes: Vec<LanePasses>,
    /// First lane in each stage, then the number of lanes.
    first_lanes: Vec<usize>,
    slots: usize,
    ranks: usize,
}

/// State during a walk; reused between walks to avoid allocation.
#[derive(Debug, Clone, Default)]
pub struct WalkState<T> {
    /// Last pass on every lane; for a rank with several stages, on the first stage's lane.
    last: Vec<T>,
    /// Last inputs to the present pass, `[ranks]`.
    inputs: Vec<T>,
    /// Outputs, `[2 * slots * lanes]`.
    outputs: Vec<T>,
    /// Last message on every link, `[2 * stages * ranks]`, by the stage nearer to the input.
    sent: Vec<T>,
}

impl StepWalk {
    /// Connects the passes in a step that [`StepShape::check`] accepts.
    ///
    /// # Panics
    /// If there are fewer lanes than stages.
    #[must_use]
    pub fn new(shape: &StepShape, lanes: &StepLanes) -> Self {
        let mut first_lanes = vec![0];
        for stage in 0..shape.stages {
            first_lanes.push(first_lanes[stage] + lanes.stages[stage].lanes);
        }
        let neighbors = |stage: usize| {
            let before: Vec<usize> = shape.senders(stage).collect();
            [before, shape.receiver(stage).into_iter().collect()]
        };
        let neighbors: Vec<[Vec<usize>; 2]> = (0..shape.stages).map(neighbors).collect();
        let connect = |pass: StagePass| {
            let (stage, slot) = (pass.stage as usize, pass.slot as usize);
            let (direction, own) = (usize::from(!pass.is_forward), &lanes.stages[stage]);
            let row = (direction * shape.slots + slot) * first_lanes[shape.stages];
            let link = |sender: &usize| {
                let near = stage.min(*sender);
                let StageLanes { lanes: times, messages, .. } = lanes.stages[near];
                Link {
                    lanes: lanes.stages[*sender].lanes as u32,
                    output: (row + first_lanes[*sender]) as u32,
                    sent: ((direction * shape.stages + near) * lanes.ranks) as u32,
                    time: (messages + slot * times) as u32,
                    times: times as u32,
                }
            };
            let inputs = match neighbors[stage][direction][..] {
                [sender] if lanes.stages[sender].lanes == own.lanes => Inputs::Lanes(link(&sender)),
                ref senders => Inputs::Joined(senders.iter().map(link).collect()),
            };
            let receivers = neighbors[stage][1 - direction].iter();
            let messages =
                receivers.map(|to| if own.lanes == 1 { lanes.stages[*to].lanes as u32 } else { 1 });
            LanePasses {
                pass,
                time: (own.passes[direction] + slot * own.lanes) as u32,
                lanes: own.lanes as u32,
                queue: first_lanes[shape.first_of_rank(stage)] as u32,
                output: (row + first_lanes[stage]) as u32,
                messages: messages.sum(),
                inputs,
            }
        };
        let passes = StepOrder::new(shape).passes.into_iter().map(connect).collect();
        Self { passes, first_lanes, slots: shape.slots, ranks: lanes.ranks }
    }

    /// Returns a stage's lanes, as indices over all stages.
    ///
    /// # Panics
    /// If the stage does not exist.
    #[must_use]
    pub fn stage_lanes(&self, stage: usize) -> Range<usize> {
        self.first_lanes[stage]..self.first_lanes[stage + 1]
    }

    /// Walks through the step; returns the last pass on every lane, where a rank with several stages has all
    /// passes on the first stage's lane.
    pub fn walk<'a, N: StepNodes>(&self, nodes: &mut N, state: &'a mut WalkState<N::Node>) -> &'a [N::Node] {
        let (stages, start) = (self.first_lanes.len() - 1, nodes.start());
        let lanes = self.first_lanes[stages];
        for (own, count) in [(&mut state.last, lanes), (&mut state.sent, 2 * stages * self.ranks)] {
            own.clear();
            own.resize(count, start);
        }
        // Every output and input is written before it is read.
        state.inputs.resize(self.ranks, start);
        state.outputs.resize(2 * self.slots * lanes, start);
        for passes in &self.passes {
            Self::run(nodes, state, passes);
        }
        &state.last
    }

    /// Runs a pass on all lanes of the stage.
    fn run<N: StepNodes>(nodes: &mut N, state: &mut WalkState<N::Node>, passes: &LanePasses) {
        let [lanes, queue, own] = [passes.lanes, passes.queue, passes.output].map(|index| index as usize);
        let WalkState { last, inputs, outputs, sent } = state;
        let last = &mut last[queue..][..lanes];
        if passes.pass.slot == 0 && passes.pass.is_forward {
            for (lane, last) in last.iter_mut().enumerate() {
                *last = nodes.gather(passes, lane, *last);
            }
        }
        match &passes.inputs {
            Inputs::Lanes(link) => {
                let [from, first, time] = [link.output, link.sent, link.time].map(|index| index as usize);
                if lanes == 1 {
                    // As below, for the many steps with a single rank.
                    let arrival = nodes.send(time, &mut sent[first], outputs[from]);
                    last[0] = nodes.run(passes, 0, last[0], arrival);
                    outputs[own] = last[0];
                } else {
                    let ends = last.iter_mut().zip(&mut sent[first..][..lanes]);
                    for (lane, (last, previous)) in ends.enumerate() {
                        let arrival = nodes.send(time + lane, previous, outputs[from + lane]);
                        *last = nodes.run(passes, lane, *last, arrival);
                        outputs[own + lane] = *last;
                    }
                }
            }
            Inputs::Joined(links) => {
                inputs.fill(nodes.start());
                for link in links {
                    let [from, first, time] = [link.output, link.sent, link.time].map(|index| index as usize);
                    let sent = &mut sent[first..][..lanes.max(link.lanes as usize)];
                    // An end with a single lane is the same for all ranks.
                    let [receiver, sender, timed] =
                        [lanes, link.lanes as usize, link.times as usize].map(|lanes| usize::from(lanes > 1));
                    for (rank, previous) in sent.iter_mut().enumerate() {
                        let output = outputs[from + rank * sender];
                        let arrival = nodes.send(time + rank * timed, previous, output);
                        let input = &mut inputs[rank * receiver];
                        *input = nodes.later(passes, rank * receiver, [*input, arrival]);
                    }
                }
                for (lane, (last, input)) in last.iter_mut().zip(inputs).enumerate() {
                    *last = nodes.run(passes, lane, *last, *input);
                    outputs[own + lane] = *last;
                }
            }
        }
        if passes.messages > 1 {
            nodes.announce(passes, &outputs[own..][..lanes], passes.messages as usize);
        }
    }
}
