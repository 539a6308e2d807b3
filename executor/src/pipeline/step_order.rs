//! Orders actions and messages: the actions on each rank, the messages in each lane, and all messages in a
//! step.
//!
//! On a transport with fewer lanes than (rank pair, flow) combinations, messages wait for each other. In an
//! arbitrary order they could deadlock: a receive posted ahead blocks the send that its message depends on.
//! All ranks therefore derive the same order for all passes and messages in a step, by simulating every
//! rank's action list with zero message time. Every pass follows the messages that it receives, every message
//! directly follows the pass that produces it, and a rank's passes are in action list order.
//!
//! **No deadlock.** A rank queues sends and receives in each shared lane in this order, and a receive before
//! any action that follows the message: then the compute lane, receive buffer allocations and all lanes
//! follow the same order. The first unfinished operation waits for nothing: everything ahead in the same
//! lanes, and every dependency, comes earlier and is done. This holds for any assignment from messages to
//! lanes, even if a send ends only with the matching receive.
//!
//! A message *lane* leads from one world rank to another and carries activations or gradients. Messages leave
//! at the end of the passes that produce them, so a lane has the order of the sender's passes. The receiver
//! can need them in a different order: in joint placement an LLM rank sends image gradients before audio clip
//! gradients, and the rank with both encoders runs the audio backward passes first. A receiver therefore
//! posts the receives in a lane in the order in which the sender sends. Then a transport that matches
//! messages only by order pairs both ends, and no end waits for a message while a later message blocks it.

use std::collections::{BTreeMap, BTreeSet};

use dflop_balancer::schedule::{Action, Message, Part, Pass, PassKind};
use dflop_device::MessageLane;

use super::layout::JobLayout;
use super::topology::{Flow, RankRole, StageEdge, StageTransfer, Topology, part_role};
use crate::error::{Error, Result};

/// Position in the order: pass end in simulated time, pipeline rank, and 0 for the pass itself or the message
/// number within the pass.
type Place = (u64, usize, usize);

/// Message that a rank sends or receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OwnMessage {
    pub(super) lane: MessageLane,
    pub(super) flow: Flow,
    pub(super) edge: StageEdge,
    pub(super) is_send: bool,
    /// Index of the rank's first action after the message.
    pub(super) before: usize,
}

/// Ordered messages in a step.
pub(super) struct StepOrder {
    messages: Vec<(Place, SentMessage)>,
    /// Latest position so far, by world rank and action.
    reached: Vec<Vec<Place>>,
}

impl StepOrder {
    /// Orders the messages on all ranks, including messages without rows in a step.
    ///
    /// # Errors
    /// [`Error::Balancer`] if action lists wait for each other.
    pub(super) fn new(job: &JobLayout, topology: &Topology) -> Result<Self> {
        let mut run = Simulation::new(job, topology)?;
        while run.advance_all()? {}
        if let Some(rank) = (0..run.lists.len()).find(|&rank| run.next(rank).is_some()) {
            let action = run.next(rank).map(|action| action.to_string()).unwrap_or_default();
            return Err(Error::Balancer(dflop_balancer::Error::Deadlock { rank, action }));
        }
        let mut messages = run.messages;
        messages.sort_by_key(|&(place, _)| place);
        Ok(Self { messages, reached: run.reached })
    }

    /// Returns a world rank's messages.
    pub(super) fn rank_messages(&self, rank: usize) -> Vec<OwnMessage> {
        let own = self.messages.iter().filter(|(_, sent)| sent.from == rank || sent.to == rank);
        let message = |&(place, SentMessage { from, to, flow, edge }): &(Place, SentMessage)| OwnMessage {
            lane: MessageLane::of(from, to, edge.tag(flow)),
            flow,
            edge,
            is_send: from == rank,
            before: self.reached[rank].partition_point(|&reached| reached < place),
        };
        own.map(message).collect()
    }
}

/// Simulated run for all ranks' action lists.
struct Simulation<'a> {
    job: &'a JobLayout,
    topology: &'a Topology,
    roles: Vec<Vec<RankRole>>,
    lists: Vec<Vec<Action>>,
    reached: Vec<Vec<Place>>,
    free: Vec<u64>,
    messages: Vec<(Place, SentMessage)>,
    /// Message positions, by sender, receiver, flow and edge.
    sent: BTreeMap<(usize, usize, Flow, StageEdge), Place>,
}

impl<'a> Simulation<'a> {
    fn new(job: &'a JobLayout, topology: &'a Topology) -> Result<Self> {
        let ranks: Vec<usize> = (0..job.world_size()).collect();
        let lists = action_lists(job, topology, &ranks)?;
        let roles = ranks.iter().map(|&rank| job.roles(rank)).collect::<Result<_>>()?;
        let (reached, free) = (vec![Vec::new(); ranks.len()], vec![0; ranks.len()]);
        Ok(Self { job, topology, roles, lists, reached, free, messages: Vec::new(), sent: BTreeMap::new() })
    }

    /// Returns a rank's next action.
    fn next(&self, rank: usize) -> Option<Action> {
        self.lists[rank].get(self.reached[rank].len()).copied()
    }

    /// Advances all ranks as far as possible; returns whether any rank advanced.
    fn advance_all(&mut self) -> Result<bool> {
        let mut has_moved = false;
        for rank in 0..self.lists.len() {
            while let Some(action) = self.next(rank) {
                let is_done = match (action, action.pass()) {
                    (_, Some(pass)) => self.pass(pass)?,
                    (Action::Recv(_) | Action::RecvGrad(_), _) => self.receive(rank, action)?,
                    // messages leave with their pass
                    _ => self.reach(rank, (0, 0, 0)),
                };
                if !is_done {
                    break;
                }
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    /// Ends a rank's action at a position, or at the previous action's position if later.
    fn reach(&mut self, rank: usize, place: Place) -> bool {
        let before = self.reached[rank].last().copied().unwrap_or_default();
        self.reached[rank].push(before.max(place));
        true
    }

    /// Runs a pass on all ranks in the pipeline rank; returns false if any rank has not reached the pass yet.
    fn pass(&mut self, pass: Pass) -> Result<bool> {
        let pipeline_rank = self.topology.rank(pass.part);
        let members = self.job.world_ranks(pipeline_rank);
        let is_next = |&member: &usize| self.next(member).and_then(Action::pass) == Some(pass);
        if !members.iter().all(is_next) {
            return Ok(false);
        }
        let start = members.iter().map(|&member| self.free[member]).max().unwrap_or(0);
        let end = start + if pass.kind == PassKind::Backward { 2 } else { 1 };
        let mut number = 0;
        for &member in members {
            self.free[member] = end;
            self.reach(member, (end, pipeline_rank, 0));
            for sent in pass_messages(self.job, self.topology, (member, &self.roles[member]), pass)? {
                number += 1;
                let place = (end, pipeline_rank, number);
                self.sent.insert((member, sent.to, sent.flow, sent.edge), place);
                if sent.to != member {
                    self.messages.push((place, sent));
                }
            }
        }
        Ok(true)
    }

    /// Receives a message; returns false if it is not sent yet.
    fn receive(&mut self, rank: usize, action: Action) -> Result<bool> {
        let Some(StageTransfer { flow, edge, peer, .. }) = StageTransfer::of(self.topology, action) else {
            return Ok(self.reach(rank, (0, 0, 0)));
        };
        let from = self.job.source(peer, rank, part_role(&self.roles[rank], flow.receiver(edge))?);
        let Some(&place) = self.sent.get(&(from, rank, flow, edge)) else { return Ok(false) };
        self.free[rank] = self.free[rank].max(place.0);
        Ok(self.reach(rank, place))
    }
}

/// Returns the actions of world ranks.
pub(super) fn action_lists(
    job: &JobLayout,
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
    job: &JobLayout,
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
pub(super) fn sent_messages(
    job: &JobLayout,
    topology: &Topology,
    senders: &[usize],
) -> Result<Vec<SentMessage>> {
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
    job: &JobLayout,
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

/// Messages that a world rank receives in a step, by lane, in send order.
pub(super) struct LaneOrder {
    /// Lanes by sender and flow.
    lanes: BTreeMap<(usize, Flow), Vec<StageEdge>>,
    /// All messages of the rank in the order of the step, if lanes may be shared.
    own: Vec<OwnMessage>,
}

impl LaneOrder {
    /// Lists the messages to a world rank, with its roles, that the action list receives.
    pub(super) fn new(
        job: &JobLayout,
        topology: &Topology,
        (to, roles): (usize, &[RankRole]),
        list: &[Action],
    ) -> Result<Self> {
        let mut senders = BTreeSet::new();
        for action in list {
            if let Action::Recv(message) | Action::RecvGrad(message) = action {
                let role = part_role(roles, message.part())?;
                senders.insert(job.source(usize::from(message.peer), to, role));
            }
        }
        let senders: Vec<usize> = senders.into_iter().collect();
        let mut lanes: BTreeMap<_, Vec<StageEdge>> = BTreeMap::new();
        let own = sent_messages(job, topology, &senders)?.into_iter().filter(|message| message.to == to);
        for SentMessage { from, flow, edge, .. } in own {
            lanes.entry((from, flow)).or_default().push(edge);
        }
        Ok(Self { lanes, own: Vec::new() })
    }

    /// Lists all messages of a world rank in the order of the step, for lanes that are shared.
    pub(super) fn with_step_order(
        mut self,
        job: &JobLayout,
        topology: &Topology,
        rank: usize,
    ) -> Result<Self> {
        self.own = StepOrder::new(job, topology)?.rank_messages(rank);
        Ok(self)
    }

    /// Returns all messages of the rank in the order of the step, if lanes may be shared.
    pub(super) fn own(&self) -> &[OwnMessage] {
        &self.own
    }

    /// Iterates over the lanes, each a sender and a flow, with messages.
    pub(super) fn lanes(&self) -> impl Iterator<Item = ((usize, Flow), &[StageEdge])> {
        self.lanes.iter().map(|(&lane, messages)| (lane, messages.as_slice()))
    }

    /// Returns the messages in a lane, including messages without rows, which are never sent.
    pub(super) fn lane_messages(&self, from: usize, flow: Flow) -> &[StageEdge] {
        self.lanes.get(&(from, flow)).map_or(&[], Vec::as_slice)
    }
}
