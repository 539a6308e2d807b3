//! World rank roles: module, replica, stages and tensor-parallel coordinates.
//!
//! Ranks that share a stage by tensor parallelism are one pipeline rank and run the same passes. A message
//! from a pipeline rank with `n` TP ranks goes from TP rank `t mod n` of the sender to TP rank `t` of the
//! receiver: with equal TP sizes ranks communicate pairwise, and no rank receives anything twice. A receiver
//! that is also a rank of the sender already has the rows.

use dflop_balancer::schedule::{Action, Message};

use super::job::Job;
use crate::error::{Error, Result};
use dflop_models::{ModuleKind, StageRange};

/// World rank role in a module: coordinates and stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRole {
    /// Pipeline rank index.
    pub pipeline_rank: usize,
    /// Index among the ranks that share the pipeline rank.
    pub tp_rank: usize,
    /// Module that the rank runs.
    pub module: ModuleKind,
    /// Module replica: the DP rank.
    pub replica: usize,
    /// Stages, ascending; several if the schedule has several chunks.
    pub stages: Vec<u16>,
}

impl Job {
    /// Returns the number of world ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.ranks.world_size
    }

    /// Returns the roles of a world rank, in module order: one for each module of which it has layers.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the job has no such rank.
    pub fn roles(&self, world_rank: usize) -> Result<Vec<RankRole>> {
        let world_size = self.world_size();
        if world_rank >= world_size {
            let reason = format!("expected a rank below {world_size}, found {world_rank}");
            return Err(Error::InvalidSetting { setting: "world size", reason });
        }
        let tp_rank = |members: &Vec<usize>| members.iter().position(|member| *member == world_rank);
        let own = self.ranks.members.iter().enumerate();
        let own = own.filter_map(|(rank, members)| Some(self.role(rank, tp_rank(members)?)));
        Ok(own.collect())
    }

    fn role(&self, pipeline_rank: usize, tp_rank: usize) -> RankRole {
        let (mut index, mut inside) = (0, pipeline_rank);
        while inside >= self.pipeline_ranks(index) {
            inside -= self.pipeline_ranks(index);
            index += 1;
        }
        let (module, per_replica) = (&self.modules[index], self.ranks.per_replica[index]);
        let first = self.first_stage(index);
        // With several chunks, a rank holds every `per_replica`-th stage, as interleaved schedules expect.
        let held = (first + inside % per_replica..first + module.stages.len()).step_by(per_replica);
        RankRole {
            pipeline_rank,
            tp_rank,
            module: module.module,
            replica: inside / per_replica,
            stages: held.map(|stage| stage as u16).collect(),
        }
    }

    /// Returns whether the stages of a replica are on several ranks: otherwise every rank has all stages, and
    /// none waits for passes on another rank.
    #[must_use]
    pub fn is_pipeline(&self) -> bool {
        let own = self.roles(0).unwrap_or_default();
        own.iter().map(|role| role.stages.len()).sum::<usize>() < self.stages.len()
    }

    /// Returns the layer ranges for the stages of a role, to build them from.
    #[must_use]
    pub fn ranges(&self, role: &RankRole) -> Vec<StageRange> {
        role.stages.iter().map(|&stage| self.stages[usize::from(stage)].range.clone()).collect()
    }

    /// Returns the number of pipeline ranks in a module.
    pub(super) fn pipeline_ranks(&self, module: usize) -> usize {
        self.ranks.per_replica[module] * self.modules[module].dp_size
    }

    /// Returns the world ranks of a pipeline rank, by TP rank.
    ///
    /// # Panics
    /// If there is no such pipeline rank.
    pub(super) fn world_ranks(&self, pipeline_rank: usize) -> &[usize] {
        &self.ranks.members[pipeline_rank]
    }

    /// Replaces the peer of a message by its world rank, if the pipeline rank has a single world rank.
    pub(crate) fn with_world_peer(&self, action: Action) -> Action {
        let world = |message: Message| match self.world_ranks(usize::from(message.peer)) {
            [world] => Message { peer: *world as u16, ..message },
            _ => message,
        };
        match action {
            Action::Recv(message) => Action::Recv(world(message)),
            Action::Send(message) => Action::Send(world(message)),
            Action::RecvGrad(message) => Action::RecvGrad(world(message)),
            Action::SendGrad(message) => Action::SendGrad(world(message)),
            other => other,
        }
    }

    /// Returns the world ranks in pipeline rank `to` that receive rows from world rank `own` in role `from`;
    /// includes `own` itself if it is one of them.
    pub(super) fn targets(&self, own: usize, from: &RankRole, to: usize) -> Vec<usize> {
        let receivers = self.world_ranks(to).iter().enumerate();
        let is_from =
            |(tp_rank, world): (usize, &usize)| self.sender(from.pipeline_rank, *world, tp_rank) == own;
        receivers.filter(|&receiver| is_from(receiver)).map(|(_, &world)| world).collect()
    }

    /// Returns the world rank in pipeline rank `from` that has or sends the rows for world rank `own` in role
    /// `to`.
    pub(super) fn source(&self, from: usize, own: usize, to: &RankRole) -> usize {
        self.sender(from, own, to.tp_rank)
    }

    fn sender(&self, from: usize, receiver: usize, tp_rank: usize) -> usize {
        let senders = self.world_ranks(from);
        if senders.contains(&receiver) { receiver } else { senders[tp_rank % senders.len()] }
    }
}
