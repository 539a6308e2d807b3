//! Safe CUDA driver wrappers: context, streams, events, memory, kernels, staging buffers, lanes.
//!
//! Every handle keeps the context alive. Calls first make the context current on the calling thread, because
//! other code in the process may have made a different context current.

#![expect(unsafe_code, reason = "the driver is called through C functions")]

mod context;
mod function;
mod lanes;
mod memory_pool;
mod staging;
mod stream;

pub(crate) use context::{Context, Event, Gate, Loads, during, lasting};
pub use context::{CudaEvent, LateLoads};
pub(crate) use function::{Arguments, Function, Grid, Module};
pub(crate) use lanes::Lanes;
pub use memory_pool::CudaMemory;
pub(crate) use memory_pool::MemoryPool;
pub(crate) use staging::Staging;
pub(crate) use stream::Stream;

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result};

/// Converts a driver status to a result.
fn check(call: &'static str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    // SAFETY: both functions write a pointer to a constant of the driver, or null.
    let text = |of: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| unsafe {
        let mut text = std::ptr::null();
        let known = of(status, &raw mut text) == CUresult::CUDA_SUCCESS && !text.is_null();
        if known { CStr::from_ptr(text).to_string_lossy().into_owned() } else { format!("{status:?}") }
    };
    Err(Error::Driver { call, code: text(sys::cuGetErrorName), reason: text(sys::cuGetErrorString) })
}

/// Host bytes, aligned for every element type.
///
/// The device copies directly from and to page-locked bytes. Pageable bytes are copied through driver memory:
/// a copy to the host has ended when the call returns.
pub(crate) struct HostBuffer {
    len: usize,
    memory: Memory,
}

enum Memory {
    PageLocked { pointer: *mut u8, context: Context },
    Pageable(Box<[u64]>),
}

// SAFETY: the buffer owns its memory as a vector does.
unsafe impl Send for HostBuffer {}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let Memory::PageLocked { pointer, context } = &self.memory else { return };
        if context.make_current().is_ok() {
            // SAFETY: the memory was allocated once and is not used again.
            let _ = during("cuMemFreeHost", || unsafe { sys::cuMemFreeHost(pointer.cast()) });
        }
    }
}

impl HostBuffer {
    /// Allocates page-locked zeros; may wait for all device work.
    pub(crate) fn page_locked(context: &Context, len: usize) -> Result<Self> {
        context.make_current()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        let allocate = || unsafe { sys::cuMemHostAlloc(&raw mut pointer, len.max(1), 0) };
        check("cuMemHostAlloc", during("cuMemHostAlloc", allocate))?;
        // SAFETY: the allocation has this length; zeros make it initialized.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len.max(1)) };
        Ok(Self { len, memory: Memory::PageLocked { pointer: pointer.cast(), context: context.clone() } })
    }

    /// Allocates zeros without the driver.
    pub(crate) fn pageable(len: usize) -> Self {
        Self { len, memory: Memory::Pageable(vec![0; len.div_ceil(8)].into_boxed_slice()) }
    }

    pub(crate) const fn is_page_locked(&self) -> bool {
        matches!(self.memory, Memory::PageLocked { .. })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    fn pointer(&self) -> *const u8 {
        match &self.memory {
            Memory::PageLocked { pointer, .. } => *pointer,
            Memory::Pageable(words) => words.as_ptr().cast(),
        }
    }

    fn pointer_mut(&mut self) -> *mut u8 {
        match &mut self.memory {
            Memory::PageLocked { pointer, .. } => *pointer,
            Memory::Pageable(words) => words.as_mut_ptr().cast(),
        }
    }

    /// Returns the bytes, once no device work uses the buffer.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialized, and lives as long as the buffer.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len) }
    }

    /// Returns the mutable bytes, once no device work uses the buffer.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer_mut(), self.len) }
    }
}
