//! Edges between stages, over which activations and gradients go.

use dflop_balancer::schedule::{Action, Part};

use super::rank_roles::RankRole;
use super::topology::Topology;
use crate::error::{Error, Result};

/// Transfer direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Flow {
    /// From a stage to the next stage, towards the loss.
    Activations,
    /// From a stage back to the previous stage.
    Gradients,
}

/// Connection between two parts: a microbatch in a stage and in a stage that receives the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StageEdge {
    pub(super) upstream: Part,
    pub(super) downstream: Part,
}

/// Action that sends or receives.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageTransfer {
    pub(super) flow: Flow,
    pub(super) is_send: bool,
    pub(super) edge: StageEdge,
    /// Pipeline rank at the other end.
    pub(super) peer: usize,
}

impl Flow {
    /// Returns the lowest bit in the message tags.
    pub(super) fn bit(self) -> u64 {
        u64::from(self == Self::Gradients)
    }

    /// Returns the part that receives over an edge.
    pub(super) fn receiver(self, edge: StageEdge) -> Part {
        if self == Self::Activations { edge.downstream } else { edge.upstream }
    }
}

impl StageTransfer {
    /// Returns the transfer of an action; `None` if it sends and receives nothing.
    pub(super) fn of(topology: &Topology, action: Action) -> Option<Self> {
        let (flow, is_send, message) = match action {
            Action::Recv(message) => (Flow::Activations, false, message),
            Action::Send(message) => (Flow::Activations, true, message),
            Action::RecvGrad(message) => (Flow::Gradients, false, message),
            Action::SendGrad(message) => (Flow::Gradients, true, message),
            _ => return None,
        };
        let (peer, own) = (usize::from(message.peer), message.part());
        // A part can have several edges; the one of this message leads to the peer's rank.
        let is_there = |edge: &StageEdge| topology.rank(edge.other(own)) == peer;
        let edge = StageEdge::for_part(topology, flow, own, is_send).into_iter().find(is_there)?;
        Some(Self { flow, is_send, edge, peer })
    }
}

impl StageEdge {
    /// Returns the message tag, which is unique between the same two ranks.
    pub(super) fn tag(self, flow: Flow) -> u64 {
        // Unique between two ranks within a step: receiving microbatch, sending stage, direction.
        u64::from(self.downstream.microbatch) << 32 | u64::from(self.upstream.stage) << 1 | flow.bit()
    }

    /// Returns the edges over which a part sends rows (`is_out`) or receives them.
    pub(super) fn for_part(topology: &Topology, flow: Flow, part: Part, is_out: bool) -> Vec<Self> {
        if (flow == Flow::Activations) == is_out {
            let to = |downstream| Self { upstream: part, downstream };
            topology.downstream_parts(part).into_iter().map(to).collect()
        } else {
            let from = |upstream| Self { upstream, downstream: part };
            topology.upstream_parts(part).into_iter().map(from).collect()
        }
    }

    /// Returns the part at the other end.
    pub(super) fn other(self, part: Part) -> Part {
        if self.upstream == part { self.downstream } else { self.upstream }
    }
}

/// Returns the role in which a rank runs a part.
pub(super) fn part_role(roles: &[RankRole], part: Part) -> Result<&RankRole> {
    let role = roles.iter().find(|role| role.stages.contains(&part.stage));
    role.ok_or_else(|| missing(part.stage))
}

/// Returns the error for a stage that this rank does not have.
pub(super) fn missing(stage: u16) -> Error {
    Error::InvalidSetting { setting: "stages", reason: format!("this rank lacks stage {stage}") }
}
