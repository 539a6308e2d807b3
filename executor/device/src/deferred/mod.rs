//! Test device that computes as late as possible, and in a different order than the calls.
//!
//! Host tasks as lane work.
//!
//! [`Deferred`] wraps a device that computes at once. It queues all work by lane and runs it only when a
//! result is read, choosing at every point among the lanes whose next work the events allow ([`Order`]). New
//! memory is poisoned with NaN, and freed memory must not be touched. Code that reads a result before it is
//! computed, that lacks an event, or that frees memory which another lane still uses therefore produces NaN
//! or an error; on a GPU it may go unnoticed. As on a GPU the first error stays: the remaining work is
//! dropped, and every later read reports the error. Reads are counted ([`Runtime::reads`]), so that a test
//! can bound them.

mod queue;

pub use queue::{DeferredEvent, Order};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dflop_comm::Buffer;
use queue::{HostWork, Place, Queue, Slot, Work};

use crate::error::{Error, Result};
use crate::ops::Device;
use crate::ops::argument::{Call, Places, Queues};
use crate::ops::elementwise::{CopyRange, Elementwise};
use crate::ops::operation::enqueue;
use crate::runtime::{Dtype, HostTask, Lane, Memory, Runtime, Span, Tensor, Transfer};

/// Runs the operations of a device late, in an order that events allow.
pub struct Deferred<D: Device> {
    inner: D,
    queue: Arc<Queue<D>>,
    reads: Arc<AtomicU64>,
}

impl<D: Device> Clone for Deferred<D> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), queue: Arc::clone(&self.queue), reads: Arc::clone(&self.reads) }
    }
}

impl<D: Device> Deferred<D> {
    /// Creates a device that runs the work for `inner` in this order.
    #[must_use]
    pub fn new(inner: D, order: Order) -> Self {
        Self { inner, queue: Arc::new(Queue::new(order)), reads: Arc::default() }
    }

    /// Returns the computing device.
    #[must_use]
    pub const fn inner(&self) -> &D {
        &self.inner
    }

    /// Runs all queued work.
    fn drain(&self) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.queue.drain(&self.inner)
    }

    /// Returns inner device memory, which the queued work fills.
    fn tensor(&self, dtype: Dtype, len: usize, contents: Tensor<D>) -> Tensor<Self> {
        let slot = Arc::new(Slot::new(contents));
        Tensor::new(DeferredMemory::new(slot, dtype, len, Arc::clone(&self.queue)), len)
    }
}

impl<D: Device> Runtime for Deferred<D> {
    type Memory = DeferredMemory<D>;
    type Event = DeferredEvent<D>;

    fn name(&self) -> String {
        format!("{}, late", self.inner.name())
    }

    fn host_threads(&self) -> Option<usize> {
        self.inner.host_threads()
    }

    fn storage(&self) -> Dtype {
        self.inner.storage()
    }

    fn alloc_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let contents = match dtype {
            Dtype::U32 => self.inner.upload_indices(&vec![u32::MAX; len])?,
            dtype => self.inner.upload_as(dtype, &vec![f32::NAN; len])?,
        };
        Ok(self.tensor(dtype, len, contents))
    }

    fn zeros_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let contents = self.inner.zeros_as(dtype, len)?;
        let mut tensor = self.tensor(dtype, len, contents);
        self.zero(&mut tensor)?;
        Ok(tensor)
    }

    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>> {
        let tensor = self.alloc_as(dtype, values.len())?;
        enqueue(self, tensor, values, move |inner, values| inner.upload_as(dtype, values))
    }

    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()> {
        enqueue(self, (), (values, into), |inner, (values, into)| inner.write(values, into))
    }

    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()> {
        enqueue(self, (), (values, into), |inner, (values, into)| inner.write_scalars(values, into))
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>> {
        let tensor = self.alloc_as(Dtype::U32, values.len())?;
        enqueue(self, tensor, values, D::upload_indices)
    }

    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.drain()?;
        Place::of(tensor).with(&self.inner, D::download)
    }

    fn download_in_pass(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.queue.drain_lane(Lane::Compute, &self.inner)?;
        Place::of(tensor).with(&self.inner, D::download)
    }

    fn read(&self, scalars: &Tensor<Self>) -> Result<Vec<f64>> {
        self.drain()?;
        Place::of(scalars).with(&self.inner, D::read)
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    fn memory_used_bytes(&self) -> u64 {
        self.inner.memory_used_bytes()
    }

    fn mark(&self, lane: Lane) -> Result<DeferredEvent<D>> {
        Ok(self.queue.mark(lane))
    }

    fn after(&self, lane: Lane, event: &DeferredEvent<D>) -> Result<()> {
        self.queue.push(lane, Work::Wait(event.clone()));
        Ok(())
    }

    fn busy_ns(&self, start: &DeferredEvent<D>, end: &DeferredEvent<D>) -> u64 {
        match (start.reached(), end.reached()) {
            (Some(start), Some(end)) => self.inner.busy_ns(start, end),
            _ => 0,
        }
    }

    fn elapsed_ns(&self, from: &DeferredEvent<D>, to: &DeferredEvent<D>) -> Option<i64> {
        self.inner.elapsed_ns(from.reached()?, to.reached()?)
    }

    fn host_task(
        &self,
        lane: Lane,
        after: &DeferredEvent<D>,
        input: Option<Tensor<Self>>,
        output: Option<(Dtype, usize)>,
        task: Box<dyn HostTask>,
    ) -> Result<Transfer<Self>> {
        self.after(lane, after)?;
        let output = output.map(|(dtype, len)| self.alloc_as(dtype, len)).transpose()?;
        let place = output.as_ref().map(Place::of);
        let (device, start) = (self.clone(), self.queue.mark(lane));
        self.queue.push(lane, Work::Host(HostWork::new(input, place, task)));
        let (done, span) = (self.queue.mark(lane), Span::default());
        span.set(start, done.clone());
        Ok(Transfer::timed(span, move |lane| {
            device.after(lane, &done)?;
            Ok(output)
        }))
    }

    fn host_update(&self, tensor: &mut Tensor<Self>, task: Box<dyn HostTask>) -> Result<()> {
        self.queue.push(Lane::Compute, Work::Host(HostWork::update(Place::of(tensor), task)));
        Ok(())
    }

    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        body()
    }
}

impl<D: Device> Queues for Deferred<D> {
    type Inner = D;
    type Place = Place<D>;

    fn place(tensor: &Tensor<Self>) -> Place<D> {
        Place::of(tensor)
    }

    fn push(&self, Places { reads, writes }: Places<Self>, run: Call<D>) {
        self.queue.push(Lane::Compute, Work::Compute { reads, writes, run });
    }

    fn overwrite(inner: &D, from: &Tensor<D>, to: &mut Tensor<D>) -> Result<()> {
        inner.copy_ranges(&[CopyRange { from: 0, to: 0, len: from.len() }], from, to)
    }
}

/// Returns the elements of an inner device tensor for a host task.
fn contents<D: Device>(inner: &D, tensor: &Tensor<D>, is_widened: bool) -> Result<Buffer> {
    match tensor.dtype() {
        Dtype::F64 => Ok(Buffer::F64(inner.read(tensor)?)),
        Dtype::Bf16 if !is_widened => {
            let values = inner.download(tensor)?;
            Ok(Buffer::Bf16(values.into_iter().map(half::bf16::from_f32).collect()))
        }
        Dtype::F32 | Dtype::Bf16 => Ok(Buffer::F32(inner.download(tensor)?)),
        Dtype::U32 => Err(Error::InvalidSetting { setting: "tensor", reason: "indices stay".into() }),
    }
}

#[cfg(test)]
mod tests;

/// Allocation on a deferred device.
pub struct DeferredMemory<D: Device> {
    slot: Arc<Slot<D>>,
    dtype: Dtype,
    len: usize,
    queue: Arc<Queue<D>>,
}

impl<D: Device> DeferredMemory<D> {
    fn new(slot: Arc<Slot<D>>, dtype: Dtype, len: usize, queue: Arc<Queue<D>>) -> Self {
        Self { slot, dtype, len, queue }
    }
}

impl<D: Device> Memory for DeferredMemory<D> {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }
}

impl<D: Device> Drop for DeferredMemory<D> {
    /// Frees in compute lane order, as a stream-ordered allocator does: work in other lanes that no event
    /// orders before it finds the memory freed.
    fn drop(&mut self) {
        self.queue.push(Lane::Compute, Work::Free(Arc::clone(&self.slot)));
    }
}
