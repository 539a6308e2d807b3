//! Orders passes on world ranks that several modules share.
//!
//! - *joint*: a rank runs the schedule of the chain. Each forward pass consists of a pass for every module
//!   with layers in the stage of the rank, encoders first; a backward pass consists of a pass for every such
//!   module, the LLM first.
//! - *colocated*: a rank runs all encoder forward passes, the LLM's schedule, and all encoder backward
//!   passes.
//!
//! In both placements, a pass waits only for passes in earlier rounds or in earlier stages of the same round,
//! which come earlier in the lists of their ranks; so lists never deadlock.

use dflop_balancer::schedule::{Action, Part, Pass, PassKind, PipelineLayout};
use dflop_planner::Placement;

use super::job::Job;
use super::rank_roles::RankRole;
use crate::error::Result;

/// Passes on every world rank, in order.
pub(super) type RankPasses = Vec<Vec<Pass>>;

/// Lists the passes on all world ranks in a job whose modules share ranks.
///
/// - `rounds`: number of microbatches per LLM DP rank
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
    // All stages on a rank are in the same chain stage.
    let Some(&stage) = roles.iter().flat_map(|role| &role.stages).next() else { return Vec::new() };
    let mut passes = Vec::new();
    for pass in &chain[job.chain_stages[usize::from(stage)]] {
        let of_role = |role: &RankRole| round_passes(job, role, *pass);
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
            llm.extend(chain[stage].iter().flat_map(|pass| round_passes(job, role, *pass)));
            continue;
        }
        for round in 0..rounds {
            let pass = |kind| Pass { kind, part: Part { microbatch: round as u32, stage: 0 } };
            before.extend(round_passes(job, role, pass(PassKind::Forward)));
            after.extend(round_passes(job, role, pass(PassKind::Backward)));
        }
    }
    [before, llm, after].concat()
}

/// Returns the passes in the stages of a role for a chain pass, whose microbatch is the round.
fn round_passes(job: &Job, role: &RankRole, pass: Pass) -> Vec<Pass> {
    let replicas = job.module_index(role.module).map_or(1, |module| job.modules()[module].dp_size);
    let microbatch = pass.part.microbatch * replicas as u32 + role.replica as u32;
    role.stages.iter().map(|&stage| Pass { part: Part { microbatch, stage }, ..pass }).collect()
}
