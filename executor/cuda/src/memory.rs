//! Device memory.
#![expect(unsafe_code, reason = "memory is freed by its address")]

use dflop_device::{Dtype, Memory};

use crate::driver::{MemoryPool, Stream};

/// CUDA device allocation, freed in compute lane order.
pub struct CudaMemory {
    address: u64,
    len: usize,
    dtype: Dtype,
    pool: MemoryPool,
}

impl CudaMemory {
    /// Allocates elements with unspecified contents.
    pub(crate) fn new(pool: &MemoryPool, dtype: Dtype, len: usize) -> crate::Result<Self> {
        Self::new_in(pool.stream(), pool, dtype, len)
    }

    /// Allocates elements in the order of a stream other than the pool stream.
    pub(crate) fn new_in(
        stream: &Stream,
        pool: &MemoryPool,
        dtype: Dtype,
        len: usize,
    ) -> crate::Result<Self> {
        let bytes = len.checked_mul(dtype.bytes());
        let bytes = bytes.ok_or(crate::Error::OutOfMemory { bytes: usize::MAX, used: pool.used() })?;
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
