//! Message lanes, each with a communicator and a stream: for a single direction and flow, for a rank pair, or
//! for all ranks. New communicator ids go to the member ranks over the job's control plane.
//!
//! Communicator operations in dedicated lanes.

use super::communicator::Communicator;
use super::library::{ID_BYTES, UniqueId};
use super::session::{Operation, Place, Session, places};
use crate::device::Cuda;
use crate::driver::{CudaEvent, Event, Gate, Stream};
use dflop_comm::{Comm, StepContext};
use dflop_device::{Dtype, Error, Lane, MessageLane, Result, Runtime, Span, Tensor, Transfer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Message lanes for a communicator.
#[derive(Default)]
pub(super) struct MessageLanes {
    /// Open lanes on all ranks, with the place that carries the lane messages.
    open: BTreeMap<MessageLane, Place>,
    /// Lanes on this rank.
    own: BTreeMap<Place, OwnLane>,
}

/// A rank's endpoint in a lane.
#[derive(Clone)]
pub(super) struct OwnLane {
    /// Device lane number.
    pub(super) number: u64,
    pub(super) communicator: Arc<Communicator>,
    place: Place,
}

impl OwnLane {
    /// Returns a rank's number in the lane communicator.
    pub(super) fn name_number(&self, rank: usize) -> usize {
        match self.place {
            Place::Own(lane) => usize::from(rank == lane.to),
            Place::Pair([low, _]) => usize::from(rank != low),
            Place::Shared => rank,
        }
    }
}

impl MessageLanes {
    /// Returns the lane for a message.
    pub(super) fn get(&self, lane: MessageLane) -> Result<OwnLane> {
        let found = self.open.get(&lane).and_then(|place| self.own.get(place)).cloned();
        found.ok_or_else(|| {
            let MessageLane { from, to, flow } = lane;
            let reason = format!("no lane from rank {from} to rank {to} for flow {flow} is open");
            Error::InvalidSetting { setting: "message", reason }
        })
    }

    /// Returns the device lane number if several message lanes share it, `None` otherwise.
    pub(super) fn shared(&self, lane: MessageLane) -> Option<u64> {
        let place = self.open.get(&lane).filter(|place| !matches!(place, Place::Own(_)))?;
        Some(self.own.get(place)?.number)
    }

    /// Opens the lanes that are not open yet; all ranks in `host` call it with the same lanes.
    pub(super) fn open(
        &mut self,
        session: &Arc<Session>,
        host: &dyn Comm,
        at: StepContext,
        lanes: &BTreeSet<MessageLane>,
    ) -> Result<()> {
        let new: BTreeSet<MessageLane> =
            lanes.iter().filter(|lane| !self.open.contains_key(lane)).copied().collect();
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
        let free: Vec<usize> =
            host.gather(at, &[session.free_queues() as u64])?.into_iter().map(|free| free as usize).collect();
        let known: BTreeSet<Place> = self.open.values().copied().collect();
        let new = places(&new, &free, &known);
        let opened: BTreeSet<Place> = new.values().copied().filter(|place| !known.contains(place)).collect();
        self.connect(session, host, at, &opened)?;
        for (lane, place) in new {
            self.open.insert(lane, place);
            if [lane.from, lane.to].contains(&host.rank()) {
                warm_up(session, at, host, lane, &self.get(lane)?)?;
            }
        }
        Ok(())
    }

    /// Creates the communicators for new lanes.
    fn connect(
        &mut self,
        session: &Arc<Session>,
        host: &dyn Comm,
        at: StepContext,
        opened: &BTreeSet<Place>,
    ) -> Result<()> {
        // the first rank of a lane makes its id; every rank knows how many each makes
        let mut made = BTreeMap::<usize, usize>::new();
        let mut next = |rank: usize| {
            let count = made.entry(rank).or_default();
            *count += 1;
            *count - 1
        };
        let index: Vec<(usize, usize)> =
            opened.iter().map(|place| first_rank(*place)).map(|rank| (rank, next(rank))).collect();
        let most = made.values().copied().max().unwrap_or(0);
        let own = made.get(&host.rank()).copied().unwrap_or(0);
        let own: Vec<UniqueId> =
            (0..own).map(|_| Communicator::new_id(&session.nccl)).collect::<crate::error::Result<_>>()?;
        let ids = exchange(host, at, &own, most)?;
        for (&place, (first, index)) in opened.iter().zip(index) {
            let (ranks, name) = match place {
                Place::Own(MessageLane { from, to, .. }) => {
                    (vec![from, to], format!("the lane from rank {from} to rank {to}"))
                }
                Place::Pair([low, high]) => (vec![low, high], format!("the lane of ranks {low} and {high}")),
                Place::Shared => ((0..host.size()).collect(), "the lane of all ranks".to_owned()),
            };
            let Some(end) = ranks.iter().position(|&rank| rank == host.rank()) else { continue };
            let peer = host.world_rank(ranks[(end + 1) % ranks.len()]);
            // in the same order on all ranks, so that no two of them wait for each other in different lanes
            let communicator = session.connect(ids(first, index), (end, ranks.len()), &name, at, peer)?;
            self.own.insert(place, OwnLane { number: session.lane(), communicator, place });
        }
        Ok(())
    }
}

/// Returns the rank that creates a lane communicator's id.
fn first_rank(place: Place) -> usize {
    match place {
        Place::Own(lane) => lane.from,
        Place::Pair([low, _]) => low,
        Place::Shared => 0,
    }
}

/// Sends a single element over a new lane. NCCL connects two ranks at the first message, when a call waits
/// for the peer rank; later calls do not wait.
fn warm_up(
    session: &Arc<Session>,
    at: StepContext,
    host: &dyn Comm,
    MessageLane { from, to, .. }: MessageLane,
    own: &OwnLane,
) -> Result<()> {
    let (tensor, after) = (session.device.zeros_as(Dtype::F32, 1)?, session.device.mark(Lane::Compute)?);
    let communicator = &own.communicator;
    let what = format!("connect {}", communicator.name());
    let is_sender = from == host.rank();
    let other = if is_sender { to } else { from };
    let queued = Queued {
        lane: own.number,
        communicator,
        at,
        what,
        peer: host.world_rank(other),
        after: &after,
        also_after: None,
        tensor,
        is_returned: true,
    };
    let number = own.name_number(other);
    let (transfer, _) = queued.start(session, move |lane, stream, element| {
        if is_sender { lane.send(stream, element, number) } else { lane.recv(stream, element, number) }
    })?;
    drop(transfer.wait(Lane::Compute)?);
    // the next communicator may wait for all work of the device
    Ok(session.device.shared().compute.synchronize()?)
}

/// Number of words in an id.
const NUMBERS: usize = ID_BYTES / 8;

/// Exchanges ids: every rank contributes `count` slots and receives the ids from all ranks.
///
/// - `own`: ids from this rank, at most `count`
/// - returns a function that looks up an id by rank and index
pub(super) fn exchange(
    host: &dyn Comm,
    at: StepContext,
    own: &[UniqueId],
    count: usize,
) -> dflop_comm::Result<impl Fn(usize, usize) -> UniqueId + use<>> {
    let mut numbers = vec![0_u64; NUMBERS * count];
    for (id, place) in own.iter().zip(numbers.chunks_mut(NUMBERS)) {
        for (bytes, number) in id.0.chunks(8).zip(place) {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            *number = u64::from_le_bytes(word);
        }
    }
    let all = host.gather(at, &numbers)?;
    Ok(move |rank: usize, index: usize| {
        let mut id = UniqueId([0; ID_BYTES]);
        let place = &all[NUMBERS * (count * rank + index)..][..NUMBERS];
        for (bytes, number) in id.0.chunks_mut(8).zip(place) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        id
    })
}

/// An operation to queue.
pub(super) struct Queued<'a> {
    pub(super) lane: u64,
    pub(super) communicator: &'a Arc<Communicator>,
    pub(super) at: StepContext,
    /// What it does, for errors.
    pub(super) what: String,
    /// Rank in the job that it waits for.
    pub(super) peer: usize,
    /// Points behind which it starts.
    pub(super) after: &'a CudaEvent,
    pub(super) also_after: Option<Event>,
    pub(super) tensor: Tensor<Cuda>,
    /// Whether the waiting lane gets the tensor back.
    pub(super) is_returned: bool,
}

/// Queued operation, which owns the tensor.
struct Held {
    session: Arc<Session>,
    gate: Arc<Gate>,
    operation: Arc<Operation>,
    /// Shared with the lane's thread until it has issued the operation.
    tensor: Option<Arc<Tensor<Cuda>>>,
    is_returned: bool,
}

impl Queued<'_> {
    /// Queues the operation; returns the transfer, and the gate that opens once it is issued.
    pub(super) fn start(
        self,
        session: &Arc<Session>,
        issue: impl FnOnce(&Communicator, &Stream, &Tensor<Cuda>) -> crate::error::Result<()> + Send + 'static,
    ) -> Result<(Transfer<Cuda>, Arc<Gate>)> {
        let Queued { lane, at, what, peer, also_after, is_returned, .. } = self;
        session.device.check()?;
        session.take_stream(lane)?;
        let tensor = Arc::new(self.tensor);
        let (after, communicator, operand) =
            (self.after.clone(), Arc::clone(self.communicator), Arc::clone(&tensor));
        let span = Span::default();
        let times = Span::clone(&span);
        let gate = session.device.queue(lane, move |_, stream| {
            stream.wait(&after.get()?)?;
            also_after.iter().try_for_each(|event| stream.wait(event))?;
            let start = stream.record()?;
            issue(&communicator, stream, &operand)?;
            let end = stream.record()?;
            times.set(CudaEvent::recorded(start), CudaEvent::recorded(end.clone()));
            Ok(end)
        })?;
        session.device.shared().loads.note_in_lane(&gate);
        let operation = session.watch(at, what, peer, Arc::clone(&gate));
        let held = Held {
            session: Arc::clone(session),
            gate: Arc::clone(&gate),
            operation,
            tensor: Some(tensor),
            is_returned,
        };
        Ok((Transfer::timed(span, move |lane| held.wait(lane)), gate))
    }
}

impl Held {
    fn wait(mut self, lane: Lane) -> Result<Option<Tensor<Cuda>>> {
        // on the calling thread, because the lane's thread issues operations in their order
        let issued = self.gate.wait();
        let device = self.session.device.clone();
        device.check()?;
        let event = issued.map_err(|error| self.session.call_failed(self.operation.at, &error))?;
        let compute = &device.shared().compute;
        if lane == Lane::Compute {
            self.operation.await_from(compute.record()?);
        } else if !self.is_returned {
            // memory is freed in the order of the compute lane
            compute.wait(&event)?;
        }
        device.after(lane, &CudaEvent::recorded(event))?;
        // the lane's thread has let go of the tensor: the gate was opened after it
        let tensor = self.tensor.take().and_then(Arc::into_inner);
        Ok(tensor.filter(|_| self.is_returned))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // memory is freed in the order of the compute lane, so that one comes behind an operation that nobody
        // has waited for
        if self.tensor.is_some()
            && let Some(event) = self.gate.opened()
        {
            let _ = self.session.device.shared().compute.wait(&event);
        }
    }
}
