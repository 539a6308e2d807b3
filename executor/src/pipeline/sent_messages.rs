//! Lists the messages that world ranks send in a step, in send order.

use dflop_balancer::schedule::{Action, Pass, PassKind};

use super::action_list::action_lists;
use super::job::Job;
use super::rank_roles::RankRole;
use super::stage_edge::{Flow, StageEdge, part_role};
use super::topology::Topology;
use crate::error::Result;

/// Step message, as listed by the sender.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentMessage {
    /// World rank that sends.
    pub(super) from: usize,
    /// World rank that receives.
    pub(super) to: usize,
    pub(super) flow: Flow,
    pub(super) edge: StageEdge,
}

/// Lists messages from world ranks, by rank in send order, including rows that a rank passes on to itself.
pub(super) fn sent_messages(job: &Job, topology: &Topology, senders: &[usize]) -> Result<Vec<SentMessage>> {
    let mut messages = Vec::new();
    for (&from, list) in senders.iter().zip(action_lists(job, topology, senders)?) {
        let roles = job.roles(from)?;
        for pass in list.into_iter().filter_map(Action::pass) {
            messages.extend(pass_messages(job, topology, (from, &roles), pass)?);
        }
    }
    Ok(messages)
}

/// Lists the messages of a pass of a world rank, with its roles, in the order in which it sends them.
pub(super) fn pass_messages(
    job: &Job,
    topology: &Topology,
    (from, roles): (usize, &[RankRole]),
    pass: Pass,
) -> Result<Vec<SentMessage>> {
    let flow = match pass.kind {
        PassKind::Forward => Flow::Activations,
        PassKind::Backward | PassKind::BackwardInput => Flow::Gradients,
        PassKind::BackwardWeight => return Ok(Vec::new()),
    };
    let (role, mut messages) = (part_role(roles, pass.part)?, Vec::new());
    for edge in StageEdge::for_part(topology, flow, pass.part, true) {
        let receivers = job.targets(from, role, topology.rank(edge.other(pass.part)));
        messages.extend(receivers.into_iter().map(|to| SentMessage { from, to, flow, edge }));
    }
    Ok(messages)
}
