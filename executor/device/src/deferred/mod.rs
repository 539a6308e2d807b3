//! Test device that computes as late as possible, and in another order than the calls.
//!
//! [`Deferred`] wraps a device that computes at once. It queues all work by lane and runs it only when a
//! result is read, choosing at every point among the lanes whose next work the events allow ([`Order`]). New
//! memory is poisoned with NaN, and memory that was freed must not be touched. Code that reads a result
//! before it is computed, that lacks an event, or that frees memory which another lane still uses therefore
//! gives NaN or an error; on a GPU it may go unnoticed. Reads are counted ([`Runtime::reads`]), so that a
//! test can bound them.

mod operations;
mod queue;
mod slot;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dflop_comm::Buffer;

use crate::device::Device;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::runtime::{HostTask, Lane, Runtime, Tensor, Transfer};
pub use queue::{DeferredEvent, Order};
use queue::{HostWork, Queue, Work};
pub use slot::DeferredMemory;
use slot::{Place, Slot};

/// Runs the operations of another device late, in an order that events allow.
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
    /// Makes a device that runs the work of `inner` in this order.
    #[must_use]
    pub fn new(inner: D, order: Order) -> Self {
        Self { inner, queue: Arc::new(Queue::new(order)), reads: Arc::default() }
    }

    /// Device that computes.
    #[must_use]
    pub const fn inner(&self) -> &D {
        &self.inner
    }

    /// Runs all queued work.
    fn drain(&self) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.queue.drain(&self.inner)
    }

    /// Memory of the inner device, which the queued work fills.
    fn tensor(&self, dtype: Dtype, len: usize, contents: Tensor<D>) -> Tensor<Self> {
        let slot = Arc::new(Slot::new(contents));
        Tensor::new(DeferredMemory::new(slot, dtype, len, Arc::clone(&self.queue)), len)
    }

    /// Queues an operation of the compute lane.
    fn enqueue(
        &self,
        reads: &[&Tensor<Self>],
        writes: &[&Tensor<Self>],
        run: impl FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()> + Send + 'static,
    ) {
        let places = |tensors: &[&Tensor<Self>]| tensors.iter().map(|tensor| Place::of(tensor)).collect();
        let work = Work::Compute { reads: places(reads), writes: places(writes), run: Box::new(run) };
        self.queue.push(Lane::Compute, work);
    }
}

impl<D: Device> Runtime for Deferred<D> {
    type Memory = DeferredMemory<D>;
    type Event = DeferredEvent<D>;

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
        crate::ops::elementwise::Elementwise::zero(self, &mut tensor)?;
        Ok(tensor)
    }

    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>> {
        let tensor = self.alloc_as(dtype, values.len())?;
        let values = values.to_vec();
        self.enqueue(&[], &[&tensor], move |inner, _, writes| {
            let uploaded = inner.upload_as(dtype, &values)?;
            slot::overwrite(inner, &uploaded, writes[0])
        });
        Ok(tensor)
    }

    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()> {
        let values = values.to_vec();
        self.enqueue(&[], &[into], move |inner, _, writes| inner.write(&values, writes[0]));
        Ok(())
    }

    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()> {
        let values = values.to_vec();
        self.enqueue(&[], &[into], move |inner, _, writes| inner.write_scalars(&values, writes[0]));
        Ok(())
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>> {
        let tensor = self.alloc_as(Dtype::U32, values.len())?;
        let values = values.to_vec();
        self.enqueue(&[], &[&tensor], move |inner, _, writes| {
            slot::overwrite(inner, &inner.upload_indices(&values)?, writes[0])
        });
        Ok(tensor)
    }

    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.drain()?;
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
        self.queue.push(lane, Work::Host(HostWork::new(input, place, task)));
        let (device, done) = (self.clone(), self.queue.mark(lane));
        Ok(Transfer::new(move |lane| {
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

/// Returns the elements of a tensor of the inner device for a task of the host.
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
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::ops::elementwise::Elementwise;
    use crate::ops::every_operation;

    #[test]
    fn operations_have_the_bits_of_the_inner_device_in_every_order() {
        let cpu = Cpu::new(1).unwrap();
        let expected = every_operation::all(&cpu).unwrap();
        for number in 0..Order::NUMBER {
            let device = Deferred::new(cpu.clone(), Order::numbered(number));
            let found = every_operation::all(&device).unwrap();
            for ((name, expected), (_, found)) in expected.iter().zip(&found) {
                assert_eq!(expected, found, "{name}, order {number}");
            }
            device.drain().unwrap();
        }
        assert_eq!(cpu.memory_used_bytes(), 0, "all memory was freed");
    }

    /// Adds 1 to what it gets.
    struct Increment(Option<Buffer>);

    impl HostTask for Increment {
        fn start(&mut self, input: Option<Buffer>) -> Result<()> {
            self.0 = input;
            Ok(())
        }
        fn is_ready(&self) -> bool {
            true
        }
        fn finish(self: Box<Self>) -> Result<Option<Buffer>> {
            let Some(Buffer::F32(values)) = self.0 else { return Ok(None) };
            Ok(Some(Buffer::F32(values.into_iter().map(|value| value + 1.0).collect())))
        }
        fn adds(&self) -> bool {
            false
        }
        fn run(self: Box<Self>, _: dflop_comm::Slice<'_>) -> Result<()> {
            Ok(())
        }
    }

    fn device(order: Order) -> Deferred<Cpu> {
        Deferred::new(Cpu::new(1).unwrap(), order)
    }

    /// Sends `x` through the host in another lane, behind an event before or after `x` was changed.
    fn exchanged(order: Order, is_ordered: bool) -> Result<Vec<f32>> {
        let device = device(order);
        let early = device.mark(Lane::Compute)?;
        let mut x = device.upload(&[1.0, 2.0])?;
        device.scale(10.0, &mut x)?;
        let after = if is_ordered { device.mark(Lane::Compute)? } else { early };
        let lane = Lane::Communication(7);
        let output = Some((Dtype::F32, 2));
        let transfer = device.host_task(lane, &after, Some(x), output, Box::new(Increment(None)))?;
        device.download(&transfer.wait(Lane::Compute)?.expect("it has an output"))
    }

    #[test]
    fn a_missing_event_is_noticed_in_some_order() {
        let mut wrong = 0;
        for number in 0..Order::NUMBER {
            let order = Order::numbered(number);
            assert_eq!(exchanged(order, true).unwrap(), [11.0, 21.0], "{order:?}");
            wrong += usize::from(exchanged(order, false).unwrap() != [11.0, 21.0]);
        }
        assert!(wrong > 0, "no order runs the exchange too early");
    }

    /// The host owns no part of what it exchanges: the caller frees it in the compute lane meanwhile.
    #[test]
    fn memory_that_is_freed_too_early_is_an_error() {
        let device = device(Order::ComputeFirst);
        let x = device.upload(&[1.0]).unwrap();
        let place = Place::of(&x);
        let lane = Lane::Communication(1);
        device.queue.push(lane, Work::Host(HostWork::update(place, Box::new(Increment(None)))));
        drop(x);
        let scalar = device.zeros_as(Dtype::F64, 1).unwrap();
        let error = device.read(&scalar).unwrap_err().to_string();
        assert!(error.contains("freed before work of another lane"), "{error}");
    }

    #[test]
    fn nothing_runs_before_a_read_and_reads_are_counted() {
        let device = device(Order::numbered(3));
        let mut x = device.zeros(3).unwrap();
        let y = device.upload(&[1.0, 2.0, 3.0]).unwrap();
        device.add(&y, &mut x).unwrap();
        let before = Place::of(&x).with(&device.inner, Cpu::download).unwrap();
        assert!(before.iter().all(|value| value.is_nan()), "{before:?}");
        assert_eq!((device.reads(), device.download(&x).unwrap()), (0, vec![1.0, 2.0, 3.0]));
        assert_eq!(device.reads(), 1);
    }
}
