//! Tensor communicator over NCCL, and the calls that run collectives.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dflop_comm::{Comm, StepContext};
use dflop_device::ops::elementwise::Elementwise;
use dflop_device::{DeviceComm, Dtype, Error, MessageLane, Result, RowShape, Runtime, Tensor, Transfer};

use super::communicator::Communicator;
use super::library::{Nccl, NcclVersion, UniqueId};
use super::message_lanes::{self, MessageLanes, Queued};
use super::session::{self, Session, check_loading, queues};
use crate::compiler::Kernels;
use crate::device::Cuda;
use crate::driver::{CudaEvent, Gate, Stream};
use crate::libraries::SearchPath;

/// Exchanges tensors between devices over NCCL.
///
/// - **Messages** use a two-rank communicator and a lane for each [`MessageLane`]
///   ([`open_lanes`](DeviceComm::open_lanes)), and are matched by order within the lane. Where a device has
///   too few queues, all lanes between two ranks are merged, or all lanes in the job
///   ([`shared_lane`](DeviceComm::shared_lane)).
/// - **Collectives** on a communicator run in call order, which is the same on all ranks: in the compute
///   lane, or in a separate lane if started to overlap.
/// - **Loads**: the driver may block a load until all device work is done, including a receive posted ahead.
///   `CUDA_MODULE_LOADING=EAGER` must be set for a job with several ranks, and kernels are loaded before
///   messages are posted ([`Runtime::prepare`]). Ranks that share a process need separate devices, because
///   ranks on the same device would share a context.
/// - **Streams**: a rank has a stream for each lane and each communicator, at most as many as the device has
///   queues: the driver spreads streams over `CUDA_DEVICE_MAX_CONNECTIONS` queues, and a receive posted ahead
///   would block all streams that share the same queue.
/// - **Sums** in bf16 over more than two ranks are computed in `f32` and rounded once.
/// - **Failures**: waits have the time limits from the job's [`Comm`], and a failure on any rank ends this
///   device's work; every later call returns the failure.
pub struct NcclComm {
    session: Arc<Session>,
    host: Arc<dyn Comm>,
    /// Name of the rank group, for errors.
    name: String,
    /// Communicator for collectives; `None` for a single rank.
    group: Option<Arc<Communicator>>,
    /// Lane for overlapping collectives.
    lane: u64,
    /// Last collective queued in `lane`.
    queued: Mutex<Option<Arc<Gate>>>,
    messages: Mutex<MessageLanes>,
}

impl NcclComm {
    /// Joins the ranks in a job, each with a device. Collective: every rank must call it.
    ///
    /// - `host`: job communicator
    ///
    /// # Errors
    /// [`Error::Failed`] if NCCL is not found or cannot be used with this device; [`Error::InvalidSetting`]
    /// if ranks have different versions; [`Error::Comm`].
    pub fn join(device: &Cuda, host: Arc<dyn Comm>, search: &SearchPath) -> Result<Self> {
        Self::join_with(device, host, search, queues())
    }

    /// Joins the ranks in a job on devices with the given number of queues, regardless of environment
    /// variables: for tests.
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
        session::start_watchdog(&session)?;
        Arc::clone(&session).connecting(|| {
            let ids = message_lanes::exchange(&*host, at, &ids_of_leader(&session, host.rank() == 0)?, 1)?;
            Self::new(session, host, at, "all ranks".to_owned(), || ids(0, 0))
        })
    }

    /// Creates the communicator for the ranks in `host`, which all have the same id.
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

    /// Creates the communicator for the ranks with the same color; `None` without a color.
    fn split_off(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Self>> {
        let group = self.host.split(at, color, key)?;
        let leads = group.as_ref().is_some_and(|group| group.rank() == 0);
        let ids = message_lanes::exchange(&*self.host, at, &ids_of_leader(&self.session, leads)?, 1)?;
        let Some(group) = group else { return Ok(None) };
        let group: Arc<dyn Comm> = Arc::from(group);
        let ranks: Vec<usize> = (0..group.size()).map(|rank| group.world_rank(rank)).collect();
        let is_leader = |&rank: &usize| self.host.world_rank(rank) == ranks[0];
        let leader = (0..self.host.size()).find(is_leader).unwrap_or_default();
        let name = format!("ranks {ranks:?}");
        Self::new(Arc::clone(&self.session), group, at, name, || ids(leader, 0)).map(Some)
    }

    /// Runs each kind of collective once. NCCL connects ranks at the first use, when a call waits for the
    /// remaining ranks; later calls do not wait.
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

    /// Returns the job rank that collectives wait for first, as far as this rank can tell.
    fn neighbor(&self) -> usize {
        self.host.world_rank((self.host.rank() + 1) % self.host.size())
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let size = self.host.size();
        if rank < size { Ok(()) } else { Err(dflop_comm::Error::Rank { rank, size }.into()) }
    }

    /// Runs a collective in compute lane order.
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

    /// Starts a collective in the lane for overlapping collectives.
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

    /// Counts the bytes that a collective sends, assuming a ring algorithm.
    fn count(&self, collective: &Collective, values: &Tensor<Cuda>) {
        let (size, rounds) = (self.host.size() as u64, collective.rounds());
        let bytes = rounds * values.bytes() * (size - 1) / size;
        self.session.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns whether values are summed in a wider type than the stored type: a two-rank sum is rounded only
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

/// Rejects cuDNN, which may build and load plans at any time.
fn check_attention(ranks: usize, has_cudnn: bool) -> Result<()> {
    if ranks == 1 || !has_cudnn {
        return Ok(());
    }
    let reason = "cuDNN builds and loads its plans while ranks wait for each other, which may never end; \
                  jobs over NCCL compute attention by our own kernels"
        .to_owned();
    Err(Error::InvalidSetting { setting: "attention", reason })
}

/// Loads the kernels for bf16 sums in `f32`.
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

/// Creates a communicator id on the leading rank.
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
        let split = self.session.connecting(|| self.split_off(at, color, key))?;
        Ok(split.map(|made| Arc::new(made) as Arc<dyn DeviceComm<Cuda>>))
    }

    fn is_matched_by_order(&self) -> bool {
        true
    }

    fn bytes_sent(&self) -> u64 {
        self.session.bytes_sent.load(Ordering::Relaxed)
    }

    fn open_lanes(&self, at: StepContext, lanes: &BTreeSet<MessageLane>) -> Result<()> {
        self.session.connecting(|| self.messages().open(&self.session, &*self.host, at, lanes))
    }

    fn connect_time(&self) -> Duration {
        self.session.connect_time()
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
        let number = own.name_number(to);
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
        let number = own.name_number(from);
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

/// Collective kind, with the rank parts.
pub(super) enum Collective {
    AllReduce,
    ReduceScatter(Vec<usize>),
    AllGather(Vec<usize>),
}

impl Collective {
    /// Checks the rank parts.
    pub(super) fn check(&self, size: usize, values: &Tensor<Cuda>) -> Result<()> {
        let parts = match self {
            Self::AllReduce => return Ok(()),
            Self::ReduceScatter(parts) | Self::AllGather(parts) => parts,
        };
        let (sum, elements) = (parts.iter().sum::<usize>(), values.len());
        if parts.len() == size && sum == elements {
            return Ok(());
        }
        Err(dflop_comm::Error::Parts { parts: parts.len(), sum, size, elements }.into())
    }

    pub(super) fn issue(
        &self,
        group: &Communicator,
        stream: &Stream,
        values: &Tensor<Cuda>,
    ) -> crate::error::Result<()> {
        match self {
            Self::AllReduce => group.all_reduce(stream, values),
            Self::ReduceScatter(parts) => group.reduce_scatter(stream, values, parts),
            Self::AllGather(parts) => group.all_gather(stream, values, parts),
        }
    }

    /// Returns how many times an element is passed around a ring.
    pub(super) const fn rounds(&self) -> u64 {
        match self {
            Self::AllReduce => 2,
            Self::ReduceScatter(_) | Self::AllGather(_) => 1,
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter(_) => "reduce-scatter",
            Self::AllGather(_) => "all-gather",
        }
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
