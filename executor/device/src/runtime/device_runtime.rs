//! Trait of a device's memory, lanes and events, without its operations.

use super::host_task::HostTask;
use super::tensor::Tensor;
use super::transfer::Transfer;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Waits for numbers that are on their way to the host, and returns them.
pub type LateRead = Box<dyn FnOnce() -> Result<Vec<f64>> + Send>;

/// Allocation of a device.
pub trait Memory: Send + Sync + 'static {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Returns whether the allocation has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    fn dtype(&self) -> Dtype;
}

/// Order of work on a device: work of one lane runs in the order of its calls, work of different lanes in any
/// order that events allow. A stream, on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Operations.
    Compute,
    /// Communication with one group of ranks, or with one rank in one direction.
    Communication(u64),
}

/// Memory, lanes and events of a device.
///
/// Cheap to clone: clones are the same device. Calls may return before their work is done; errors of the work
/// then come from a later call. [`read`](Self::read), [`download`](Self::download) and
/// [`download_in_pass`](Self::download_in_pass) wait for the device and are the only calls that do; they are
/// counted.
pub trait Runtime: Clone + Send + Sync + Sized + 'static {
    /// Allocations.
    type Memory: Memory;
    /// A point in a lane.
    type Event: Clone + Send + Sync + 'static;

    /// Name of the processor and what else its times depend on, as profiles record it.
    fn name(&self) -> String;
    /// Number of threads of this process that compute; `None` if another processor does.
    fn host_threads(&self) -> Option<usize>;
    /// Type that weights and activations are stored in.
    fn storage(&self) -> Dtype;
    /// Allocates memory of unspecified contents for a pass, in the type of weights and activations.
    fn alloc(&self, len: usize) -> Result<Tensor<Self>> {
        self.alloc_as(self.storage(), len)
    }
    /// Allocates memory of unspecified contents for a pass.
    fn alloc_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>>;
    /// Allocates zeros that stay for many passes: gradients, master weights, moments of the optimizer.
    fn zeros_as(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>>;
    /// Copies numbers to the device, in the type of weights and activations.
    fn upload(&self, values: &[f32]) -> Result<Tensor<Self>> {
        self.upload_as(self.storage(), values)
    }
    /// Copies numbers to the device, in this type.
    fn upload_as(&self, dtype: Dtype, values: &[f32]) -> Result<Tensor<Self>>;
    /// Copies numbers to the elements of a tensor.
    fn write(&self, values: &[f32], into: &mut Tensor<Self>) -> Result<()>;
    /// Copies a few numbers to the elements of a tensor of `f64`.
    fn write_scalars(&self, values: &[f64], into: &mut Tensor<Self>) -> Result<()>;
    /// Copies indices to the device.
    fn upload_indices(&self, values: &[u32]) -> Result<Tensor<Self>>;
    /// Returns this device for the inputs of later passes: [`upload_as`](Self::upload_as) and
    /// [`upload_indices`](Self::upload_indices) copy beside all lanes, also while they compute, and return
    /// once the numbers are on the device. Default: the device itself, for one whose copies wait for no lane.
    fn beside(&self) -> Result<Self> {
        Ok(self.clone())
    }
    /// Copies numbers from the device, widened to `f32`. Waits for the device.
    fn download(&self, tensor: &Tensor<Self>) -> Result<Vec<f32>>;
    /// Copies numbers that the rest of a pass depends on, as [`download`](Self::download) does, while other
    /// lanes go on: they may wait for ranks that wait for this pass. Waits for the compute lane alone.
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
    /// Number of calls so far that waited for the device, on all clones.
    fn reads(&self) -> u64;
    /// Bytes of all live tensors.
    fn memory_used_bytes(&self) -> u64;

    /// Returns the point in a lane behind all of its work so far.
    fn mark(&self, lane: Lane) -> Result<Self::Event>;
    /// Orders the further work of a lane behind an event.
    fn after(&self, lane: Lane, event: &Self::Event) -> Result<()>;
    /// Time that the device worked between two events of the compute lane of one thread, in nanoseconds; 0
    /// before the device has reached them.
    fn busy_ns(&self, start: &Self::Event, end: &Self::Event) -> u64;
    /// Time that passed from one event to another one of any lane, in nanoseconds, negative if the other came
    /// first; `None` before the device has reached them.
    fn elapsed_ns(&self, from: &Self::Event, to: &Self::Event) -> Option<i64>;

    /// Runs a task of the host in a lane, behind an event.
    ///
    /// - `input`: consumed, its contents are given to the task
    /// - `output`: type and length of what the task returns; [`Transfer::wait`] gives it
    fn host_task(
        &self,
        lane: Lane,
        after: &Self::Event,
        input: Option<Tensor<Self>>,
        output: Option<(Dtype, usize)>,
        task: Box<dyn HostTask>,
    ) -> Result<Transfer<Self>>;
    /// Runs a task of the host that changes a tensor, in the order of the compute lane. For a task that adds
    /// numbers, bf16 is widened to `f32`.
    fn host_update(&self, tensor: &mut Tensor<Self>, task: Box<dyn HostTask>) -> Result<()>;
    /// Loads what work needs: kernels, plans of products, memory of the host. A device that loads nothing
    /// does not run the work; others run it twice, first without computing, so that it must not depend on
    /// results, and changes nothing that is needed. Call it before messages are posted: a load may wait for
    /// all work of the device.
    ///
    /// # Errors
    /// Those of the work.
    fn prepare<E: From<Error>>(&self, work: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        drop(work);
        Ok(())
    }

    /// Runs a closure in which operations start without a change of threads.
    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R;
}
