//! Maps module, replica, stage and tensor-parallel coordinates to world ranks.
//!
//! The ranks that share a stage by tensor parallelism are one pipeline rank and run the same passes of it. A
//! message from a pipeline rank of `n` TP ranks goes to TP rank `t` of the receiver from TP rank `t mod n` of
//! the sender: with equal TP sizes ranks communicate pairwise, and no rank receives anything twice. A
//! receiver that is a rank of the sender has the rows already.

use dflop_balancer::planner::Placement;
use dflop_balancer::schedule::{Action, Message};

use super::job::Job;
use super::module_parallelism::ModuleParallelism;
use crate::error::{Error, Result};
use dflop_models::{ModuleKind, StageRange};

/// Role of a world rank in a module: its coordinates and stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRole {
    /// Index of its pipeline rank.
    pub pipeline_rank: usize,
    /// Index among the ranks that share the pipeline rank.
    pub tp_rank: usize,
    /// The module it runs.
    pub module: ModuleKind,
    /// Its replica of the module: its DP rank.
    pub replica: usize,
    /// Its stages, ascending; several if the schedule has several chunks.
    pub stages: Vec<u16>,
}

/// World ranks of all pipeline ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankMap {
    world_size: usize,
    /// World ranks of every pipeline rank, by TP rank.
    members: Vec<Vec<usize>>,
    /// Pipeline ranks of a replica of each module.
    per_replica: Vec<usize>,
}

impl RankMap {
    /// Maps the pipeline ranks of checked modules; in joint placement it sets the encoders' replicas.
    pub(super) fn new(
        placement: Placement,
        modules: &mut [ModuleParallelism],
        chunks: usize,
    ) -> Result<Self> {
        if placement == Placement::Joint {
            check_joint(modules)?;
        }
        let Some((llm, encoders)) = modules.split_last_mut() else {
            return refuse("modules", "expected the LLM".to_owned());
        };
        let ranks_of = |module: &ModuleParallelism| module.stages.len() * module.dp_size * module.tp_size;
        let llm_ranks = ranks_of(llm) / chunks;
        if placement == Placement::Colocated
            && let Some(other) = encoders.iter().find(|encoder| ranks_of(encoder) != llm_ranks)
        {
            let (module, ranks) = (other.module, ranks_of(other));
            return refuse(
                "modules",
                format!(
                    "{module:?} takes {ranks} ranks, expected the LLM's {llm_ranks} in colocated placement"
                ),
            );
        }
        let chain = llm.stages.len();
        let (llm_dp, llm_tp) = (llm.dp_size, llm.tp_size);
        for encoder in encoders.iter_mut().filter(|_| placement == Placement::Joint) {
            encoder.dp_size = llm_dp * llm_tp;
        }
        let (mut members, mut per_replica, mut next) = (Vec::new(), Vec::new(), 0);
        for module in encoders.iter().chain([&*llm]) {
            let is_held = |stage: &usize| !module.stages[*stage].is_empty();
            let held: Vec<usize> = (0..module.stages.len() / chunks).filter(is_held).collect();
            let start = if placement == Placement::Disaggregated { next } else { 0 };
            for replica in 0..module.dp_size {
                for (index, &stage) in held.iter().enumerate() {
                    let first = if placement == Placement::Joint {
                        // A replica of an encoder is one rank of each stage of the chain.
                        let (of_llm, inside) =
                            (replica * module.tp_size / llm_tp, replica * module.tp_size % llm_tp);
                        (of_llm * chain + stage) * llm_tp + inside
                    } else {
                        start + (replica * held.len() + index) * module.tp_size
                    };
                    members.push((first..first + module.tp_size).collect());
                }
            }
            next = start + held.len() * module.dp_size * module.tp_size;
            per_replica.push(held.len());
        }
        let world_size = match placement {
            Placement::Disaggregated => next,
            Placement::Colocated | Placement::Joint => llm_ranks,
        };
        Ok(Self { world_size, members, per_replica })
    }
}

fn refuse<T>(setting: &'static str, reason: String) -> Result<T> {
    Err(Error::InvalidSetting { setting, reason })
}

/// Checks that the modules are one chain of stages, of which none is empty.
fn check_joint(modules: &[ModuleParallelism]) -> Result<()> {
    let Some((llm, encoders)) = modules.split_last() else { return Ok(()) };
    let chain = llm.stages.len();
    let first = llm.stages.iter().position(|layers| !layers.is_empty()).unwrap_or(0);
    for encoder in encoders {
        let (module, replicas) = (encoder.module, llm.dp_size * llm.tp_size);
        if encoder.stages.len() != chain {
            let found = encoder.stages.len();
            return refuse("stages", format!("{module:?} has {found} entries, the LLM {chain}"));
        }
        let last = encoder.stages.iter().rposition(|layers| !layers.is_empty()).unwrap_or(0);
        if last > first {
            return refuse(
                "stages",
                format!("{module:?} ends in stage {last}, after the LLM's first, {first}"),
            );
        }
        if encoder.tp_size != 1 || (encoder.dp_size != 1 && encoder.dp_size != replicas) {
            let (dp, tp) = (encoder.dp_size, encoder.tp_size);
            return refuse(
                "dp_size",
                format!("{module:?} has DP {dp} and TP {tp}, expected {replicas} and 1 in joint placement"),
            );
        }
    }
    let is_empty = |stage: &usize| modules.iter().all(|module| module.stages[*stage].is_empty());
    match (0..chain).find(is_empty) {
        Some(stage) => refuse("stages", format!("stage {stage} has no layer")),
        None => Ok(()),
    }
}

impl Job {
    /// Returns the number of world ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.ranks.world_size
    }

    /// Returns the roles of a world rank, in the order of the modules: one for each module of which it has
    /// layers.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the job has no such rank.
    pub fn roles(&self, world_rank: usize) -> Result<Vec<RankRole>> {
        let world_size = self.world_size();
        if world_rank >= world_size {
            return refuse("world size", format!("expected a rank below {world_size}, found {world_rank}"));
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

    /// Returns the layers of the stages of a role, to build them from.
    #[must_use]
    pub fn ranges(&self, role: &RankRole) -> Vec<StageRange> {
        role.stages.iter().map(|&stage| self.stages[usize::from(stage)].range.clone()).collect()
    }

    /// Returns the number of pipeline ranks of a module.
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

    /// Replaces the peer of a message by its world rank, if its pipeline rank has a single one.
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

    /// Returns the world ranks of pipeline rank `to` that get the rows of `from`, a role of world rank `own`,
    /// from it; `own` itself if it is one of them.
    pub(super) fn targets(&self, own: usize, from: &RankRole, to: usize) -> Vec<usize> {
        let receivers = self.world_ranks(to).iter().enumerate();
        let is_from =
            |(tp_rank, world): (usize, &usize)| self.sender(from.pipeline_rank, *world, tp_rank) == own;
        receivers.filter(|&receiver| is_from(receiver)).map(|(_, &world)| world).collect()
    }

    /// Returns the world rank of pipeline rank `from` that has or sends the rows that `to`, a role of world
    /// rank `own`, takes.
    pub(super) fn source(&self, from: usize, own: usize, to: &RankRole) -> usize {
        self.sender(from, own, to.tp_rank)
    }

    fn sender(&self, from: usize, receiver: usize, tp_rank: usize) -> usize {
        let senders = self.world_ranks(from);
        if senders.contains(&receiver) { receiver } else { senders[tp_rank % senders.len()] }
    }
}
