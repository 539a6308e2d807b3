//! Orders the messages between two world ranks such that both ends list them in the same order.
//!
//! A message *lane* leads from one world rank to another and carries activations or gradients. Messages leave
//! at the end of the passes that produce them, so a lane has the order of the sender's passes. The receiver
//! can need them in a different order: in joint placement an LLM rank sends image gradients before audio clip
//! gradients, and the rank with both encoders runs the audio backward passes first. A receiver therefore
//! posts the receives in a lane in the order in which the sender sends. Then a transport that matches
//! messages only by order pairs both ends, and no end waits for a message while a later message blocks it.

use std::collections::{BTreeMap, BTreeSet};

use dflop_balancer::schedule::Action;

use super::job::Job;
use super::rank_roles::RankRole;
use super::sent_messages::{SentMessage, sent_messages};
use super::stage_edge::{Flow, StageEdge, part_role};
use super::step_order::{OwnMessage, StepOrder};
use super::topology::Topology;
use crate::error::Result;

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
        job: &Job,
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
    pub(super) fn with_step_order(mut self, job: &Job, topology: &Topology, rank: usize) -> Result<Self> {
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
