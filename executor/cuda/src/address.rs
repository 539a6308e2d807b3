//! Tensor addresses.

use dflop_device::Tensor;

use crate::device::Cuda;

/// Tensor address.
pub(crate) trait Address {
    /// Returns the address of the first element.
    fn address(&self) -> u64;

    /// Returns whether elements can be loaded and stored 16 bytes at a time.
    fn is_aligned(&self) -> bool {
        self.address().is_multiple_of(16)
    }
}

impl Address for Tensor<Cuda> {
    fn address(&self) -> u64 {
        self.memory().address() + (self.range().start * self.dtype().bytes()) as u64
    }
}
