//! Lists the actions of world ranks: actions from the balancer's schedule, or passes on shared ranks with
//! messages.

use std::collections::BTreeMap;

use dflop_balancer::schedule::{Action, Message, Part, Pass, PassKind};

use super::job::Job;
use super::rank_roles::RankRole;
use super::topology::Topology;
use crate::error::Result;

/// Returns the actions of world ranks.
pub(super) fn action_lists(
    job: &Job,
    topology: &Topology,
    world_ranks: &[usize],
) -> Result<Vec<Vec<Action>>> {
    let roles = world_ranks.iter().map(|&rank| job.roles(rank)).collect::<Result<Vec<_>>>()?;
    let of_ranks = world_ranks.iter().zip(roles);
    if let Some(passes) = topology.shared() {
        let list = |(&rank, roles): (_, Vec<_>)| shared_list(job, topology, &roles, (rank, &passes[rank]));
        return Ok(of_ranks.map(list).collect());
    }
    let (lists, ranks) = (topology.layout().schedule(topology.schedule())?, topology.layout().ranks());
    let list = |(_, roles): (_, Vec<RankRole>)| {
        let pipeline_rank = roles[0].pipeline_rank;
        let actions = lists[pipeline_rank % ranks].iter();
        actions.map(|&action| in_replica(topology, action, pipeline_rank / ranks)).collect()
    };
    Ok(of_ranks.map(list).collect())
}

/// Moves an action to a parallel pipeline.
fn in_replica(topology: &Topology, action: Action, replica: usize) -> Action {
    let message = |message: Message| Message {
        microbatch: topology.outside(message.microbatch, replica),
        peer: (usize::from(message.peer) + replica * topology.layout().ranks()) as u16,
        ..message
    };
    let part = |part: Part| Part { microbatch: topology.outside(part.microbatch, replica), ..part };
    match action {
        _ if topology.replicas() == 1 => action,
        Action::Recv(of) => Action::Recv(message(of)),
        Action::Send(of) => Action::Send(message(of)),
        Action::RecvGrad(of) => Action::RecvGrad(message(of)),
        Action::SendGrad(of) => Action::SendGrad(message(of)),
        Action::Forward(of) => Action::Forward(part(of)),
        Action::Backward(of) => Action::Backward(part(of)),
        Action::BackwardInput(of) => Action::BackwardInput(part(of)),
        Action::BackwardWeight(of) => Action::BackwardWeight(part(of)),
        Action::ReduceGrads(stage) => Action::ReduceGrads(stage),
    }
}

/// Adds messages with other world ranks and gradient sums to the passes of a world rank. Message peers are
/// pipeline ranks.
fn shared_list(
    job: &Job,
    topology: &Topology,
    roles: &[RankRole],
    (world_rank, passes): (usize, &[Pass]),
) -> Vec<Action> {
    let last: BTreeMap<u16, usize> =
        passes.iter().enumerate().map(|(index, pass)| (pass.part.stage, index)).collect();
    let role = |part: Part| roles.iter().find(|role| role.stages.contains(&part.stage));
    let mut actions = Vec::new();
    for (index, &pass) in passes.iter().enumerate() {
        let (part, Some(own)) = (pass.part, role(pass.part)) else { continue };
        let message =
            |peer: usize| Message { microbatch: part.microbatch, stage: part.stage, peer: peer as u16 };
        let (from, to) = topology.neighbors(pass);
        let is_elsewhere = |sender: &usize| job.source(*sender, world_rank, own) != world_rank;
        let senders = from.into_iter().map(|other| topology.rank(other)).filter(is_elsewhere);
        actions.extend(senders.map(|sender| receive(pass, message(sender))));
        actions.push(pass.into());
        let has_others = |receiver: &usize| {
            job.targets(world_rank, own, *receiver).into_iter().any(|target| target != world_rank)
        };
        let receivers = to.into_iter().map(|other| topology.rank(other)).filter(has_others);
        actions.extend(receivers.map(|receiver| send(pass, message(receiver))));
        if last[&part.stage] == index {
            actions.push(Action::ReduceGrads(part.stage));
        }
    }
    actions
}

fn receive(pass: Pass, message: Message) -> Action {
    if pass.kind == PassKind::Forward { Action::Recv(message) } else { Action::RecvGrad(message) }
}

fn send(pass: Pass, message: Message) -> Action {
    if pass.kind == PassKind::Forward { Action::Send(message) } else { Action::SendGrad(message) }
}
