//! Memory, lanes, events and messages through the host.
//!
//! Compute stream work times, by kernel name or product shape.

#![expect(unsafe_code, reason = "copies take addresses")]
use super::{Address, Cuda, Shared};
use crate::compiler::Kernels;
use crate::driver::{CudaEvent, CudaMemory, Event, HostBuffer, Stream};
use bytemuck::cast_slice;
use dflop_comm::{Buffer, Slice};
use dflop_device::{
    Dtype, Error, HostTask, KernelLoads, Lane, LateRead, Result, Runtime, Span, Tensor, Transfer,
};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

impl Cuda {
    /// Copies bytes that a closure writes to tensor elements, in stream order.
    fn copy_up(
        &self,
        stream: &Stream,
        tensor: &Tensor<Self>,
        fill: impl FnOnce(&mut [u8]),
    ) -> crate::error::Result<()> {
        let bytes = tensor.bytes() as usize;
        // SAFETY: the tensor has this many bytes; freeing it is compute stream work, after which other
        // streams are waited for.
        unsafe { self.shared().staging.copy_up(stream, tensor.address(), bytes, fill) }
    }

    /// Copies tensor elements to the host, in stream order, and waits.
    fn copy_down(&self, stream: &Stream, tensor: &Tensor<Self>) -> crate::error::Result<HostBuffer> {
        let bytes = tensor.bytes() as usize;
        if Kernels::is_recording() {
            return Ok(HostBuffer::pageable(bytes));
        }
        let mut buffer = self.shared().staging.take(bytes)?;
        // SAFETY: the tensor has this many bytes and is borrowed until the copy is done.
        unsafe { stream.copy_down(tensor.address(), bytes, &mut buffer)? };
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Copies elements from the device, and passes them to a closure.
    fn on_host<R>(
        &self,
        stream: &Stream,
        tensor: &Tensor<Self>,
        take: impl FnOnce(Elements<'_>) -> R,
    ) -> Result<R> {
        let buffer = self.copy_down(stream, tensor)?;
        let bytes = &buffer.bytes()[..tensor.bytes() as usize];
        let result = take(Elements::of(tensor.dtype(), bytes));
        self.shared().staging.give_back(buffer, stream.record()?);
        Ok(result)
    }

    /// Writes numbers to a tensor, converted to the tensor type.
    fn fill(&self, stream: &Stream, values: &[f32], into: &Tensor<Self>) -> crate::error::Result<()> {
        assert_eq!(values.len(), into.len(), "every element is written");
        self.copy_up(stream, into, |bytes| match into.dtype() {
            Dtype::Bf16 => bytemuck::cast_slice_mut::<_, bf16>(bytes).convert_from_f32_slice(values),
            Dtype::F64 => {
                let places = bytemuck::cast_slice_mut::<_, f64>(bytes).iter_mut();
                places.zip(values).for_each(|(to, &from)| *to = f64::from(from));
            }
            _ => bytes.copy_from_slice(cast_slice(values)),
        })
    }

    /// Copies numbers that a closure writes to new memory, in compute stream order, or in parallel.
    fn upload_with(
        &self,
        (dtype, len): (Dtype, usize),
        fill: impl Fn(&Stream, &Tensor<Self>) -> crate::error::Result<()>,
    ) -> Result<Tensor<Self>> {
        let Some(stream) = self.uploads() else {
            let tensor = self.allocate(dtype, len)?;
            fill(&self.shared().compute, &tensor)?;
            return Ok(tensor);
        };
        let tensor = self.allocate_in(stream, dtype, len)?;
        let filled = fill(stream, &tensor);
        // Other streams use and free the memory: it exists, and the copy is done, even after a failure.
        stream.synchronize()?;
        filled?;
        Ok(tensor)
    }

    /// Copies 64-bit numbers to the device, for kernels in this crate.
    pub(crate) fn upload_longs(&self, values: &[u64]) -> crate::error::Result<Tensor<Self>> {
        let tensor = self.allocate(Dtype::F64, values.len())?;
        self.copy_up(&self.shared().compute, &tensor, |bytes| bytes.copy_from_slice(cast_slice(values)))?;
        Ok(tensor)
    }

    /// Writes a message to a tensor.
    fn receive(&self, stream: &Stream, buffer: &Buffer, into: &Tensor<Self>) -> Result<()> {
        match (buffer, into.dtype()) {
            (Buffer::F32(values), Dtype::F32 | Dtype::Bf16) => Ok(self.fill(stream, values, into)?),
            (Buffer::Bf16(values), Dtype::Bf16) => {
                Ok(self.copy_up(stream, into, |bytes| bytes.copy_from_slice(cast_slice(values)))?)
            }
            (Buffer::F64(values), Dtype::F64) => {
                Ok(self.copy_up(stream, into, |bytes| bytes.copy_from_slice(cast_slice(values)))?)
            }
            (other, dtype) => {
                let reason = format!("expected {dtype:?}, received {:?}", other.dtype());
                Err(Error::InvalidSetting { setting: "tensor", reason })
            }
        }
    }

    /// Runs a host task between copies in a stream.
    fn exchange(
        &self,
        stream: &Stream,
        input: Option<Tensor<Self>>,
        output: Option<&Tensor<Self>>,
        mut task: Box<dyn HostTask>,
    ) -> Result<()> {
        let message = input
            .map(|tensor| self.on_host(stream, &tensor, |elements: Elements<'_>| elements.message()))
            .transpose()?;
        task.start(message.transpose()?)?;
        match (task.finish()?, output) {
            (Some(buffer), Some(output)) => self.receive(stream, &buffer, output),
            _ => Ok(()),
        }
    }
}

/// A result on its way to the host.
struct ResultCopy {
    device: Cuda,
    dtype: Dtype,
    bytes: usize,
    /// Buffer until the result is taken, and the event behind the copy.
    copied: Option<(HostBuffer, Event)>,
}

impl ResultCopy {
    fn start(device: &Cuda, tensor: &Tensor<Cuda>) -> Result<Self> {
        let (bytes, compute) = (tensor.bytes() as usize, &device.shared().compute);
        let mut buffer = device.shared().staging.take_result(bytes)?;
        // SAFETY: the tensor has this many bytes, and is freed in the order of the same stream; the buffer is
        // kept until the event behind the copy.
        unsafe { compute.copy_down(tensor.address(), bytes, &mut buffer)? };
        let copied = Some((buffer, compute.record()?));
        Ok(Self { device: device.clone(), dtype: tensor.dtype(), bytes, copied })
    }

    /// Waits for the copy, and gives its elements to a closure.
    fn wait<R>(mut self, take: impl FnOnce(Elements<'_>) -> R) -> Result<R> {
        let taken = match self.copied.take() {
            Some((buffer, event)) => {
                event.synchronize()?;
                let taken = take(Elements::of(self.dtype, &buffer.bytes()[..self.bytes]));
                self.device.shared().staging.give_back_result(buffer, event);
                taken
            }
            None => take(Elements::of(self.dtype, &[])),
        };
        self.device.check()?;
        Ok(taken)
    }
}

impl Drop for ResultCopy {
    fn drop(&mut self) {
        if let Some((buffer, event)) = self.copied.take() {
            // a device that has failed copies nothing any more
            let _ = event.synchronize();
            self.device.shared().staging.give_back_result(buffer, event);
        }
    }
}

/// Tensor elements on the host.
enum Elements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F64(&'a [f64]),
    U32(&'a [u32]),
}

impl<'a> Elements<'a> {
    fn of(dtype: Dtype, bytes: &'a [u8]) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16(cast_slice(bytes)),
            Dtype::F64 => Self::F64(cast_slice(bytes)),
            Dtype::U32 => Self::U32(cast_slice(bytes)),
            _ => Self::F32(cast_slice(bytes)),
        }
    }

    /// Widens to `f32`; large numbers lose digits.
    fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.to_vec(),
            Self::Bf16(values) => values.to_f32_vec(),
            Self::F64(values) => values.iter().map(|&value| value as f32).collect(),
            Self::U32(values) => values.iter().map(|&value| value as f32).collect(),
        }
    }

    fn to_f64(&self) -> Vec<f64> {
        match self {
            Self::F32(values) => values.iter().map(|&value| f64::from(value)).collect(),
            Self::Bf16(values) => values.iter().map(|&value| value.to_f64()).collect(),
            Self::F64(values) => values.to_vec(),
            Self::U32(values) => values.iter().map(|&value| f64::from(value)).collect(),
        }
    }

    /// Converts the elements to a message.
    fn message(self) -> Result<Buffer> {
        match self {
            Self::F32(values) => Ok(Buffer::F32(values.to_vec())),
            Self::Bf16(values) => Ok(Buffer::Bf16(values.to_vec())),
            Self::F64(values) => Ok(Buffer::F64(values.to_vec())),
            Self::U32(_) => Err(Error::InvalidSetting { setting: "tensor", reason: "indices stay".into() }),
        }
    }
}

impl Runtime for Cuda {
    type Memory = CudaMemory;
    type Event = CudaEvent;

    fn name(&self) -> String {
        self.properties().name
    }

    fn host_threads(&self) -> Option<usize> {
        None
    }

    fn storage(&self) -> Dtype {
        self.storage_type()
    }

    fn alloc_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        Ok(self.allocate(dtype, len)?)
    }

    fn zeros_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let tensor = self.allocate(dtype, len)?;
        // SAFETY: the tensor has this many bytes, and is freed in stream order.
        unsafe { self.shared().compute.zero(tensor.address(), tensor.bytes() as usize) }?;
        Ok(tensor)
    }

    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>> {
        self.upload_with((dtype, values.len()), |stream, tensor| self.fill(stream, values, tensor))
    }

    fn beside(&self) -> Result<Self> {
        Ok(self.with_uploads(Stream::new(&self.shared().context)?))
    }

    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()> {
        Ok(self.fill(&self.shared().compute, values, into)?)
    }

    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()> {
        assert!(into.dtype() == Dtype::F64 && into.len() == values.len(), "every element is written");
        Ok(self.copy_up(&self.shared().compute, into, |bytes| bytes.copy_from_slice(cast_slice(values)))?)
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>> {
        self.upload_with((Dtype::U32, values.len()), |stream, tensor| {
            self.copy_up(stream, tensor, |bytes| bytes.copy_from_slice(cast_slice(values)))
        })
    }

    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>> {
        self.count_read();
        let values = self.on_host(&self.shared().compute, tensor, |elements| elements.to_f32());
        self.check()?;
        values
    }

    fn read(&self, scalars: &Tensor<Self>) -> Result<Vec<f64>> {
        self.count_read();
        let values = self.on_host(&self.shared().compute, scalars, |elements| elements.to_f64());
        self.check()?;
        values
    }

    fn read_later(&self, scalars: &Tensor<Self>) -> Result<LateRead> {
        self.count_read();
        let copy = ResultCopy::start(self, scalars)?;
        Ok(Box::new(move || copy.wait(|elements| elements.to_f64())))
    }

    fn reads(&self) -> u64 {
        self.count_of_reads()
    }

    fn memory_used_bytes(&self) -> u64 {
        self.shared().pool.used()
    }

    fn mark(&self, lane: Lane) -> Result<CudaEvent> {
        match lane {
            Lane::Compute => Ok(CudaEvent::recorded(self.shared().compute.record()?)),
            Lane::Communication(lane) => {
                let gate = self.queue(lane, |_, stream| Ok(stream.record()?))?;
                Ok(CudaEvent::later(gate))
            }
        }
    }

    fn after(&self, lane: Lane, event: &CudaEvent) -> Result<()> {
        match lane {
            Lane::Compute => Ok(self.shared().compute.wait(&event.get()?)?),
            Lane::Communication(lane) => {
                let event = event.clone();
                self.queue(lane, move |_, stream| {
                    stream.wait(&event.get()?)?;
                    Ok(stream.record()?)
                })?;
                Ok(())
            }
        }
    }

    fn busy_ns(&self, start: &CudaEvent, end: &CudaEvent) -> u64 {
        start.nanoseconds_until(end)
    }

    fn elapsed_ns(&self, from: &CudaEvent, to: &CudaEvent) -> Option<i64> {
        from.elapsed_ns(to)
    }

    fn prepare<E: From<Error>>(&self, mut work: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let Shared { kernels, compute, loads, staging, .. } = self.shared();
        loads.wait();
        staging.make_results().map_err(Error::from)?;
        let recorded = Kernels::record(|| drop(work()));
        kernels.load(&recorded).map_err(Error::from)?;
        work()?;
        Ok(compute.synchronize().map_err(Error::from)?)
    }

    fn kernel_loads(&self) -> KernelLoads {
        self.shared().kernels.loads()
    }

    fn host_task(
        &self,
        lane: Lane,
        after: &CudaEvent,
        input: Option<Tensor<Self>>,
        output: Option<(Dtype, usize)>,
        task: Box<dyn HostTask>,
    ) -> Result<Transfer<Self>> {
        let output = output.map(|(dtype, len)| self.alloc_as(dtype, len)).transpose()?;
        if Kernels::is_recording() {
            return Ok(Transfer::new(move |_| Ok(output)));
        }
        let Lane::Communication(number) = lane else {
            self.after(lane, after)?;
            self.exchange(&self.shared().compute, input, output.as_ref(), task)?;
            return Ok(Transfer::new(move |_| Ok(output)));
        };
        // the memory exists after its allocation in the compute stream
        let allocated = self.shared().compute.record()?;
        let received = Arc::new(Mutex::new(None));
        let (after, place, span) = (after.clone(), Arc::clone(&received), Span::default());
        let times = Span::clone(&span);
        let gate = self.queue(number, move |device, stream| {
            stream.wait(&after.get()?)?;
            stream.wait(&allocated)?;
            let start = stream.record()?;
            device.exchange(stream, input, output.as_ref(), task)?;
            *place.lock().unwrap_or_else(PoisonError::into_inner) = output;
            let end = stream.record()?;
            times.set(CudaEvent::recorded(start), CudaEvent::recorded(end.clone()));
            Ok(end)
        })?;
        let device = self.clone();
        Ok(Transfer::timed(span, move |lane| {
            // on the calling thread, because the lane's thread reaches the event through work on other ranks
            let event = CudaEvent::recorded(gate.wait()?);
            device.after(lane, &event)?;
            Ok(received.lock().unwrap_or_else(PoisonError::into_inner).take())
        }))
    }

    fn host_update(&self, tensor: &mut Tensor<Self>, task: Box<dyn HostTask>) -> Result<()> {
        if Kernels::is_recording() {
            return Ok(());
        }
        let stream = &self.shared().compute;
        let is_widened = tensor.dtype() == Dtype::Bf16 && task.adds();
        let message = self.on_host(stream, tensor, |elements| {
            if is_widened { Ok(Buffer::F32(elements.to_f32())) } else { elements.message() }
        });
        let mut buffer = message??;
        task.run(Slice::from(&mut buffer))?;
        self.receive(stream, &buffer, tensor)
    }

    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        body()
    }
}

/// Device time for a kernel, or for products with the same shape.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Kernel name, or product shape.
    pub name: String,
    /// Number of launches.
    pub launches: u64,
    /// Total time of all launches in nanoseconds.
    pub nanoseconds: u64,
}

/// Events around every launch, while they are recorded.
#[derive(Default)]
pub(crate) struct KernelTimes {
    is_on: AtomicBool,
    /// Name, begin and end for every launch so far.
    launches: Mutex<Vec<(String, Event, Event)>>,
}

impl KernelTimes {
    /// Starts or stops recording launches.
    pub(crate) fn record(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Queues work; while launches are recorded, between two events.
    pub(crate) fn time<T, E: From<crate::error::Error>>(
        &self,
        stream: &Stream,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        if !self.is_on.load(Ordering::Relaxed) {
            return work();
        }
        let begin = stream.record()?;
        let done = work()?;
        let end = stream.record()?;
        self.launches.lock().unwrap_or_else(PoisonError::into_inner).push((name(), begin, end));
        Ok(done)
    }

    /// Waits for the stream, and takes the times so far, longest first.
    pub(crate) fn take(&self, stream: &Stream) -> crate::error::Result<Vec<KernelTime>> {
        stream.synchronize()?;
        let launches = std::mem::take(&mut *self.launches.lock().unwrap_or_else(PoisonError::into_inner));
        let mut by_name = BTreeMap::<String, (u64, u64)>::new();
        for (name, begin, end) in launches {
            let (count, nanoseconds) = by_name.entry(name).or_default();
            *count += 1;
            *nanoseconds += begin.nanoseconds_until(&end);
        }
        let time = |(name, (launches, nanoseconds))| KernelTime { name, launches, nanoseconds };
        let mut times: Vec<KernelTime> = by_name.into_iter().map(time).collect();
        times.sort_by_key(|time| std::cmp::Reverse(time.nanoseconds));
        Ok(times)
    }
}
