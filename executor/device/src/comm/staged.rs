//! Tensor communicator over a host communicator: threads, TCP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use dflop_comm::{Buffer, Comm, Handle, Payload, PayloadShape, Slice, StepContext};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfFloatVecExt;

use super::{DeviceComm, RowShape};
use crate::error::Result;
use crate::runtime::{Dtype, HostTask, Lane, Runtime, Tensor, Transfer};

/// Number of communicators so far: each has separate lanes.
static COMMUNICATORS: AtomicU64 = AtomicU64::new(0);

/// Reserves 2^32 communication lane numbers that no other communicator in this process uses; returns the
/// first.
#[must_use]
pub fn reserve_lanes() -> u64 {
    COMMUNICATORS.fetch_add(1, Ordering::Relaxed) << 32
}

/// Exchanges tensors through host memory over a [`Comm`].
pub struct Staged<D: Runtime> {
    device: D,
    comm: Arc<dyn Comm>,
    /// First lane of this communicator, for collectives; send and receive lanes for each rank follow.
    lane: u64,
    /// Whether collectives were started in the collective lane.
    has_started: AtomicBool,
}

impl<D: Runtime> Staged<D> {
    /// Creates a communicator for the ranks in `comm`, with tensors on `device`.
    #[must_use]
    pub fn new(device: D, comm: Arc<dyn Comm>) -> Self {
        Self { device, comm, lane: reserve_lanes(), has_started: AtomicBool::new(false) }
    }

    fn collectives(&self) -> Lane {
        Lane::Communication(self.lane)
    }

    /// Returns the lane for one rank and one direction: messages keep their order in the lane, and no message
    /// waits for a message in the opposite direction.
    fn with(&self, rank: usize, is_send: bool) -> Lane {
        Lane::Communication(self.lane + 1 + 2 * rank as u64 + u64::from(is_send))
    }

    fn update(&self, at: StepContext, values: &mut Tensor<D>, kind: Kind) -> Result<()> {
        kind.check(self.comm.size(), values)?;
        if self.has_started.load(Ordering::Relaxed) {
            // collectives in the lane come first, as on all ranks
            self.device.after(Lane::Compute, &self.device.mark(self.collectives())?)?;
        }
        // A single rank already has its sum: do not wait for the device. Indices have no sum.
        if self.comm.size() == 1 && values.dtype() != Dtype::U32 && self.comm.failure().is_none() {
            return Ok(());
        }
        let task = Collective { comm: Arc::clone(&self.comm), at, kind, is_widened: false, result: None };
        self.device.host_update(values, Box::new(task))
    }

    fn start(&self, at: StepContext, values: Tensor<D>, kind: Kind, after: &D::Event) -> Result<Transfer<D>> {
        kind.check(self.comm.size(), &values)?;
        self.has_started.store(true, Ordering::Relaxed);
        let output = Some((values.dtype(), values.len()));
        let task = Collective { comm: Arc::clone(&self.comm), at, kind, is_widened: false, result: None };
        self.device.host_task(self.collectives(), after, Some(values), output, Box::new(task))
    }
}

impl<D: Runtime> DeviceComm<D> for Staged<D> {
    fn host(&self) -> &dyn Comm {
        &*self.comm
    }

    fn shared_host(&self) -> Arc<dyn Comm> {
        Arc::clone(&self.comm)
    }

    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn DeviceComm<D>>>> {
        let group = self.comm.split(at, color, key)?;
        let over =
            |group| Arc::new(Self::new(self.device.clone(), Arc::from(group))) as Arc<dyn DeviceComm<D>>;
        Ok(group.map(over))
    }

    fn send(
        &self,
        to: usize,
        tag: u64,
        at: StepContext,
        rows: Tensor<D>,
        cols: usize,
        after: &D::Event,
    ) -> Result<Transfer<D>> {
        let task = Send { comm: Arc::clone(&self.comm), to, tag, at, cols, handle: None };
        self.device.host_task(self.with(to, true), after, Some(rows), None, Box::new(task))
    }

    fn recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: RowShape,
        after: &D::Event,
    ) -> Result<Transfer<D>> {
        let dtype = match shape.dtype {
            Dtype::Bf16 => dflop_comm::Dtype::Bf16,
            Dtype::F64 => dflop_comm::Dtype::F64,
            Dtype::F32 | Dtype::U32 => dflop_comm::Dtype::F32,
        };
        let payload = PayloadShape { dtype, rows: shape.rows, cols: shape.cols };
        let task = Recv { comm: Arc::clone(&self.comm), from, tag, at, shape: payload, handle: None };
        let output = Some((shape.dtype, shape.rows * shape.cols));
        self.device.host_task(self.with(from, false), after, None, output, Box::new(task))
    }

    fn all_reduce(&self, at: StepContext, values: &mut Tensor<D>) -> Result<()> {
        self.update(at, values, Kind::AllReduce)
    }

    fn start_all_reduce(&self, at: StepContext, values: Tensor<D>, after: &D::Event) -> Result<Transfer<D>> {
        self.start(at, values, Kind::AllReduce, after)
    }

    fn reduce_scatter(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()> {
        self.update(at, values, Kind::ReduceScatter(parts.to_vec()))
    }

    fn start_reduce_scatter(
        &self,
        at: StepContext,
        values: Tensor<D>,
        parts: &[usize],
        after: &D::Event,
    ) -> Result<Transfer<D>> {
        self.start(at, values, Kind::ReduceScatter(parts.to_vec()), after)
    }

    fn all_gather(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()> {
        self.update(at, values, Kind::AllGather(parts.to_vec()))
    }

    fn start_all_gather(
        &self,
        at: StepContext,
        values: Tensor<D>,
        parts: &[usize],
        after: &D::Event,
    ) -> Result<Transfer<D>> {
        self.start(at, values, Kind::AllGather(parts.to_vec()), after)
    }
}

struct Send {
    comm: Arc<dyn Comm>,
    to: usize,
    tag: u64,
    at: StepContext,
    cols: usize,
    handle: Option<Handle<()>>,
}

impl HostTask for Send {
    fn start(&mut self, input: Option<Buffer>) -> Result<()> {
        let Some(buffer) = input else { return Ok(()) };
        let rows = buffer.elements() / self.cols.max(1);
        let payload = Payload::new(rows, self.cols, buffer)?;
        self.handle = Some(self.comm.start_send(self.to, self.tag, self.at, payload)?);
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.handle.as_ref().is_none_or(Handle::is_complete)
    }

    fn finish(self: Box<Self>) -> Result<Option<Buffer>> {
        self.finish_timed().map(|(buffer, _)| buffer)
    }

    fn finish_timed(self: Box<Self>) -> Result<(Option<Buffer>, Instant)> {
        let sent = self.handle.map(Handle::wait_timed).transpose()?;
        Ok((None, sent.map_or_else(Instant::now, |((), end)| end)))
    }

    fn adds(&self) -> bool {
        false
    }

    fn run(self: Box<Self>, _: Slice<'_>) -> Result<()> {
        Ok(())
    }
}

struct Recv {
    comm: Arc<dyn Comm>,
    from: usize,
    tag: u64,
    at: StepContext,
    shape: PayloadShape,
    handle: Option<Handle<Payload>>,
}

impl HostTask for Recv {
    fn start(&mut self, _: Option<Buffer>) -> Result<()> {
        self.handle = Some(self.comm.start_recv(self.from, self.tag, self.at, self.shape)?);
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.handle.as_ref().is_none_or(Handle::is_complete)
    }

    fn finish(self: Box<Self>) -> Result<Option<Buffer>> {
        self.finish_timed().map(|(buffer, _)| buffer)
    }

    fn finish_timed(self: Box<Self>) -> Result<(Option<Buffer>, Instant)> {
        let Some((received, end)) = self.handle.map(Handle::wait_timed).transpose()? else {
            return Ok((None, Instant::now()));
        };
        Ok((Some(received.into_buffer()), end))
    }

    fn adds(&self) -> bool {
        false
    }

    fn run(self: Box<Self>, _: Slice<'_>) -> Result<()> {
        Ok(())
    }
}

/// Collective kind, with the rank parts.
enum Kind {
    AllReduce,
    ReduceScatter(Vec<usize>),
    AllGather(Vec<usize>),
}

impl Kind {
    /// Checks the rank parts.
    fn check<D: Runtime>(&self, size: usize, values: &Tensor<D>) -> Result<()> {
        let (Self::ReduceScatter(parts) | Self::AllGather(parts)) = self else { return Ok(()) };
        let (sum, elements) = (parts.iter().sum::<usize>(), values.len());
        if parts.len() == size && sum == elements {
            return Ok(());
        }
        Err(dflop_comm::Error::Parts { parts: parts.len(), sum, size, elements }.into())
    }
}

struct Collective {
    comm: Arc<dyn Comm>,
    at: StepContext,
    kind: Kind,
    /// Whether bf16 is summed in `f32`.
    is_widened: bool,
    /// Collective in progress, once it is started.
    result: Option<Handle<Buffer>>,
}

impl HostTask for Collective {
    fn start(&mut self, input: Option<Buffer>) -> Result<()> {
        let Some(mut values) = input else { return Ok(()) };
        if let (Buffer::Bf16(narrow), true) = (&values, self.adds()) {
            values = Buffer::F32(narrow.to_f32_vec());
            self.is_widened = true;
        }
        self.result = Some(match &self.kind {
            Kind::AllReduce => self.comm.start_all_reduce(self.at, values)?,
            Kind::ReduceScatter(parts) => self.comm.start_reduce_scatter(self.at, values, parts)?,
            Kind::AllGather(parts) => self.comm.start_all_gather(self.at, values, parts)?,
        });
        Ok(())
    }

    fn is_ready(&self) -> bool {
        self.result.as_ref().is_none_or(Handle::is_complete)
    }

    fn finish(self: Box<Self>) -> Result<Option<Buffer>> {
        self.finish_timed().map(|(buffer, _)| buffer)
    }

    fn finish_timed(self: Box<Self>) -> Result<(Option<Buffer>, Instant)> {
        let Some((buffer, end)) = self.result.map(Handle::wait_timed).transpose()? else {
            return Ok((None, Instant::now()));
        };
        match buffer {
            Buffer::F32(wide) if self.is_widened => Ok((Some(Buffer::Bf16(Vec::from_f32_slice(&wide))), end)),
            buffer => Ok((Some(buffer), end)),
        }
    }

    fn adds(&self) -> bool {
        !matches!(self.kind, Kind::AllGather(_))
    }

    fn run(self: Box<Self>, values: Slice<'_>) -> Result<()> {
        match &self.kind {
            Kind::AllReduce => self.comm.all_reduce(self.at, values)?,
            Kind::ReduceScatter(parts) => self.comm.reduce_scatter(self.at, values, parts)?,
            Kind::AllGather(parts) => self.comm.all_gather(self.at, values, parts)?,
        }
        Ok(())
    }
}
