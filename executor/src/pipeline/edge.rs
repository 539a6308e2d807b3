//! What goes from one part to another: who, how many rows, whether at all.

use dflop_balancer::schedule::{Action, Part};

use super::job::Job;
use super::ranks::Place;
use super::route::{End, RoutePlan};
use super::topology::Topology;
use super::work::{StepWork, tokens};
use crate::comm::{Comm, StepContext};
use crate::device::Device;
use crate::error::Result;
use crate::model::model_config::ModuleKind;

/// Which way rows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Flow {
    /// Towards the loss.
    Activations,
    /// Away from it.
    Gradients,
}

/// A part and one that takes its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Edge {
    pub(super) giver: Part,
    pub(super) taker: Part,
}

/// An action that sends or receives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    pub(super) flow: Flow,
    pub(super) is_send: bool,
    pub(super) edge: Edge,
    /// Pipeline rank at the other end.
    pub(super) peer: usize,
}

/// What a rank knows while it runs a step.
pub(super) struct View<'a, D: Device> {
    pub(super) job: &'a Job,
    pub(super) topology: &'a Topology,
    pub(super) place: &'a Place,
    pub(super) comm: &'a dyn Comm,
    pub(super) work: &'a StepWork<D>,
}

impl Edge {
    /// Tells messages between two ranks apart; both ends know it.
    pub(super) fn tag(self, flow: Flow) -> u64 {
        let flow = u64::from(flow == Flow::Gradients);
        u64::from(self.taker.microbatch) << 32 | u64::from(self.giver.stage) << 1 | flow
    }
}

impl<D: Device> View<'_, D> {
    pub(super) fn module(&self, part: Part) -> ModuleKind {
        self.job.stages[usize::from(part.stage)].range.module
    }

    /// Whether there is anything to compute; all stages of a replica agree.
    pub(super) fn is_active(&self, part: Part) -> bool {
        let module = self.module(part);
        let has_rows = || self.work.contexts.get(&part.microbatch).is_some_and(|own| own.layers.rows > 0);
        tokens(&self.work.plan, self.job, module, part.microbatch) > 0 && has_rows()
    }

    /// The parts that a part hands rows to (`is_out`) or takes them from.
    pub(super) fn edges(&self, flow: Flow, part: Part, is_out: bool) -> Vec<Edge> {
        if (flow == Flow::Activations) == is_out {
            self.topology.takers(part).into_iter().map(|taker| Edge { giver: part, taker }).collect()
        } else {
            self.topology.givers(part).into_iter().map(|giver| Edge { giver, taker: part }).collect()
        }
    }

    /// Whether the edge leads from an encoder to the LLM.
    pub(super) fn is_routed(&self, edge: Edge) -> bool {
        self.module(edge.giver) != self.module(edge.taker)
    }

    /// Columns of the rows.
    pub(super) fn width(&self, edge: Edge) -> usize {
        self.job.stages[usize::from(edge.giver.stage)].output_width
    }

    /// The message that both ends of a routed edge know.
    pub(super) fn route(&self, edge: Edge) -> (&RoutePlan, [u32; 2]) {
        let module = self.job.stages[usize::from(edge.giver.stage)].module;
        (self.work.plan.route_of(module), [edge.giver.microbatch, edge.taker.microbatch])
    }

    /// Rows that go over an edge; none at all where there is nothing trained behind a gradient.
    pub(super) fn rows(&self, flow: Flow, edge: Edge) -> Result<usize> {
        if flow == Flow::Gradients && !self.job.stages[usize::from(edge.giver.stage)].has_backward {
            return Ok(0);
        }
        if self.is_routed(edge) {
            let (route, [source, destination]) = self.route(edge);
            return Ok(route.tokens_between(source, destination));
        }
        if !self.is_active(edge.giver) {
            return Ok(0);
        }
        let context = self.work.context(self.module(edge.giver), edge.giver.microbatch)?;
        Ok(context.layers.rows)
    }

    /// The end of a route at which a part stands.
    pub(super) fn end(&self, part: Part) -> End {
        if self.module(part) == ModuleKind::Llm { End::Destination } else { End::Source }
    }

    /// What an action sends or receives.
    pub(super) fn transfer(&self, action: Action) -> Option<Transfer> {
        let (flow, is_send, message) = match action {
            Action::Recv(message) => (Flow::Activations, false, message),
            Action::Send(message) => (Flow::Activations, true, message),
            Action::RecvGrad(message) => (Flow::Gradients, false, message),
            Action::SendGrad(message) => (Flow::Gradients, true, message),
            _ => return None,
        };
        let peer = usize::from(message.peer);
        let is_there = |edge: &Edge| {
            let other = if edge.giver == message.part() { edge.taker } else { edge.giver };
            self.topology.rank(other) == peer
        };
        let edge = self.edges(flow, message.part(), is_send).into_iter().find(is_there)?;
        Some(Transfer { flow, is_send, edge, peer })
    }

    /// Where in the step an action is.
    pub(super) fn at(&self, action: Action) -> StepContext {
        let step = self.work.plan.step();
        let (name, part) = match action {
            Action::Recv(message) => ("recv", message.part()),
            Action::Send(message) => ("send", message.part()),
            Action::RecvGrad(message) => ("recv gradient", message.part()),
            Action::SendGrad(message) => ("send gradient", message.part()),
            Action::Forward(part) => ("forward", part),
            Action::Backward(part) | Action::BackwardInput(part) | Action::BackwardWeight(part) => {
                ("backward", part)
            }
            Action::ReduceGrads(stage) => return StepContext::step(step, &format!("reduce stage {stage}")),
        };
        StepContext::microbatch(step, part.microbatch, &format!("{name}, stage {}", part.stage))
    }

    /// Where in the step a message is: the same at both ends but for the name.
    pub(super) fn at_edge(&self, transfer: Transfer) -> StepContext {
        let name = match (transfer.flow, transfer.is_send) {
            (Flow::Activations, true) => "send",
            (Flow::Activations, false) => "recv",
            (Flow::Gradients, true) => "send gradient",
            (Flow::Gradients, false) => "recv gradient",
        };
        let own = if (transfer.flow == Flow::Activations) == transfer.is_send {
            transfer.edge.giver
        } else {
            transfer.edge.taker
        };
        let name = format!("{name}, stage {}", own.stage);
        StepContext::microbatch(self.work.plan.step(), transfer.edge.taker.microbatch, &name)
    }
}
