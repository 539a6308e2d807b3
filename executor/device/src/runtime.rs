//! Device features apart from operations: memory, tensors and element types, lanes and events, host tasks.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dflop_comm::{Buffer, Slice};

use crate::error::{Error, Result};

/// Tensor element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "variants are named as the types")]
pub enum Dtype {
    F32,
    Bf16,
    F64,
    U32,
}

impl Dtype {
    /// Returns the element size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::F64 => 8,
        }
    }
}

/// Range in a device allocation.
///
/// The caller knows the shape. No two tensors overlap: [`split`](Self::split) and [`join`](Self::join)
/// consume the inputs, so `&mut Tensor` is exclusive access to the elements.
pub struct Tensor<D: Runtime> {
    memory: Arc<D::Memory>,
    first: usize,
    len: usize,
}

impl<D: Runtime> Tensor<D> {
    /// Creates a tensor from the first `len` elements in an allocation.
    ///
    /// # Panics
    /// If the allocation is shorter.
    #[must_use]
    pub fn new(memory: D::Memory, len: usize) -> Self {
        assert!(len <= memory.len(), "a tensor lies in its allocation");
        Self { memory: Arc::new(memory), first: 0, len }
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the tensor has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.memory.dtype()
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.len * self.dtype().bytes()) as u64
    }

    /// Returns the allocation that contains the elements, for device implementations.
    #[must_use]
    pub fn memory(&self) -> &Arc<D::Memory> {
        &self.memory
    }

    /// Returns the element range in the allocation, for device implementations.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.first..self.first + self.len
    }

    /// Returns the allocation if no other tensor is in it.
    ///
    /// # Errors
    /// The tensor itself, if there is another tensor.
    pub fn into_memory(self) -> Result<D::Memory, Self> {
        let Self { memory, first, len } = self;
        Arc::try_unwrap(memory).map_err(|memory| Self { memory, first, len })
    }

    /// Splits the tensor into consecutive ranges with these lengths.
    ///
    /// # Panics
    /// If the lengths do not add up to the tensor length.
    #[must_use]
    pub fn split(self, lens: &[usize]) -> Vec<Self> {
        assert_eq!(lens.iter().sum::<usize>(), self.len, "the ranges cover the tensor");
        let mut first = self.first;
        let mut next = |&len: &usize| {
            first += len;
            Self { memory: Arc::clone(&self.memory), first: first - len, len }
        };
        lens.iter().map(&mut next).collect()
    }

    /// Joins consecutive ranges in the same allocation: the inverse of [`split`](Self::split).
    ///
    /// # Panics
    /// If there are no ranges, or they are not consecutive in the same allocation.
    #[must_use]
    pub fn join(parts: Vec<Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().expect("at least one tensor is united");
        for part in parts {
            let follows = Arc::ptr_eq(&whole.memory, &part.memory) && part.first == whole.range().end;
            assert!(follows, "united tensors follow each other in one allocation");
            whole.len += part.len;
        }
        whole
    }
}

impl<D: Runtime> fmt::Debug for Tensor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {:?})", self.dtype(), self.range())
    }
}

/// Consecutive tensors in the same allocation, so that a single operation or message covers all of them.
pub struct Bucket<D: Runtime> {
    parts: Vec<Tensor<D>>,
}

impl<D: Runtime> Bucket<D> {
    /// Splits an allocation into tensors with these lengths.
    ///
    /// # Panics
    /// If the lengths do not add up to the tensor length.
    #[must_use]
    pub fn new(whole: Tensor<D>, lens: &[usize]) -> Self {
        Self { parts: whole.split(lens) }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.iter().map(Tensor::len).sum()
    }

    /// Returns whether the bucket has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tensors in range order.
    #[must_use]
    pub fn parts(&self) -> &[Tensor<D>] {
        &self.parts
    }

    /// Returns the mutable tensors in range order.
    pub fn parts_mut(&mut self) -> &mut [Tensor<D>] {
        &mut self.parts
    }

    /// Takes the complete allocation out, and leaves a bucket without elements; [`close`](Self::close)
    /// restores it.
    ///
    /// # Panics
    /// If a tensor was replaced by a tensor in a different allocation.
    pub fn open(&mut self) -> (Tensor<D>, Vec<usize>) {
        let lens = self.parts.iter().map(Tensor::len).collect();
        (Tensor::join(std::mem::take(&mut self.parts)), lens)
    }

    /// Restores the allocation that [`open`](Self::open) took out.
    pub fn close(&mut self, whole: Tensor<D>, lens: &[usize]) {
        self.parts = whole.split(lens);
    }

    /// Calls an operation on all elements as a single tensor.
    ///
    /// # Errors
    /// Errors from the operation.
    pub fn with_whole<R, E>(&mut self, run: impl FnOnce(&mut Tensor<D>) -> Result<R, E>) -> Result<R, E> {
        let (mut whole, lens) = self.open();
        let result = run(&mut whole);
        self.close(whole, &lens);
        result
    }
}

/// Waits for a communication: orders a lane after it.
type Wait<D> = Box<dyn FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send>;

/// Communication in progress, which owns a tensor until it is waited for.
#[must_use = "a communication is not known to be done before it is waited for"]
pub struct Transfer<D: Runtime> {
    wait: Wait<D>,
    span: Span<D>,
}

impl<D: Runtime> Transfer<D> {
    /// Creates a transfer from a function that orders a lane after it and returns the tensor. The transfer
    /// times are never known.
    pub fn new(wait: impl FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send + 'static) -> Self {
        Self::timed(Span::default(), wait)
    }

    /// Creates a transfer as in [`new`](Self::new), with times set by the device.
    pub fn timed(
        span: Span<D>,
        wait: impl FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send + 'static,
    ) -> Self {
        Self { wait: Box::new(wait), span }
    }

    /// Returns the communication times, which are known once the device has completed the communication and
    /// it was waited for.
    #[must_use]
    pub fn span(&self) -> Span<D> {
        self.span.clone()
    }

    /// Orders further work in a lane after the communication, and returns the received tensor; `None` for a
    /// send.
    ///
    /// # Errors
    /// [`crate::Error::Comm`] if the job has ended, [`crate::Error::OutOfMemory`].
    pub fn wait(self, lane: Lane) -> Result<Option<Tensor<D>>> {
        (self.wait)(lane)
    }
}

/// Start and end of a communication.
pub struct Span<D: Runtime>(Arc<OnceLock<[D::Event; 2]>>);

impl<D: Runtime> Span<D> {
    /// Sets start and end; the first values stay.
    pub fn set(&self, start: D::Event, end: D::Event) {
        // a communication has one end
        let _ = self.0.set([start, end]);
    }

    /// Returns start and end, once they are known.
    #[must_use]
    pub fn get(&self) -> Option<&[D::Event; 2]> {
        self.0.get()
    }
}

impl<D: Runtime> Clone for Span<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Runtime> Default for Span<D> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// Waits for numbers that are on their way to the host, and returns them.
pub type LateRead = Box<dyn FnOnce() -> Result<Vec<f64>> + Send>;

/// Kernels that a device has loaded so far, on all clones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelLoads {
    /// Number of modules: kernel files, each for a set of types.
    pub modules: u64,
    /// Number of modules that were compiled, because they were not in the cache.
    pub compiled: u64,
    /// Time for compiling and loading.
    pub time: Duration,
}

/// Device allocation.
pub trait Memory: Send + Sync + 'static {
    /// Returns the number of elements.
    fn len(&self) -> usize;

    /// Returns whether the allocation has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element type.
    fn dtype(&self) -> Dtype;
}

/// Order of work on a device: work in the same lane runs in call order, work in different lanes in any order
/// that events allow. A stream, on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Operations.
    Compute,
    /// Communication with a rank group, or with a single rank in one direction.
    Communication(u64),
}

/// Device memory, lanes and events.
///
/// Cheap to clone: clones are the same device. Calls may return before the work is done; work errors then
/// come from a later call. Only [`read`](Self::read), [`download`](Self::download) and
/// [`download_in_pass`](Self::download_in_pass) wait for the device; these calls are counted.
pub trait Runtime: Clone + Send + Sync + Sized + 'static {
    /// Allocations.
    type Memory: Memory;
    /// Point in a lane.
    type Event: Clone + Send + Sync + 'static;

    /// Returns the processor name and other properties that affect times, as recorded in profiles.
    fn name(&self) -> String;
    /// Returns the number of computing threads in this process; `None` if another processor computes.
    fn host_threads(&self) -> Option<usize>;
    /// Returns the storage type for weights and activations.
    fn storage(&self) -> Dtype;
    /// Allocates memory with unspecified contents for a pass, in the type for weights and activations.
    fn alloc(&self, len: usize) -> Result<Tensor<Self>> {
        self.alloc_as(self.storage(), len)
    }
    /// Allocates memory with unspecified contents for a pass.
    fn alloc_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>>;
    /// Allocates zeros that stay for many passes: gradients, master weights, optimizer moments.
    fn zeros_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>>;
    /// Copies numbers to the device, in the type for weights and activations.
    fn upload(&self, values: &[f32]) -> Result<Tensor<Self>> {
        self.upload_as(self.storage(), values)
    }
    /// Copies numbers to the device, in this type.
    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>>;
    /// Copies numbers to tensor elements.
    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()>;
    /// Copies a few numbers to elements in an `f64` tensor.
    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()>;
    /// Copies indices to the device.
    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>>;
    /// Returns this device for inputs to later passes: [`upload_as`](Self::upload_as) and
    /// [`upload_indices`](Self::upload_indices) copy independently of all lanes, also while they compute, and
    /// return once the numbers are on the device. Default: the device itself, for devices whose copies wait
    /// for no lane.
    fn beside(&self) -> Result<Self> {
        Ok(self.clone())
    }
    /// Copies numbers from the device, widened to `f32`. Waits for the device.
    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>>;
    /// Copies numbers that the rest of a pass depends on, like [`download`](Self::download), while other
    /// lanes continue: they may wait for ranks that wait for this pass. Waits only for the compute lane.
    fn download_in_pass(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.download(tensor)
    }
    /// Copies a few numbers from the device, widened to `f64`. Waits for the device.
    fn read(&self, scalars: &Tensor<Self>) -> Result<Vec<f64>>;
    /// Starts [`read`](Self::read) of the numbers that a tensor has at this point of the compute lane; the
    /// returned call waits for this point, and not for later work. Default: reads at once.
    fn read_later(&self, scalars: &Tensor<Self>) -> Result<LateRead> {
        let values = self.read(scalars)?;
        Ok(Box::new(move || Ok(values)))
    }

    /// Returns the number of calls so far that waited for the device, on all clones.
    fn reads(&self) -> u64;
    /// Returns the number of bytes in all live tensors.
    fn memory_used_bytes(&self) -> u64;

    /// Returns the point in a lane after all work so far.
    fn mark(&self, lane: Lane) -> Result<Self::Event>;
    /// Orders further work in a lane after an event.
    fn after(&self, lane: Lane, event: &Self::Event) -> Result<()>;
    /// Returns the time that the device worked between two compute lane events from the same thread, in
    /// nanoseconds; 0 before the device has reached them.
    fn busy_ns(&self, start: &Self::Event, end: &Self::Event) -> u64;
    /// Returns the time from an event to a second event in any lane, in nanoseconds, negative if the second
    /// event came first; `None` before the device has reached them.
    fn elapsed_ns(&self, from: &Self::Event, to: &Self::Event) -> Option<i64>;

    /// Runs a host task in a lane, after an event.
    ///
    /// - `input`: consumed; the contents are passed to the task
    /// - `output`: type and length of the task result, which [`Transfer::wait`] returns
    fn host_task(
        &self,
        lane: Lane,
        after: &Self::Event,
        input: Option<Tensor<Self>>,
        output: Option<(Dtype, usize)>,
        task: Box<dyn HostTask>,
    ) -> Result<Transfer<Self>>;
    /// Runs a host task that changes a tensor, in compute lane order. For a task that adds numbers, bf16 is
    /// widened to `f32`.
    fn host_update(&self, tensor: &mut Tensor<Self>, task: Box<dyn HostTask>) -> Result<()>;
    /// Loads what work needs: kernels, product plans, host memory. A device that loads nothing does not run
    /// the work; other devices run it twice, first without computing, so it must not depend on results, or
    /// change anything that is needed. Call it before messages are posted: a load may wait for all device
    /// work.
    ///
    /// # Errors
    /// Errors from the work.
    fn prepare<E: From<Error>>(&self, work: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        drop(work);
        Ok(())
    }

    /// Returns the kernels loaded so far. Default: none, for devices without kernels to load.
    fn kernel_loads(&self) -> KernelLoads {
        KernelLoads::default()
    }

    /// Runs a closure in which operations start without switching threads.
    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R;
}

/// Exchange with other ranks through host memory.
///
/// A device either calls [`start`](Self::start) and [`finish`](Self::finish), with other work between them,
/// or [`run`](Self::run), if the exchange changes elements and the caller waits for it.
pub trait HostTask: Send {
    /// Starts the exchange, without waiting for other ranks.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn start(&mut self, input: Option<Buffer>) -> Result<()>;

    /// Returns whether [`finish`](Self::finish) would not wait.
    fn is_ready(&self) -> bool;

    /// Waits for the exchange, and returns the result.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn finish(self: Box<Self>) -> Result<Option<Buffer>>;

    /// Waits like [`finish`](Self::finish), and returns the time at which the exchange was complete. Default:
    /// the end of the wait.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn finish_timed(self: Box<Self>) -> Result<(Option<Buffer>, Instant)> {
        let result = self.finish()?;
        Ok((result, Instant::now()))
    }

    /// Returns whether numbers are added, so that bf16 is widened to `f32` for the exchange.
    fn adds(&self) -> bool;

    /// Exchanges elements in place, and waits.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn run(self: Box<Self>, values: Slice<'_>) -> Result<()>;
}
