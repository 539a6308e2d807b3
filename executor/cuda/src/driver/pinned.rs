//! Page-locked memory of the host, which the device copies from and to by itself.

use cudarc::driver::sys;

use super::check;
use super::context::Context;
use crate::error::Result;

/// Page-locked bytes, aligned for every type of elements.
pub(crate) struct PinnedBuffer {
    pointer: *mut u8,
    len: usize,
    context: Context,
}

// SAFETY: the buffer owns its memory as a vector does.
unsafe impl Send for PinnedBuffer {}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: the memory was allocated once and is not used again.
            let _ = unsafe { sys::cuMemFreeHost(self.pointer.cast()) };
        }
    }
}

impl PinnedBuffer {
    /// Allocates zeros.
    pub(crate) fn new(context: &Context, len: usize) -> Result<Self> {
        context.make_current()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut pointer, len.max(1), 0) })?;
        // SAFETY: the allocation has this length; zeros make it initialized.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len.max(1)) };
        Ok(Self { pointer: pointer.cast(), len, context: context.clone() })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Bytes, once no work of the device uses them.
    pub(crate) const fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialized, and lives as long as the buffer.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// Mutable bytes, once no work of the device uses them.
    pub(crate) const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}
