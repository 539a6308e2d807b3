//! Roles of world ranks, edges between stages, and passes on ranks that several modules share.
//!
//! Ranks that share a stage by tensor parallelism are one pipeline rank and run the same passes. A message
//! from a pipeline rank with `n` TP ranks goes from TP rank `t mod n` of the sender to TP rank `t` of the
//! receiver: with equal TP sizes ranks communicate pairwise, and no rank receives anything twice. A receiver
//! that is also a rank of the sender already has the rows.
//!
//! - *joint*: a rank runs the schedule of the chain. Each forward pass consists of a pass for every module
//!   with layers in the stage of the rank, encoders first; a backward pass consists of a pass for every such
//!   module, the LLM first.
//! - *colocated*: a rank runs all encoder forward passes, the LLM's schedule, and all encoder backward
//!   passes. Its LLM stages may be several chunks.
//!
//! In both placements, a pass waits only for passes in earlier rounds or in earlier stages of the same round,
//! which come earlier in the lists of their ranks; so lists never deadlock.

use dflop_balancer::schedule::{
    Action, Message, ModuleStages, Part, Pass, PassKind, PipelineLayout, ScheduleKind,
};
use dflop_models::ModuleKind;
use dflop_planner::Placement;

use super::layout::{JobLayout, ModuleParallelism};
use crate::error::{Error, Result};

/// Step parts, the ranks that run them, and the parts they receive activations from.
///
/// The layout for a schedule with chunks but without encoders is a single pipeline; replicas are added here.
/// Microbatch `k` on replica `d` out of `D` is `k * D + d`, as in jobs with encoders.
pub(super) struct Topology {
    layout: PipelineLayout,
    /// Number of parallel pipelines; 1 if the layout covers the complete job.
    replicas: usize,
    schedule: ScheduleKind,
    /// Passes on every world rank, if modules share ranks.
    shared: Option<RankPasses>,
    /// Media pools for every encoder, and replicas that share each pool.
    pools: Vec<(usize, usize)>,
}

impl Topology {
    /// - `microbatches`: number of microbatches per LLM DP rank
    pub(super) fn new(job: &JobLayout, microbatches: usize) -> Result<Self> {
        let (schedule, llm) = (job.schedule, job.llm());
        let chunks = schedule.chunks();
        if matches!(schedule, ScheduleKind::Interleaved { .. }) && job.modules.len() == 1 {
            let layout = PipelineLayout::chain(llm.stages.len() / chunks, chunks, microbatches)?;
            let replicas = llm.dp_size;
            return Ok(Self { layout, replicas, schedule, shared: None, pools: Vec::new() });
        }
        // Each encoder feeds the LLM, the last module; encoder replicas share a round's media, unless each
        // belongs to an LLM replica. Shared rounds connect all replicas; `is_linked` leaves out replicas in
        // other pools.
        let last = job.modules.len() - 1;
        let stages = |(index, module): (usize, &ModuleParallelism)| {
            let stages = ModuleStages::new(module.stages.len(), module.dp_size);
            match index {
                index if index == last => stages.chunks(chunks),
                index if !job.is_paired(index) => stages.share_rounds().feeds(last),
                _ => stages.feeds(last),
            }
        };
        let modules: Vec<ModuleStages> = job.modules.iter().enumerate().map(stages).collect();
        let layout = PipelineLayout::from_modules(&modules, microbatches)?;
        let shared = match job.placement() {
            Placement::Disaggregated => None,
            _ => Some(passes(job, microbatches)?),
        };
        let sharers = |module: usize| (job.media_pools(module), job.modules[module].dp_size);
        let pools = (0..last).map(sharers).map(|(pools, replicas)| (pools, replicas / pools)).collect();
        Ok(Self { layout, replicas: 1, schedule, shared, pools })
    }

    pub(super) fn outside(&self, microbatch: u32, replica: usize) -> u32 {
        microbatch * self.replicas as u32 + replica as u32
    }

    /// Returns a part as numbered in the layout, and its replica.
    fn inside(&self, part: Part) -> (Part, usize) {
        let replicas = self.replicas as u32;
        (Part { microbatch: part.microbatch / replicas, ..part }, (part.microbatch % replicas) as usize)
    }

    /// Returns the pipeline rank that runs a part.
    pub(super) fn rank(&self, part: Part) -> usize {
        let (inside, replica) = self.inside(part);
        self.layout.rank(inside) + replica * self.layout.ranks()
    }

    /// Returns the parts whose activations a part receives.
    pub(super) fn upstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        let producers = self.layout.producers(inside).map(outside);
        producers.filter(|&upstream| self.is_linked(upstream, part)).collect()
    }

    /// Returns the parts that receive the activations of a part.
    pub(super) fn downstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        let consumers = self.layout.consumers(inside).map(outside);
        consumers.filter(|&downstream| self.is_linked(part, downstream)).collect()
    }

    /// Returns the parts that a pass receives rows from, and the parts that it sends rows to.
    pub(super) fn neighbors(&self, Pass { kind, part }: Pass) -> (Vec<Part>, Vec<Part>) {
        match kind {
            PassKind::Forward => (self.upstream_parts(part), self.downstream_parts(part)),
            PassKind::Backward | PassKind::BackwardInput => {
                (self.downstream_parts(part), self.upstream_parts(part))
            }
            PassKind::BackwardWeight => (Vec::new(), Vec::new()),
        }
    }

    /// Returns whether rows can go from `upstream` to `downstream`: not from an encoder replica to an LLM
    /// replica with media in a different pool.
    fn is_linked(&self, upstream: Part, downstream: Part) -> bool {
        let [from, to] = [upstream, downstream].map(|part| self.layout.module(usize::from(part.stage)));
        let Some(&(pools, sharers)) = self.pools.get(from).filter(|(pools, _)| from != to && *pools > 1)
        else {
            return true;
        };
        upstream.microbatch as usize / sharers % pools == downstream.microbatch as usize % pools
    }

    pub(super) fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    pub(super) fn schedule(&self) -> ScheduleKind {
        self.schedule
    }

    /// Returns the number of parallel pipelines that the layout does not cover.
    pub(super) fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the passes on every world rank, if modules share ranks.
    pub(super) fn shared(&self) -> Option<&RankPasses> {
        self.shared.as_ref()
    }
}

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

impl JobLayout {
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
        own.iter().map(|role| role.stages.len()).sum::<usize>() < self.stage_count()
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

/// Passes on every world rank, in order.
pub(super) type RankPasses = Vec<Vec<Pass>>;

/// Lists the passes on all world ranks in a job whose modules share ranks.
///
/// - `rounds`: number of microbatches per LLM DP rank
pub(super) fn passes(job: &JobLayout, rounds: usize) -> Result<RankPasses> {
    let chain_stages = match job.placement() {
        Placement::Joint => job.chain_stages.iter().max().map_or(1, |last| last + 1),
        _ => job.llm().stages.len(),
    };
    let chunks = job.schedule().chunks();
    let layout = PipelineLayout::chain(chain_stages / chunks, chunks, rounds)?;
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

fn joint(job: &JobLayout, roles: &[RankRole], chain: &[Vec<Pass>]) -> Vec<Pass> {
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

fn colocated(job: &JobLayout, roles: &[RankRole], chain: &[Vec<Pass>], rounds: usize) -> Vec<Pass> {
    let (mut before, mut llm, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for role in roles {
        let module = job.module_index(role.module).unwrap_or(0);
        if module + 1 == job.modules().len() {
            let first = job.first_stage(module) as u16;
            let in_llm = |pass: &Pass| {
                let microbatch = role_microbatch(job, role, pass.part.microbatch);
                Pass { part: Part { microbatch, stage: first + pass.part.stage }, ..*pass }
            };
            // Ranks are numbered by their first stage.
            llm.extend(chain[usize::from(role.stages[0] - first)].iter().map(in_llm));
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
fn round_passes(job: &JobLayout, role: &RankRole, pass: Pass) -> Vec<Pass> {
    let microbatch = role_microbatch(job, role, pass.part.microbatch);
    role.stages.iter().map(|&stage| Pass { part: Part { microbatch, stage }, ..pass }).collect()
}

/// Returns the microbatch that a role runs in a round.
fn role_microbatch(job: &JobLayout, role: &RankRole, round: u32) -> u32 {
    let replicas = job.module_index(role.module).map_or(1, |module| job.modules()[module].dp_size);
    round * replicas as u32 + role.replica as u32
}
