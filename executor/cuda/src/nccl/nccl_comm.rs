//! Communicator of tensors over NCCL.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dflop_comm::{Comm, StepContext};
use dflop_device::ops::elementwise::Elementwise;
use dflop_device::{DeviceComm, Dtype, Error, MessageLane, Result, RowShape, Runtime, Tensor, Transfer};

use super::collective::Collective;
use super::communicator::Communicator;
use super::environment::{check_loading, queues};
use super::functions::UniqueId;
use super::ids;
use super::library::{Nccl, NcclVersion};
use super::message_lanes::MessageLanes;
use super::session::Session;
use super::transfer::Queued;
use super::watchdog;
use crate::device::Cuda;
use crate::event::{CudaEvent, Gate};
use crate::kernels::Kernels;
use crate::libraries::SearchPath;

/// Exchanges tensors between devices over NCCL.
///
/// - **Messages** go over a communicator of two ranks and a lane for each [`MessageLane`]
///   ([`open_lanes`](DeviceComm::open_lanes)). They are matched by their order in it. Where a device has too
///   few queues for that, the lanes of two ranks are one, or those of all
///   ([`shared_lane`](DeviceComm::shared_lane)).
/// - **Collectives** of a communicator run in the order of their calls, which is the same on all ranks: in
///   the compute lane, or in a lane of their own if they were started to overlap.
/// - **Loads**: the driver may let a load wait for all work of the device, so for a receive that was posted
///   ahead. `CUDA_MODULE_LOADING=EAGER` must be set for a job of several ranks, and kernels are loaded before
///   messages are posted ([`Runtime::prepare`]).
///   Ranks that share a process need a device each, because they would share its context.
/// - **Streams**: a rank has one for each of its lanes, and one for each communicator, and takes no more than
///   the device has queues for: the driver spreads streams over `CUDA_DEVICE_MAX_CONNECTIONS` queues, and
///   work behind a receive that was posted ahead would hold up all streams that share its queue.
/// - **Sums** of bf16 over more than two ranks are computed in `f32` and rounded once.
/// - **Failures**: waits have the limits of the job's [`Comm`], and a failure anywhere ends the work of the
///   device here; every later call returns it.
pub struct NcclComm {
    session: Arc<Session>,
    host: Arc<dyn Comm>,
    /// What the ranks have in common, for errors.
    name: String,
    /// Communicator of collectives; `None` for one rank.
    group: Option<Arc<Communicator>>,
    /// Lane of collectives that overlap.
    lane: u64,
    /// Last collective that was queued in that lane.
    queued: Mutex<Option<Arc<Gate>>>,
    messages: Mutex<MessageLanes>,
}

impl NcclComm {
    /// Joins the ranks of a job, each of which has a device; all of them call it together.
    ///
    /// - `host`: communicator of the whole job
    ///
    /// # Errors
    /// [`Error::Failed`] if NCCL is not found or cannot be used with this device; [`Error::InvalidSetting`]
    /// if ranks have different versions; [`Error::Comm`].
    pub fn join(device: &Cuda, host: Arc<dyn Comm>, search: &SearchPath) -> Result<Self> {
        Self::join_with(device, host, search, queues())
    }

    /// Joins the ranks of a job on devices that have a number of queues, whatever the environment of the
    /// process: for tests.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    #[doc(hidden)]
    pub fn join_with(device: &Cuda, host: Arc<dyn Comm>, search: &SearchPath, queues: usize) -> Result<Self> {
        let nccl = Nccl::open(search)?;
        let at = StepContext::step(0, "connect devices");
        let versions = host.gather(at, &[u64::from(nccl.version().0)])?;
        if let Some(other) = versions.iter().position(|&version| version != versions[0]) {
            let text = |rank: usize| NcclVersion(versions[rank] as u32);
            let reason = format!("rank 0 has version {}, rank {other} {}", text(0), text(other));
            return Err(Error::InvalidSetting { setting: "NCCL", reason });
        }
        check_loading(host.size())?;
        check_attention(host.size(), device.shared().cudnn.is_some())?;
        prepare_sums(device)?;
        let session = Arc::new(Session::new(device, nccl, Arc::clone(&host), queues));
        watchdog::start(&session)?;
        let ids = ids::exchange(&*host, at, &ids_of_leader(&session, host.rank() == 0)?, 1)?;
        Self::new(session, host, at, "all ranks".to_owned(), || ids(0, 0))
    }

    /// Makes the communicator of the ranks of `host`, which all have the same id.
    fn new(
        session: Arc<Session>,
        host: Arc<dyn Comm>,
        at: StepContext,
        name: String,
        id: impl FnOnce() -> UniqueId,
    ) -> Result<Self> {
        let (rank, size) = (host.rank(), host.size());
        let next = host.world_rank((rank + 1) % size);
        let group = (size > 1).then(|| session.connect(id(), (rank, size), &name, at, next)).transpose()?;
        let lane = session.lane();
        let (queued, messages) = (Mutex::default(), Mutex::default());
        let made = Self { session, host, name, group, lane, queued, messages };
        made.warm_up(at)?;
        Ok(made)
    }

    /// Runs each kind of collective once. NCCL connects ranks at the first use of each, for which a call
    /// waits for the other ranks; later calls wait for nothing.
    fn warm_up(&self, at: StepContext) -> Result<()> {
        let size = self.host.size();
        if size == 1 {
            return Ok(());
        }
        let mut values = self.device().zeros_as(Dtype::F32, size)?;
        for collective in [
            Collective::AllReduce,
            Collective::ReduceScatter(vec![1; size]),
            Collective::AllGather(vec![1; size]),
        ] {
            self.update(at, &mut values, &collective)?;
        }
        // the next communicator may wait for all work of the device
        Ok(self.device().shared().compute.synchronize()?)
    }

    fn device(&self) -> &Cuda {
        &self.session.device
    }

    fn messages(&self) -> MutexGuard<'_, MessageLanes> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rank in the job that collectives wait for first, as far as this rank can tell.
    fn neighbor(&self) -> usize {
        self.host.world_rank((self.host.rank() + 1) % self.host.size())
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let size = self.host.size();
        if rank < size { Ok(()) } else { Err(dflop_comm::Error::Rank { rank, size }.into()) }
    }

    /// Runs a collective in the order of the compute lane.
    fn update(&self, at: StepContext, values: &mut Tensor<Cuda>, collective: &Collective) -> Result<()> {
        collective.check(self.host.size(), values)?;
        let Some(group) = &self.group else { return Ok(()) };
        if Kernels::is_recording() {
            return Ok(());
        }
        self.device().check()?;
        self.count(collective, values);
        // calls of the communicator keep the order of the caller's
        let queued = self.queued.lock().unwrap_or_else(PoisonError::into_inner).take();
        queued.map(|gate| gate.opened());
        let compute = &self.device().shared().compute;
        let before = compute.record()?;
        let issued = if self.is_widened(collective, values) {
            let wide = self.widen(values)?;
            let issued = collective.issue(group, compute, &wide);
            self.round(&wide, values)?;
            issued
        } else {
            collective.issue(group, compute, values)
        };
        issued.map_err(|error| self.session.call_failed(at, &error))?;
        let done = Arc::<Gate>::default();
        done.open(Ok(compute.record()?));
        self.device().shared().loads.note_in_compute_lane(&done);
        let what = format!("{} over {}", collective.name(), self.name);
        self.session.watch(at, what, self.neighbor(), done).await_from(before);
        Ok(())
    }

    /// Starts a collective in a lane of its own.
    fn start(
        &self,
        at: StepContext,
        values: Tensor<Cuda>,
        collective: Collective,
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        collective.check(self.host.size(), &values)?;
        let Some(group) = &self.group else { return Ok(Transfer::new(move |_| Ok(Some(values)))) };
        self.count(&collective, &values);
        let compute = &self.device().shared().compute;
        let what = format!("{} over {}", collective.name(), self.name);
        let (tensor, narrow, also_after) = if self.is_widened(&collective, &values) {
            let wide = self.widen(&values)?;
            (wide, Some(values), Some(compute.record()?))
        } else {
            (values, None, None)
        };
        let queued = Queued {
            lane: self.lane,
            communicator: group,
            at,
            what,
            peer: self.neighbor(),
            after,
            also_after,
            tensor,
            is_returned: true,
        };
        let mut last = self.queued.lock().unwrap_or_else(PoisonError::into_inner);
        let (transfer, gate) = queued
            .start(&self.session, move |group, stream, values| collective.issue(group, stream, values))?;
        *last = Some(gate);
        drop(last);
        let Some(mut narrow) = narrow else { return Ok(transfer) };
        let device = self.device().clone();
        Ok(Transfer::timed(transfer.span(), move |lane| {
            let Some(wide) = transfer.wait(lane)? else { return Ok(None) };
            device.zero(&mut narrow)?;
            device.add(&wide, &mut narrow)?;
            Ok(Some(narrow))
        }))
    }

    /// Counts the bytes that a collective sends, if it goes round a ring.
    fn count(&self, collective: &Collective, values: &Tensor<Cuda>) {
        let (size, rounds) = (self.host.size() as u64, collective.rounds());
        let bytes = rounds * values.bytes() * (size - 1) / size;
        self.session.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns whether numbers are summed in another type than they are stored in: a sum of two is rounded
    /// once in any case.
    fn is_widened(&self, collective: &Collective, values: &Tensor<Cuda>) -> bool {
        let is_sum = !matches!(collective, Collective::AllGather(_));
        is_sum && values.dtype() == Dtype::Bf16 && self.host.size() > 2
    }

    fn widen(&self, values: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
        let mut wide = self.device().alloc_as(Dtype::F32, values.len())?;
        self.device().zero(&mut wide)?;
        self.device().add(values, &mut wide)?;
        Ok(wide)
    }

    fn round(&self, wide: &Tensor<Cuda>, values: &mut Tensor<Cuda>) -> Result<()> {
        self.device().zero(values)?;
        self.device().add(wide, values)
    }
}

/// Refuses cuDNN, whose plans are built and loaded at any time.
fn check_attention(ranks: usize, has_cudnn: bool) -> Result<()> {
    if ranks == 1 || !has_cudnn {
        return Ok(());
    }
    let reason = "cuDNN builds and loads its plans while ranks wait for each other, which may never end; \
                  jobs over NCCL compute attention by our own kernels"
        .to_owned();
    Err(Error::InvalidSetting { setting: "attention", reason })
}

/// Loads what sums of bf16 in `f32` need.
fn prepare_sums(device: &Cuda) -> Result<()> {
    if device.storage() != Dtype::Bf16 {
        return Ok(());
    }
    let mut narrow = device.zeros_as(Dtype::Bf16, 1)?;
    let mut wide = device.zeros_as(Dtype::F32, 1)?;
    device.prepare(|| {
        device.add(&narrow, &mut wide)?;
        device.add(&wide, &mut narrow)
    })
}

/// Makes the id of a communicator on the rank that leads it.
fn ids_of_leader(session: &Session, is_leader: bool) -> Result<Vec<UniqueId>> {
    let id = is_leader.then(|| Communicator::new_id(&session.nccl)).transpose()?;
    Ok(id.into_iter().collect())
}

impl DeviceComm<Cuda> for NcclComm {
    fn host(&self) -> &dyn Comm {
        &*self.host
    }

    fn shared_host(&self) -> Arc<dyn Comm> {
        Arc::clone(&self.host)
    }

    fn split(
        &self,
        at: StepContext,
        color: Option<u64>,
        key: u64,
    ) -> Result<Option<Arc<dyn DeviceComm<Cuda>>>> {
        let group = self.host.split(at, color, key)?;
        let leads = group.as_ref().is_some_and(|group| group.rank() == 0);
        let ids = ids::exchange(&*self.host, at, &ids_of_leader(&self.session, leads)?, 1)?;
        let Some(group) = group else { return Ok(None) };
        let group: Arc<dyn Comm> = Arc::from(group);
        let ranks: Vec<usize> = (0..group.size()).map(|rank| group.world_rank(rank)).collect();
        let is_leader = |&rank: &usize| self.host.world_rank(rank) == ranks[0];
        let leader = (0..self.host.size()).find(is_leader).unwrap_or_default();
        let name = format!("ranks {ranks:?}");
        let made = Self::new(Arc::clone(&self.session), group, at, name, || ids(leader, 0))?;
        Ok(Some(Arc::new(made)))
    }

    fn is_matched_by_order(&self) -> bool {
        true
    }

    fn bytes_sent(&self) -> u64 {
        self.session.bytes_sent.load(Ordering::Relaxed)
    }

    fn open_lanes(&self, at: StepContext, lanes: &BTreeSet<MessageLane>) -> Result<()> {
        self.messages().open(&self.session, &*self.host, at, lanes)
    }

    fn shared_lane(&self, lane: MessageLane) -> Option<u64> {
        self.messages().shared(lane)
    }

    fn send(
        &self,
        to: usize,
        tag: u64,
        at: StepContext,
        rows: Tensor<Cuda>,
        _: usize,
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        self.check_rank(to)?;
        let own = self.messages().get(MessageLane::of(self.host.rank(), to, tag))?;
        self.session.bytes_sent.fetch_add(rows.bytes(), Ordering::Relaxed);
        let what = format!("send {} elements to rank {to}", rows.len());
        let (peer, tensor) = (self.host.world_rank(to), rows);
        let queued = Queued {
            lane: own.number,
            communicator: &own.communicator,
            at,
            what,
            peer,
            after,
            also_after: None,
            tensor,
            is_returned: false,
        };
        let number = own.number_of(to);
        Ok(queued.start(&self.session, move |lane, stream, rows| lane.send(stream, rows, number))?.0)
    }

    fn recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: RowShape,
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        self.check_rank(from)?;
        let own = self.messages().get(MessageLane::of(from, self.host.rank(), tag))?;
        let tensor = self.device().alloc_as(shape.dtype, shape.rows * shape.cols)?;
        let what = format!("receive {} elements from rank {from}", tensor.len());
        let queued = Queued {
            lane: own.number,
            communicator: &own.communicator,
            at,
            what,
            peer: self.host.world_rank(from),
            after,
            // the memory exists behind its allocation in the compute lane
            also_after: Some(self.device().shared().compute.record()?),
            tensor,
            is_returned: true,
        };
        let number = own.number_of(from);
        Ok(queued.start(&self.session, move |lane, stream, rows| lane.recv(stream, rows, number))?.0)
    }

    fn all_reduce(&self, at: StepContext, values: &mut Tensor<Cuda>) -> Result<()> {
        self.update(at, values, &Collective::AllReduce)
    }

    fn start_all_reduce(
        &self,
        at: StepContext,
        values: Tensor<Cuda>,
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        self.start(at, values, Collective::AllReduce, after)
    }

    fn reduce_scatter(&self, at: StepContext, values: &mut Tensor<Cuda>, parts: &[usize]) -> Result<()> {
        self.update(at, values, &Collective::ReduceScatter(parts.to_vec()))
    }

    fn start_reduce_scatter(
        &self,
        at: StepContext,
        values: Tensor<Cuda>,
        parts: &[usize],
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        self.start(at, values, Collective::ReduceScatter(parts.to_vec()), after)
    }

    fn start_all_gather(
        &self,
        at: StepContext,
        values: Tensor<Cuda>,
        parts: &[usize],
        after: &CudaEvent,
    ) -> Result<Transfer<Cuda>> {
        self.start(at, values, Collective::AllGather(parts.to_vec()), after)
    }

    fn all_gather(&self, at: StepContext, values: &mut Tensor<Cuda>, parts: &[usize]) -> Result<()> {
        self.update(at, values, &Collective::AllGather(parts.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_ranks_do_not_compute_attention_by_cudnn() {
        let refused = check_attention(2, true).unwrap_err().to_string();
        assert!(refused.contains("`attention`") && refused.contains("cuDNN"), "{refused}");
        assert!(check_attention(1, true).is_ok() && check_attention(2, false).is_ok());
    }
}
