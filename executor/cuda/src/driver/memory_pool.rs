//! Device memory and its pool: allocations and frees are stream work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    self, CUmemAllocationType, CUmemLocationType, CUmemPool_attribute_enum as Attribute, CUmemPoolProps,
    CUresult,
};
use dflop_device::{Dtype, Memory};

use super::check;
use super::context::Context;
use super::stream::Stream;
use crate::error::{Error, Result};

/// Pool with a limit on the bytes in use. Freed memory stays with the pool for later allocations.
#[derive(Clone)]
pub(crate) struct MemoryPool(Arc<Created>);

struct Created {
    pool: sys::CUmemoryPool,
    stream: Stream,
    used: AtomicU64,
    limit: AtomicU64,
}

// SAFETY: the driver allows calls on a pool from any thread.
unsafe impl Send for Created {}
// SAFETY: as above.
unsafe impl Sync for Created {}

impl Drop for Created {
    fn drop(&mut self) {
        if self.stream.context().make_current().is_ok() {
            // SAFETY: the pool was created once; the driver destroys it once all its memory is freed.
            let _ = unsafe { sys::cuMemPoolDestroy(self.pool) };
        }
    }
}

impl MemoryPool {
    /// Creates a pool with allocations and frees in stream order.
    pub(crate) fn new(stream: &Stream) -> Result<Self> {
        let context: &Context = stream.context();
        context.make_current()?;
        // SAFETY: all fields are numbers or null pointers, for which zeros are the defaults.
        let mut properties: CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = context.ordinal() as i32;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the pointers are to local variables.
        check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) })?;
        let created = Created {
            pool,
            stream: stream.clone(),
            used: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        };
        // memory goes back to the driver only with the pool, so that a step allocates what the last one freed
        let mut threshold = u64::MAX;
        let attribute = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a 64-bit number.
        let status = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) };
        check("cuMemPoolSetAttribute", status)?;
        Ok(Self(Arc::new(created)))
    }

    /// Sets the limit on the bytes in use.
    pub(crate) fn limit(&self, bytes: u64) {
        self.0.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Stream in whose order memory is freed.
    pub(crate) fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Allocates memory that work on the pool's stream may use at once. No bytes give the address 0.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.allocate_in(&self.0.stream, bytes)
    }

    /// Allocates memory as [`allocate`](Self::allocate) does, that work of this stream may use at once.
    pub(crate) fn allocate_in(&self, stream: &Stream, bytes: usize) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        let out_of_memory = || Error::OutOfMemory { bytes, used: self.used() };
        let limit = self.0.limit.load(Ordering::Relaxed);
        let reserve = |used: u64| used.checked_add(bytes as u64).filter(|&used| used <= limit);
        if self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_err() {
            return Err(out_of_memory());
        }
        let allocated = self.allocate_reserved(stream, bytes);
        if allocated.is_err() {
            self.0.used.fetch_sub(bytes as u64, Ordering::Relaxed);
        }
        allocated?.ok_or_else(out_of_memory)
    }

    /// Allocates, or returns nothing if the device has too little memory.
    fn allocate_reserved(&self, stream: &Stream, bytes: usize) -> Result<Option<u64>> {
        stream.context().make_current()?;
        let mut address = 0;
        // SAFETY: pool and stream are alive, and the pointer is to a local variable.
        let status =
            unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, self.0.pool, stream.raw()) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            self.0.used.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Ok(None);
        }
        check("cuMemAllocFromPoolAsync", status)?;
        Ok(Some(address))
    }

    /// Frees memory after all work queued on the stream so far.
    ///
    /// # Safety
    /// `allocate` returned the address for this number of bytes, and work on other streams is done with it.
    pub(crate) unsafe fn free(&self, address: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.0.used.fetch_sub(bytes as u64, Ordering::Relaxed);
        // after a failure of the device, which every later call reports, memory is of no use
        if self.0.stream.context().make_current().is_ok() {
            // SAFETY: the caller's contract.
            let _ = unsafe { sys::cuMemFreeAsync(address, self.0.stream.raw()) };
        }
    }
}

/// CUDA device allocation, freed in compute lane order.
pub struct CudaMemory {
    address: u64,
    len: usize,
    dtype: Dtype,
    pool: MemoryPool,
}

impl CudaMemory {
    /// Allocates elements with unspecified contents.
    pub(crate) fn new(pool: &MemoryPool, dtype: Dtype, len: usize) -> Result<Self> {
        Self::new_in(pool.stream(), pool, dtype, len)
    }

    /// Allocates elements in the order of a stream other than the pool stream.
    pub(crate) fn new_in(stream: &Stream, pool: &MemoryPool, dtype: Dtype, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(dtype.bytes());
        let bytes = bytes.ok_or(Error::OutOfMemory { bytes: usize::MAX, used: pool.used() })?;
        Ok(Self { address: pool.allocate_in(stream, bytes)?, len, dtype, pool: pool.clone() })
    }

    /// Returns the address of the first element.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // SAFETY: the pool returned this address for this many bytes. Work in other streams is waited for, by
        // the host or by the compute stream, before its tensors are dropped.
        unsafe { self.pool.free(self.address, self.len * self.dtype.bytes()) };
    }
}

impl Memory for CudaMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }
}
