//! Trait for device memory, lanes and events, without operations.

use std::time::Duration;

use super::host_task::HostTask;
use super::tensor::Tensor;
use super::transfer::Transfer;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

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
