//! Memory of the deferred device, which is freed in the order of its lane.

use std::sync::Arc;

use super::queue::{Queue, Work};
use super::slot::Slot;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::runtime::{Lane, Memory};

/// Allocation on a deferred device.
pub struct DeferredMemory<D: Device> {
    pub(super) slot: Arc<Slot<D>>,
    dtype: Dtype,
    len: usize,
    queue: Arc<Queue<D>>,
}

impl<D: Device> DeferredMemory<D> {
    pub(super) fn new(slot: Arc<Slot<D>>, dtype: Dtype, len: usize, queue: Arc<Queue<D>>) -> Self {
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
