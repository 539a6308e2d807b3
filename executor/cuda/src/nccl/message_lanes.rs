//! Lanes of messages: a communicator of two ranks and a stream each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dflop_comm::{Comm, StepContext};
use dflop_device::{Dtype, Error, Lane, MessageLane, Result, Runtime};

use super::communicator::Communicator;
use super::functions::UniqueId;
use super::ids;
use super::session::Session;
use super::transfer::Queued;

/// Lanes of the messages of a communicator.
#[derive(Default)]
pub(super) struct MessageLanes {
    /// Lanes of all ranks that are open.
    open: BTreeSet<MessageLane>,
    /// Those of this rank: number of the device's lane, communicator.
    own: BTreeMap<MessageLane, (u64, Arc<Communicator>)>,
}

impl MessageLanes {
    /// Returns the lane of a message.
    pub(super) fn get(&self, lane: MessageLane) -> Result<(u64, Arc<Communicator>)> {
        let found = self.own.get(&lane).cloned();
        found.ok_or_else(|| {
            let MessageLane { from, to, flow } = lane;
            let reason = format!("no lane from rank {from} to rank {to} for flow {flow} is open");
            Error::InvalidSetting { setting: "message", reason }
        })
    }

    /// Opens the lanes that are not open yet; all ranks of `host` call it with the same ones.
    pub(super) fn open(
        &mut self,
        session: &Arc<Session>,
        host: &dyn Comm,
        at: StepContext,
        lanes: &BTreeSet<MessageLane>,
    ) -> Result<()> {
        let new: Vec<MessageLane> = lanes.difference(&self.open).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        for &MessageLane { from, to, .. } in &new {
            let size = host.size();
            if let Some(rank) = [from, to].into_iter().find(|&rank| rank >= size) {
                return Err(dflop_comm::Error::Rank { rank, size }.into());
            }
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
        let own = made.get(&host.rank()).copied().unwrap_or(0);
        let own: Vec<UniqueId> =
            (0..own).map(|_| Communicator::new_id(&session.nccl)).collect::<crate::Result<_>>()?;
        let ids = ids::exchange(host, at, &own, most)?;
        for (&lane, index) in new.iter().zip(index) {
            self.open.insert(lane);
            let ends = [lane.from, lane.to];
            let Some(end) = ends.iter().position(|&rank| rank == host.rank()) else { continue };
            let peer = host.world_rank(ends[1 - end]);
            let name = format!("the lane from rank {} to rank {}", lane.from, lane.to);
            // in the same order on all ranks, so that no two of them wait for each other in different lanes
            let communicator = session.connect(ids(lane.from, index), (end, 2), &name, at, peer)?;
            let number = session.lane();
            warm_up(session, at, (number, &communicator), end == 0, peer)?;
            self.own.insert(lane, (number, communicator));
        }
        Ok(())
    }
}

/// Sends one element over a new lane. NCCL connects two ranks at their first message, for which a call
/// waits for the other rank; later calls wait for nothing.
fn warm_up(
    session: &Arc<Session>,
    at: StepContext,
    (lane, communicator): (u64, &Arc<Communicator>),
    is_sender: bool,
    peer: usize,
) -> Result<()> {
    let (tensor, after) = (session.device.zeros_as(Dtype::F32, 1)?, session.device.mark(Lane::Compute)?);
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
    let (transfer, _) = queued.start(session, move |lane, stream, element| {
        if is_sender { lane.send(stream, element, 1) } else { lane.recv(stream, element, 0) }
    })?;
    drop(transfer.wait(Lane::Compute)?);
    // the next communicator may wait for all work of the device
    Ok(session.device.shared().compute.synchronize()?)
}
