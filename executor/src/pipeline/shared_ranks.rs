//! Orders the passes of world ranks that several modules share, and adds their messages.
//!
//! - *joint*: a rank runs the chain's schedule. Each of its forward passes is one of every module with layers
//!   in the rank's stage, encoders first; a backward pass is one of every such module, the LLM first.
//! - *colocated*: a rank runs all forward passes of its encoders, the LLM's schedule, and all backward passes
//!   of its encoders.
//!
//! In both, a pass waits only for passes of earlier rounds or of earlier stages of the same round, which come
//! earlier in the lists of their ranks; so lists never deadlock.

use std::collections::BTreeMap;

use dflop_balancer::planner::Placement;
use dflop_balancer::schedule::{Action, Message, Part, Pass, PassKind, PipelineLayout};

use super::job::Job;
use super::rank_map::RankRole;
use super::topology::Topology;
use crate::error::Result;

/// Passes of every world rank, in order.
pub(super) type RankPasses = Vec<Vec<Pass>>;

/// Lists the passes of all world ranks of a job whose modules share ranks.
///
/// - `rounds`: microbatches per DP rank of the LLM
pub(super) fn passes(job: &Job, rounds: usize) -> Result<RankPasses> {
    let chain_stages = match job.placement() {
        Placement::Joint => job.chain_stages.iter().max().map_or(1, |last| last + 1),
        _ => job.llm().stages.len(),
    };
    let layout = PipelineLayout::chain(chain_stages, 1, rounds)?;
    let chain: Vec<Vec<Pass>> = layout
        .schedule(job.schedule())?
        .into_iter()
        .map(|list| list.into_iter().filter_map(Action::pass).collect())
        .collect();
    (0..job.world_size())
        .map(|world| {
            let roles = job.roles(world)?;
            Ok(match job.placement() {
                Placement::Joint => joint(job, &roles, &chain),
                _ => colocated(job, &roles, &chain, rounds),
            })
        })
        .collect()
}

fn joint(job: &Job, roles: &[RankRole], chain: &[Vec<Pass>]) -> Vec<Pass> {
    // All stages of a rank are in the same stage of the chain.
    let Some(&stage) = roles.iter().flat_map(|role| &role.stages).next() else { return Vec::new() };
    let mut passes = Vec::new();
    for pass in &chain[job.chain_stages[usize::from(stage)]] {
        let of_role = |role: &RankRole| of_round(job, role, *pass);
        if pass.kind == PassKind::Forward {
            passes.extend(roles.iter().flat_map(of_role));
        } else {
            passes.extend(roles.iter().rev().flat_map(of_role));
        }
    }
    passes
}

fn colocated(job: &Job, roles: &[RankRole], chain: &[Vec<Pass>], rounds: usize) -> Vec<Pass> {
    let (mut before, mut llm, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for role in roles {
        let module = job.module_index(role.module).unwrap_or(0);
        if module + 1 == job.modules().len() {
            let stage = usize::from(role.stages[0]) - job.first_stage(module);
            llm.extend(chain[stage].iter().flat_map(|pass| of_round(job, role, *pass)));
            continue;
        }
        for round in 0..rounds {
            let pass = |kind| Pass { kind, part: Part { microbatch: round as u32, stage: 0 } };
            before.extend(of_round(job, role, pass(PassKind::Forward)));
            after.extend(of_round(job, role, pass(PassKind::Backward)));
        }
    }
    [before, llm, after].concat()
}

/// Returns the passes of a role's stages for a pass of the chain, whose microbatch is the round.
fn of_round(job: &Job, role: &RankRole, pass: Pass) -> Vec<Pass> {
    let replicas = job.module_index(role.module).map_or(1, |module| job.modules()[module].dp_size);
    let microbatch = pass.part.microbatch * replicas as u32 + role.replica as u32;
    role.stages.iter().map(|&stage| Pass { part: Part { microbatch, stage }, ..pass }).collect()
}

/// Adds messages with other world ranks and the sums of gradients to the passes of a world rank. The peers of
/// messages are pipeline ranks.
pub(super) fn list(
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
        let (from, to) = neighbors(topology, pass);
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

/// Returns the parts that a pass takes rows from, and those that it gives rows to.
pub(super) fn neighbors(topology: &Topology, Pass { kind, part }: Pass) -> (Vec<Part>, Vec<Part>) {
    match kind {
        PassKind::Forward => (topology.upstream_parts(part), topology.downstream_parts(part)),
        PassKind::Backward | PassKind::BackwardInput => {
            (topology.downstream_parts(part), topology.upstream_parts(part))
        }
        PassKind::BackwardWeight => (Vec::new(), Vec::new()),
    }
}

fn receive(pass: Pass, message: Message) -> Action {
    if pass.kind == PassKind::Forward { Action::Recv(message) } else { Action::RecvGrad(message) }
}

fn send(pass: Pass, message: Message) -> Action {
    if pass.kind == PassKind::Forward { Action::Send(message) } else { Action::SendGrad(message) }
}
