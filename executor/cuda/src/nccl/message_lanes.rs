//! Lanes of messages: a communicator of two ranks and a stream each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

use dflop_comm::StepContext;
use dflop_device::{Dtype, Error, Lane, MessageLane, Result, Runtime};

use super::communicator::Communicator;
use super::functions::UniqueId;
use super::ids;
use super::nccl_comm::NcclComm;
use super::transfer::Queued;

/// Lanes of messages.
#[derive(Default)]
pub(super) struct Messages {
    /// Lanes of all ranks that are open.
    open: BTreeSet<MessageLane>,
    /// Those of this rank: number of the device's lane, communicator.
    own: BTreeMap<MessageLane, (u64, Arc<Communicator>)>,
}

impl NcclComm {
    fn messages(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lane of a message.
    pub(super) fn lane(&self, lane: MessageLane) -> Result<(u64, Arc<Communicator>)> {
        let found = self.messages().own.get(&lane).cloned();
        found.ok_or_else(|| {
            let MessageLane { from, to, flow } = lane;
            let reason = format!("no lane from rank {from} to rank {to} for flow {flow} is open");
            Error::InvalidSetting { setting: "message", reason }
        })
    }

    /// Opens the lanes that are not open yet; all ranks call it with the same ones.
    pub(super) fn open_message_lanes(&self, at: StepContext, lanes: &BTreeSet<MessageLane>) -> Result<()> {
        let mut messages = self.messages();
        let new: Vec<MessageLane> = lanes.difference(&messages.open).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        for &MessageLane { from, to, .. } in &new {
            self.check_rank(from)?;
            self.check_rank(to)?;
            if from == to {
                let reason = format!("expected two ranks, found rank {from} twice");
                return Err(Error::InvalidSetting { setting: "lane", reason });
            }
        }
        // the sender of a lane makes its id; every rank knows how many each makes
        let mut made = BTreeMap::<usize, usize>::new();
        let index = new.iter().map(|lane| {
            let count = made.entry(lane.from).or_default();
            *count += 1;
            *count - 1
        });
        let index: Vec<usize> = index.collect();
        let most = made.values().copied().max().unwrap_or(0);
        let own = made.get(&self.host.rank()).copied().unwrap_or(0);
        let own: Vec<UniqueId> =
            (0..own).map(|_| Communicator::new_id(&self.session.nccl)).collect::<crate::Result<_>>()?;
        let ids = ids::exchange(&*self.host, at, &own, most)?;
        for (&lane, index) in new.iter().zip(index) {
            messages.open.insert(lane);
            let ends = [lane.from, lane.to];
            let Some(end) = ends.iter().position(|&rank| rank == self.host.rank()) else { continue };
            let peer = self.host.world_rank(ends[1 - end]);
            let name = format!("the lane from rank {} to rank {}", lane.from, lane.to);
            // in the same order on all ranks, so that no two of them wait for each other in different lanes
            let communicator = self.session.connect(ids(lane.from, index), (end, 2), &name, at, peer)?;
            let number = self.session.lane();
            self.warm_up_lane(at, (number, &communicator), end == 0, peer)?;
            messages.own.insert(lane, (number, communicator));
        }
        Ok(())
    }

    /// Sends one element over a new lane. NCCL connects two ranks at their first message, for which a call
    /// waits for the other rank; later calls wait for nothing.
    fn warm_up_lane(
        &self,
        at: StepContext,
        (lane, communicator): (u64, &Arc<Communicator>),
        is_sender: bool,
        peer: usize,
    ) -> Result<()> {
        let (tensor, after) = (self.device().zeros_as(Dtype::F32, 1)?, self.device().mark(Lane::Compute)?);
        let what = format!("connect {}", communicator.name());
        let queued = Queued {
            lane,
            communicator,
            at,
            what,
            peer,
            after: &after,
            also_after: None,
            tensor,
            is_returned: true,
        };
        let (transfer, _) = queued.start(&self.session, move |lane, stream, element| {
            if is_sender { lane.send(stream, element, 1) } else { lane.recv(stream, element, 0) }
        })?;
        transfer.wait(Lane::Compute).map(drop)
    }
}
