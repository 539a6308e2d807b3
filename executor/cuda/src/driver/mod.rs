//! Safe CUDA driver wrappers: context, streams, events, memory, kernels, staging buffers, lanes.
//!
//! Every handle keeps the context alive. Calls first make the context current on the calling thread, because
//! other code in the process may have made a different context current.

#![expect(unsafe_code, reason = "the driver is called through C functions")]

mod context;
mod function;
mod host_buffer;
mod lanes;
mod memory_pool;
mod staging;
mod stream;

pub(crate) use context::{Context, Event, Gate, Loads, during, lasting};
pub use context::{CudaEvent, LateLoads};
pub(crate) use function::{Arguments, Function, Grid, Module};
pub(crate) use host_buffer::HostBuffer;
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
