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
use std::ops::Range;

/// Pass on all lanes of a stage.
#[derive(Debug, Clone, Copy)]
pub struct LanePasses {
    /// Stage, slot and direction.
    pub pass: StagePass,
    /// Index of the first lane's time, see [`StepTimeStarts`].
    pub time: u32,
    /// Number of lanes.
    lanes: u32,
    /// First lane of the rank's first stage: a rank with several stages runs one pass at a time.
    queue: u32,
    /// Output on the first lane.
    output: u32,
    /// Link from the only sender, if it has as many lanes; otherwise the index of the joined inputs.
    input: Result<Link, u32>,
    /// Number of messages for each output.
    messages: u32,
}

/// Link from a stage to a pass.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// Output on the sender's first lane.
    output: u32,
    /// Last message from the first lane.
    sent: u32,
    /// Message time of the first lane.
    hop: u32,
}

/// Link with different numbers of lanes at both ends, or one of several.
#[derive(Debug, Clone, Copy)]
struct JoinedLink {
    link: Link,
    /// Number of lanes at the sender, and in the stage nearer to the input.
    lanes: [u32; 2],
}

/// Order of the times in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepTimeStarts {
    /// Index of the first forward and the first backward time for each stage; times for all slots follow,
    /// `[slots * lanes]`. Stages may share times.
    pub passes: Vec<[usize; 2]>,
    /// Index of the first message time between each stage and the next; times for all slots follow,
    /// `[slots * lanes]`, with the lanes in the stage nearer to the input.
    pub messages: Vec<usize>,
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
    /// - `time`: message time index, see [`StepTimeStarts`]
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
    /// Joined inputs for passes that have several or none.
    joined: Vec<Vec<JoinedLink>>,
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
    /// - `is_shared`: whether all ranks share a stage
    #[must_use]
    pub fn new(
        shape: &StepShape,
        ranks: usize,
        is_shared: impl Fn(usize) -> bool,
        times: &StepTimeStarts,
    ) -> Self {
        let mut first_lanes = vec![0];
        for stage in 0..shape.stages {
            first_lanes.push(first_lanes[stage] + if is_shared(stage) { 1 } else { ranks });
        }
        let lanes = |stage: usize| first_lanes[stage + 1] - first_lanes[stage];
        let neighbors = |stage: usize| {
            let before: Vec<usize> = shape.senders(stage).collect();
            [before, shape.receiver(stage).into_iter().collect()]
        };
        let neighbors: Vec<[Vec<usize>; 2]> = (0..shape.stages).map(neighbors).collect();
        let queues: Vec<usize> =
            (0..shape.stages).map(|stage| first_lanes[shape.first_of_rank(stage)]).collect();
        let all_lanes = first_lanes[shape.stages];
        let mut joined = Vec::new();
        let mut connect = |pass: StagePass| {
            let (stage, slot, direction) =
                (pass.stage as usize, pass.slot as usize, usize::from(!pass.is_forward));
            let own = lanes(stage);
            let output =
                |stage: usize| ((direction * shape.slots + slot) * all_lanes + first_lanes[stage]) as u32;
            let link = |sender: usize| {
                let near = sender.min(stage);
                let sent = (direction * shape.stages + near) * ranks;
                let hop = times.messages[near] + slot * lanes(near);
                let link = Link { output: output(sender), sent: sent as u32, hop: hop as u32 };
                JoinedLink { link, lanes: [lanes(sender) as u32, lanes(near) as u32] }
            };
            let input = match neighbors[stage][direction][..] {
                [sender] if lanes(sender) == own => Ok(link(sender).link),
                ref senders => {
                    joined.push(senders.iter().map(|sender| link(*sender)).collect());
                    Err(joined.len() as u32 - 1)
                }
            };
            let receivers = neighbors[stage][1 - direction].iter();
            let messages: usize = receivers.map(|receiver| if own == 1 { lanes(*receiver) } else { 1 }).sum();
            LanePasses {
                pass,
                time: (times.passes[stage][direction] + slot * own) as u32,
                lanes: own as u32,
                queue: queues[stage] as u32,
                output: output(stage),
                input,
                messages: messages as u32,
            }
        };
        let passes = StepOrder::new(shape).passes.into_iter().map(&mut connect).collect();
        Self { passes, joined, first_lanes, slots: shape.slots, ranks }
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
            self.run(nodes, state, passes);
        }
        &state.last
    }

    /// Runs a pass on all lanes of the stage.
    fn run<N: StepNodes>(&self, nodes: &mut N, state: &mut WalkState<N::Node>, passes: &LanePasses) {
        let (queue, own, lanes) = (passes.queue as usize, passes.output as usize, passes.lanes as usize);
        if passes.pass.slot == 0 && passes.pass.is_forward {
            for (lane, last) in state.last[queue..][..lanes].iter_mut().enumerate() {
                *last = nodes.gather(passes, lane, *last);
            }
        }
        match passes.input {
            // As below; many steps have a single rank.
            Ok(Link { output, sent, hop }) if lanes == 1 => {
                let previous = &mut state.sent[sent as usize];
                let arrival = nodes.send(hop as usize, previous, state.outputs[output as usize]);
                let last = &mut state.last[queue];
                *last = nodes.run(passes, 0, *last, arrival);
                state.outputs[own] = *last;
            }
            Ok(Link { output, sent, hop }) => {
                let (from, hop) = (output as usize, hop as usize);
                let sent = &mut state.sent[sent as usize..][..lanes];
                let last = &mut state.last[queue..][..lanes];
                for (lane, (last, previous)) in last.iter_mut().zip(sent).enumerate() {
                    let arrival = nodes.send(hop + lane, previous, state.outputs[from + lane]);
                    *last = nodes.run(passes, lane, *last, arrival);
                    state.outputs[own + lane] = *last;
                }
            }
            Err(links) => self.run_joined(nodes, state, passes, &self.joined[links as usize]),
        }
        if passes.messages > 1 {
            nodes.announce(passes, &state.outputs[own..][..lanes], passes.messages as usize);
        }
    }

    /// Runs a pass without an input, or whose inputs are sent by several stages or between all ranks and a
    /// single lane.
    fn run_joined<N: StepNodes>(
        &self,
        nodes: &mut N,
        state: &mut WalkState<N::Node>,
        passes: &LanePasses,
        links: &[JoinedLink],
    ) {
        let (queue, own, lanes) = (passes.queue as usize, passes.output as usize, passes.lanes as usize);
        let inputs = &mut state.inputs[..lanes];
        inputs.fill(nodes.start());
        for JoinedLink { link, lanes: [from, near] } in links {
            let [from, near] = [*from as usize, *near as usize];
            let sent = &mut state.sent[link.sent as usize..][..lanes.max(from)];
            for (rank, previous) in sent.iter_mut().enumerate() {
                let output = state.outputs[link.output as usize + rank.min(from - 1)];
                let arrival = nodes.send(link.hop as usize + rank.min(near - 1), previous, output);
                let lane = rank.min(lanes - 1);
                inputs[lane] = nodes.later(passes, lane, [inputs[lane], arrival]);
            }
        }
        let (last, outputs) = (&mut state.last[queue..][..lanes], &mut state.outputs[own..]);
        for (lane, ((output, last), input)) in outputs.iter_mut().zip(last).zip(inputs).enumerate() {
            *last = nodes.run(passes, lane, *last, *input);
            *output = *last;
        }
    }
}
