//! CPU device: runs the functions in [`crate::ops`] on a thread pool.
//!
//! Operation operands in `f32`: borrowed, or widened from bf16 and rounded back.

mod memory;

use super::error::{Error, Result};
use super::runtime::{Dtype, HostTask, Lane, Memory, Runtime, Span, Tensor, Transfer};
use dflop_comm::Buffer;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use memory::BufferPool;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub use memory::CpuMemory;

/// Computes in `f32` on threads in this process.
///
/// Results are bit-equal for any number of threads: summation order depends only on shapes. Machines with
/// different vector instructions may round matrix products differently.
///
/// Work is done when a call returns; a communication in progress is the only exception. Weights and
/// activations are stored as `f32`, or as bf16 at 2 bytes per number ([`store`](Self::store)): an operation
/// then widens the operands, computes in `f32`, and rounds the stored numbers to the nearest bf16, ties to
/// even. Widened operands live as long as the operation: bf16 saves memory, not time.
#[derive(Debug, Clone)]
pub struct Cpu {
    pool: Arc<ThreadPool>,
    buffers: Arc<BufferPool>,
    storage: Dtype,
    reads: Arc<AtomicU64>,
}

impl Cpu {
    /// Maximum number of threads per device, above the core count of any machine.
    pub const THREADS_MAX: usize = 1024;

    /// Creates a device with this number of threads, at least one and at most
    /// [`THREADS_MAX`](Self::THREADS_MAX).
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] above that number, [`Error::Threads`] if the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > Self::THREADS_MAX {
            let reason = format!("expected at most {}, found {threads}", Self::THREADS_MAX);
            return Err(Error::InvalidSetting { setting: "threads", reason });
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|index| format!("dflop-compute-{index}"))
            .build()?;
        let buffers = Arc::default();
        Ok(Self { pool: Arc::new(pool), buffers, storage: Dtype::F32, reads: Arc::default() })
    }

    /// Sets the storage type for weights and activations. Default: `f32`.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a type other than `f32` and bf16.
    pub fn store(mut self, dtype: Dtype) -> Result<Self> {
        if !matches!(dtype, Dtype::F32 | Dtype::Bf16) {
            let reason = format!("expected F32 or Bf16, found {dtype:?}");
            return Err(Error::InvalidSetting { setting: "storage", reason });
        }
        self.storage = dtype;
        Ok(self)
    }

    /// Sets the limit for used bytes, for all clones of this device; allocations beyond it fail with
    /// [`Error::OutOfMemory`]. Default: no limit.
    #[must_use]
    pub fn memory_limit(self, bytes: u64) -> Self {
        self.buffers.limit(bytes);
        self
    }

    /// Returns the number of computing threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs on the thread pool; inside [`Runtime::run`] this is a plain call.
    pub(crate) fn on_pool<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        if self.pool.current_thread_index().is_some() {
            return body();
        }
        Busy::count(|| self.pool.install(|| Busy::time(body)))
    }

    /// Writes zeros to all elements.
    pub(crate) fn fill_with_zeros(&self, tensor: &mut Tensor<Self>) {
        match tensor.dtype() {
            Dtype::F32 => {
                let values = tensor.f32_mut();
                self.on_pool(|| values.par_chunks_mut(CHUNK).for_each(|values| values.fill(0.0)));
            }
            Dtype::Bf16 => tensor.bf16_mut().fill(half::bf16::ZERO),
            Dtype::F64 => tensor.f64_mut().fill(0.0),
            Dtype::U32 => tensor.u32_mut().fill(0),
        }
    }

    fn count_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the processor name, or the architecture if the system does not provide it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

impl Runtime for Cpu {
    type Memory = CpuMemory;
    type Event = CpuEvent;

    fn name(&self) -> String {
        let threads = self.threads();
        format!("{}, {threads} thread{}", processor(), if threads == 1 { "" } else { "s" })
    }

    fn host_threads(&self) -> Option<usize> {
        Some(self.threads())
    }

    fn storage(&self) -> Dtype {
        self.storage
    }

    fn alloc_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        if dtype == Dtype::F32 {
            return Ok(Tensor::new(self.buffers.take(len)?, len));
        }
        self.elements(dtype, len)
    }

    fn zeros_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let mut tensor = match dtype {
            // gradients and optimizer state stay for the complete run: do not hold a longer buffer
            Dtype::F32 => Tensor::new(self.buffers.take_exact(len)?, len),
            other => self.elements(other, len)?,
        };
        self.fill_with_zeros(&mut tensor);
        Ok(tensor)
    }

    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>> {
        if dtype == Dtype::F32 {
            let mut tensor = Tensor::new(self.buffers.take_exact(values.len())?, values.len());
            tensor.f32_mut().copy_from_slice(values);
            return Ok(tensor);
        }
        let mut tensor = self.elements(dtype, values.len())?;
        match dtype {
            Dtype::Bf16 => self.round(values, tensor.bf16_mut()),
            _ => tensor.f64_mut().iter_mut().zip(values).for_each(|(to, &from)| *to = f64::from(from)),
        }
        Ok(tensor)
    }

    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()> {
        assert_eq!(values.len(), into.len(), "every element is written");
        match into.dtype() {
            Dtype::Bf16 => self.round(values, into.bf16_mut()),
            _ => into.f32_mut().copy_from_slice(values),
        }
        Ok(())
    }

    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()> {
        into.f64_mut().copy_from_slice(values);
        Ok(())
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>> {
        let mut tensor = self.elements(Dtype::U32, values.len())?;
        tensor.u32_mut().copy_from_slice(values);
        Ok(tensor)
    }

    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.count_read();
        Ok(match tensor.dtype() {
            Dtype::F64 => tensor.f64().iter().map(|&value| value as f32).collect(),
            Dtype::U32 => tensor.u32().iter().map(|&value| value as f32).collect(),
            Dtype::F32 | Dtype::Bf16 => self.operand(tensor)?.to_vec(),
        })
    }

    fn read(&self, scalars: &Tensor<Self>) -> Result<Vec<f64>> {
        self.count_read();
        Ok(match scalars.dtype() {
            Dtype::F64 => scalars.f64().to_vec(),
            Dtype::U32 => scalars.u32().iter().map(|&value| f64::from(value)).collect(),
            Dtype::F32 | Dtype::Bf16 => {
                self.operand(scalars)?.iter().map(|&value| f64::from(value)).collect()
            }
        })
    }

    fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    fn memory_used_bytes(&self) -> u64 {
        self.buffers.used_bytes()
    }

    fn mark(&self, _: Lane) -> Result<CpuEvent> {
        Ok(Busy::now(self.pool.current_thread_index().is_some()))
    }

    fn after(&self, _: Lane, _: &CpuEvent) -> Result<()> {
        // work is done when its call returns
        Ok(())
    }

    fn busy_ns(&self, start: &CpuEvent, end: &CpuEvent) -> u64 {
        end.since(*start)
    }

    fn elapsed_ns(&self, from: &CpuEvent, to: &CpuEvent) -> Option<i64> {
        Some(from.elapsed_ns(*to))
    }

    fn host_task(
        &self,
        lane: Lane,
        _: &CpuEvent,
        input: Option<Tensor<Self>>,
        output: Option<(Dtype, usize)>,
        mut task: Box<dyn HostTask>,
    ) -> Result<Transfer<Self>> {
        let start = self.mark(lane)?;
        task.start(input.map(give).transpose()?)?;
        let (device, span) = (self.clone(), Span::default());
        let times = span.clone();
        Ok(Transfer::timed(span, move |_| {
            let (result, end) = task.finish_timed()?;
            times.set(start, start.at(end));
            match (result, output) {
                (Some(buffer), Some((dtype, _))) => device.adopt(dtype, buffer).map(Some),
                _ => Ok(None),
            }
        }))
    }

    fn host_update(&self, tensor: &mut Tensor<Self>, task: Box<dyn HostTask>) -> Result<()> {
        if tensor.dtype() == Dtype::F64 {
            return task.run(tensor.f64_mut().into());
        }
        if tensor.dtype() == Dtype::Bf16 && !task.adds() {
            return task.run(tensor.bf16_mut().into());
        }
        self.update(tensor, |values| task.run(values.into()))?
    }

    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        self.on_pool(body)
    }
}

thread_local! {
    /// CPU time for the operations that this thread called, in nanoseconds.
    static CALLED_NS: Cell<u64> = const { Cell::new(0) };
}

/// Point in the work that a thread called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuEvent {
    busy_ns: u64,
    at: Instant,
}

impl CpuEvent {
    /// Returns the CPU time between two events on the same thread, in nanoseconds: the time of the leading
    /// thread in each operation, without waits for other ranks.
    fn since(self, start: Self) -> u64 {
        self.busy_ns.saturating_sub(start.busy_ns)
    }

    /// Returns the same work at a different time.
    fn at(self, at: Instant) -> Self {
        Self { at, ..self }
    }

    /// Returns the time from this event to `to`, in nanoseconds.
    fn elapsed_ns(self, to: Self) -> i64 {
        let ns =
            |later: Instant, earlier: Instant| later.saturating_duration_since(earlier).as_nanos() as i64;
        ns(to.at, self.at) - ns(self.at, to.at)
    }
}

/// Counts the CPU time for operations.
struct Busy;

impl Busy {
    /// Runs a closure on a computing thread, and returns the CPU time.
    fn time<R>(body: impl FnOnce() -> R) -> (R, u64) {
        let start = thread_cpu_ns();
        let result = body();
        (result, thread_cpu_ns().saturating_sub(start))
    }

    /// Adds the CPU time of an operation to the total of the calling thread.
    fn count<R>(run: impl FnOnce() -> (R, u64)) -> R {
        let (result, ns) = run();
        CALLED_NS.set(CALLED_NS.get() + ns);
        result
    }

    /// Returns the CPU time so far: the time of this thread if it computes, otherwise the time of the
    /// operations that it called.
    fn now(is_computing: bool) -> CpuEvent {
        let busy_ns = if is_computing { thread_cpu_ns() } else { CALLED_NS.get() };
        CpuEvent { busy_ns, at: Instant::now() }
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Number of elements that a thread converts at a time.
const CHUNK: usize = 1 << 13;

/// Operand in `f32`.
pub(crate) enum Operand<'a> {
    Borrowed(&'a [f32]),
    Widened(Tensor<Cpu>),
}

impl Deref for Operand<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            Self::Borrowed(values) => values,
            Self::Widened(tensor) => tensor.f32(),
        }
    }
}

impl Cpu {
    /// Allocates elements with a type other than `f32`.
    fn elements(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let bytes = len.saturating_mul(dtype.bytes());
        let none = |_| Error::out_of_memory(bytes, self.buffers.used_bytes());
        let pool = Arc::clone(&self.buffers);
        macro_rules! vector {
            ($make:ident, $poison:expr, $zero:expr) => {{
                let mut values = Vec::new();
                values.try_reserve_exact(len).map_err(none)?;
                pool.reserve(bytes as u64)?;
                // poisoned in debug builds, so that a read before a write is noticed
                values.resize(len, if cfg!(debug_assertions) { $poison } else { $zero });
                CpuMemory::$make(values, pool)
            }};
        }
        let memory = match dtype {
            Dtype::F32 => return Ok(Tensor::new(self.buffers.take_exact(len)?, len)),
            Dtype::Bf16 => vector!(bf16, bf16::NAN, bf16::ZERO),
            Dtype::F64 => vector!(f64, f64::NAN, 0.0),
            Dtype::U32 => vector!(u32, u32::MAX, 0),
        };
        Ok(Tensor::new(memory, len))
    }

    fn widen(&self, halves: &[bf16]) -> Result<Tensor<Self>> {
        let mut full = Tensor::new(self.buffers.take(halves.len())?, halves.len());
        let values = full.f32_mut();
        self.on_pool(|| {
            let pairs = values.par_chunks_mut(CHUNK).zip(halves.par_chunks(CHUNK));
            pairs.for_each(|(full, halves)| halves.convert_to_f32_slice(full));
        });
        Ok(full)
    }

    fn round(&self, full: &[f32], halves: &mut [bf16]) {
        self.on_pool(|| {
            let pairs = halves.par_chunks_mut(CHUNK).zip(full.par_chunks(CHUNK));
            pairs.for_each(|(halves, full)| halves.convert_from_f32_slice(full));
        });
    }

    /// Returns the numbers in a tensor as `f32`.
    pub(crate) fn operand<'a>(&self, x: &'a Tensor<Self>) -> Result<Operand<'a>> {
        Ok(match x.dtype() {
            Dtype::Bf16 => Operand::Widened(self.widen(x.bf16())?),
            _ => Operand::Borrowed(x.f32()),
        })
    }

    /// Runs an operation on numbers that it changes, completely or in part, and stores the result.
    pub(crate) fn update<R>(&self, y: &mut Tensor<Self>, run: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        if y.dtype() != Dtype::Bf16 {
            return Ok(run(y.f32_mut()));
        }
        // widened although it may be overwritten: an operation may change only a part
        let mut full = self.widen(y.bf16())?;
        let result = run(full.f32_mut());
        self.round(full.f32(), y.bf16_mut());
        Ok(result)
    }

    /// Runs an operation on numbers that it changes if they are requested.
    pub(crate) fn update_if<R>(
        &self,
        y: Option<&mut Tensor<Self>>,
        run: impl FnOnce(Option<&mut [f32]>) -> Result<R>,
    ) -> Result<R> {
        match y {
            Some(y) => self.update(y, |y| run(Some(y)))?,
            None => run(None),
        }
    }

    /// Creates a tensor from host elements.
    fn adopt(&self, dtype: Dtype, buffer: Buffer) -> Result<Tensor<Self>> {
        let len = buffer.elements();
        match (dtype, buffer) {
            (Dtype::F32, Buffer::F32(values)) => Ok(Tensor::new(self.buffers.adopt(values)?, len)),
            (Dtype::Bf16, Buffer::Bf16(values)) => {
                let mut tensor = self.elements(Dtype::Bf16, len)?;
                tensor.bf16_mut().copy_from_slice(&values);
                Ok(tensor)
            }
            (Dtype::F64, Buffer::F64(values)) => {
                let mut tensor = self.elements(Dtype::F64, len)?;
                tensor.f64_mut().copy_from_slice(&values);
                Ok(tensor)
            }
            (dtype, buffer) => {
                let reason = format!("expected {dtype:?}, received {:?}", buffer.dtype());
                Err(Error::InvalidSetting { setting: "tensor", reason })
            }
        }
    }
}

/// Moves tensor elements out of the device, without a copy if no other tensor shares the allocation.
fn give(tensor: Tensor<Cpu>) -> Result<Buffer> {
    match tensor.dtype() {
        Dtype::Bf16 => Ok(Buffer::Bf16(tensor.bf16().to_vec())),
        Dtype::F64 => Ok(Buffer::F64(tensor.f64().to_vec())),
        Dtype::U32 => Err(Error::InvalidSetting { setting: "tensor", reason: "indices stay".into() }),
        Dtype::F32 if tensor.len() == tensor.memory().len() => match tensor.into_memory() {
            Ok(memory) => Ok(Buffer::F32(memory.into_f32())),
            Err(tensor) => Ok(Buffer::F32(tensor.f32().to_vec())),
        },
        Dtype::F32 => Ok(Buffer::F32(tensor.f32().to_vec())),
    }
}
