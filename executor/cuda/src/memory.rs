//! Memory of the device.
#![expect(unsafe_code, reason = "memory is freed by its address")]

use dflop_device::{Dtype, Memory};

use crate::driver::{MemoryPool, Stream};

/// Allocation of the CUDA device, freed in the order of the compute lane.
pub struct CudaMemory {
    address: u64,
    len: usize,
    dtype: Dtype,
    pool: MemoryPool,
}

impl CudaMemory {
    /// Allocates elements of unspecified contents.
    pub(crate) fn new(pool: &MemoryPool, dtype: Dtype, len: usize) -> crate::Result<Self> {
        Self::new_in(pool.stream(), pool, dtype, len)
    }

    /// Allocates elements in the order of another stream than the pool's.
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

    /// Address of the first element.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // SAFETY: the pool gave this address for this many bytes. Work of other streams is waited for, by the
        // host or by the compute stream, before its tensors are dropped.
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
