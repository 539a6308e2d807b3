//! Orders all messages in a step, so that messages from several lanes can run in sequence.
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

use std::collections::BTreeMap;

use dflop_balancer::schedule::{Action, Pass, PassKind};
use dflop_device::MessageLane;

use super::action_list::action_lists;
use super::job::Job;
use super::rank_roles::RankRole;
use super::sent_messages::{SentMessage, pass_messages};
use super::stage_edge::{Flow, StageEdge, StageTransfer, part_role};
use super::topology::Topology;
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
    pub(super) fn new(job: &Job, topology: &Topology) -> Result<Self> {
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
    job: &'a Job,
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
    fn new(job: &'a Job, topology: &'a Topology) -> Result<Self> {
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
