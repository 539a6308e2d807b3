//! Posts receives for messages in shared lanes, so that a rank's sends and receives keep the step order
//! ([`StepOrder`](super::step_order::StepOrder)).

use std::collections::{BTreeMap, VecDeque};

use dflop_device::MessageLane;

use super::stage_edge::StageEdge;
use super::step_order::OwnMessage;
use crate::error::{Error, Result};

/// Messages in shared lanes for a step, by lane number.
#[derive(Default)]
pub(super) struct SharedLanes {
    lanes: BTreeMap<u64, VecDeque<OwnMessage>>,
    shared: BTreeMap<MessageLane, u64>,
}

impl SharedLanes {
    /// - `messages`: this rank's messages with rows, in step order
    /// - `lane`: returns the shared lane number, or `None` for a message lane with a dedicated lane
    pub(super) fn new(
        messages: impl IntoIterator<Item = OwnMessage>,
        lane: impl Fn(MessageLane) -> Option<u64>,
    ) -> Self {
        let mut own = Self::default();
        for message in messages {
            if let Some(number) = lane(message.lane) {
                own.shared.insert(message.lane, number);
                own.lanes.entry(number).or_default().push_back(message);
            }
        }
        own
    }

    /// Returns whether a message lane is shared.
    pub(super) fn has(&self, lane: MessageLane) -> bool {
        self.shared.contains_key(&lane)
    }

    /// Takes the receives to post before an action: all receives ordered before the action, and receives
    /// ordered before a later action, `until`, that no send on this rank precedes.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a send that comes before the action has not been queued.
    pub(super) fn take_receives(&mut self, action: usize, until: usize) -> Result<Vec<OwnMessage>> {
        let mut taken = Vec::new();
        for lane in self.lanes.values_mut() {
            while let Some(message) = lane.pop_front_if(|next| !next.is_send && next.before <= until) {
                taken.push(message);
            }
            if let Some(late) = lane.iter().find(|next| !next.is_send).filter(|next| next.before <= action) {
                return Err(refuse(late.lane, late.edge, "is behind a message that is sent later"));
            }
        }
        Ok(taken)
    }

    /// Takes a message that is sent now; does nothing for a dedicated lane.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a different message comes first.
    pub(super) fn take_send(&mut self, lane: MessageLane, edge: StageEdge) -> Result<()> {
        let Some(number) = self.shared.get(&lane) else { return Ok(()) };
        let is_it = |next: &mut OwnMessage| (next.lane, next.edge) == (lane, edge);
        let next = self.lanes.get_mut(number).and_then(|shared| shared.pop_front_if(is_it));
        next.map(drop).ok_or_else(|| refuse(lane, edge, "is sent before one that comes first"))
    }
}

fn refuse(MessageLane { from, to, .. }: MessageLane, edge: StageEdge, problem: &str) -> Error {
    let (stage, microbatch) = (edge.upstream.stage, edge.upstream.microbatch);
    let reason = format!(
        "the message of microbatch {microbatch} in stage {stage} from rank {from} to rank {to} {problem}"
    );
    Error::InvalidSetting { setting: "order of messages", reason }
}
