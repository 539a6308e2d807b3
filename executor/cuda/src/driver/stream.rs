//! Streams: work runs in call order within a stream, concurrently with different streams.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUstream_flags_enum};

use super::context::{Context, Event, during};
use super::{HostBuffer, check};
use crate::error::Result;

/// Stream in a context.
#[derive(Clone)]
pub(crate) struct Stream(Arc<Created>);

struct Created {
    stream: sys::CUstream,
    context: Context,
}

// SAFETY: the driver allows calls on a stream from any thread.
unsafe impl Send for Created {}
// SAFETY: as above.
unsafe impl Sync for Created {}

impl Drop for Created {
    fn drop(&mut self) {
        // the driver destroys the stream once its work is done; nothing can be done about a failure
        if self.context.make_current().is_ok() {
            // SAFETY: the stream was created once and is not used again.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl Stream {
    /// Creates a stream that does not wait for work from other code in this process.
    pub(crate) fn new(context: &Context) -> Result<Self> {
        context.make_current()?;
        let mut stream = std::ptr::null_mut();
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a local variable.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(Arc::new(Created { stream, context: context.clone() })))
    }

    /// Returns the stream context.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// Returns the handle, for library calls.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.0.stream
    }

    /// Returns an event behind all work so far.
    pub(crate) fn record(&self) -> Result<Event> {
        let event = Event::new(self.context())?;
        // SAFETY: both handles are alive; the context of the event is that of the stream.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw(), self.0.stream) })?;
        Ok(event)
    }

    /// Orders further work behind an event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        self.0.context.make_current()?;
        // SAFETY: both handles are alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.0.stream, event.raw(), 0) })
    }

    /// Waits on the host until all work is done.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.0.context.make_current()?;
        // SAFETY: the stream is alive.
        let wait = || unsafe { sys::cuStreamSynchronize(self.0.stream) };
        check("cuStreamSynchronize", during("cuStreamSynchronize", wait))
    }

    /// Writes zeros.
    ///
    /// # Safety
    /// The address must point to at least `bytes` bytes in device memory that live until the work is done.
    pub(crate) unsafe fn zero(&self, address: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.0.context.make_current()?;
        // SAFETY: the caller's contract.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(address, 0, bytes, self.0.stream) })
    }

    /// Copies device memory.
    ///
    /// # Safety
    /// As [`zero`](Self::zero), for both addresses; the ranges do not overlap.
    pub(crate) unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.0.context.make_current()?;
        // SAFETY: the caller's contract.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.0.stream) })
    }

    /// Copies the first bytes of a buffer to the device.
    ///
    /// # Safety
    /// As [`zero`](Self::zero); the buffer is not changed before the work is done.
    pub(crate) unsafe fn copy_up(&self, from: &HostBuffer, bytes: usize, to: u64) -> Result<()> {
        assert!(bytes <= from.len(), "the bytes are in the buffer");
        if bytes == 0 {
            return Ok(());
        }
        self.0.context.make_current()?;
        // SAFETY: the caller's contract, and the check above.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.pointer().cast(), bytes, self.0.stream) };
        check("cuMemcpyHtoDAsync", status)
    }

    /// Copies device memory to the first bytes of a buffer.
    ///
    /// # Safety
    /// As [`zero`](Self::zero); the buffer is not accessed before the work is done.
    pub(crate) unsafe fn copy_down(&self, from: u64, bytes: usize, to: &mut HostBuffer) -> Result<()> {
        assert!(bytes <= to.len(), "the bytes are in the buffer");
        if bytes == 0 {
            return Ok(());
        }
        self.0.context.make_current()?;
        // SAFETY: the caller's contract, and the check above.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.pointer_mut().cast(), from, bytes, self.0.stream) };
        check("cuMemcpyDtoHAsync", status)
    }
}
