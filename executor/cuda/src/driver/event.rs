//! Events: points in streams.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent_flags_enum, CUresult};

use super::check;
use super::context::Context;
use super::long_calls::during;
use crate::error::Result;

/// Event with timing.
#[derive(Clone)]
pub(crate) struct Event(Arc<Created>);

struct Created {
    event: sys::CUevent,
    context: Context,
}

// SAFETY: the driver allows calls on an event from any thread.
unsafe impl Send for Created {}
// SAFETY: as above.
unsafe impl Sync for Created {}

impl Drop for Created {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: the event was created once and is not used again; work that waits for it goes on.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

impl Event {
    pub(super) fn new(context: &Context) -> Result<Self> {
        context.make_current()?;
        let mut event = std::ptr::null_mut();
        let flags = CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: the pointer is to a local variable.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Self(Arc::new(Created { event, context: context.clone() })))
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.0.event
    }

    /// Waits on the host until the device has reached the event.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.0.context.make_current()?;
        // SAFETY: the event is alive.
        let wait = || unsafe { sys::cuEventSynchronize(self.0.event) };
        check("cuEventSynchronize", during("cuEventSynchronize", wait))
    }

    /// Returns whether the device has reached the event.
    pub(crate) fn is_reached(&self) -> bool {
        // SAFETY: the event is alive.
        self.0.context.make_current().is_ok()
            && unsafe { sys::cuEventQuery(self.0.event) } == CUresult::CUDA_SUCCESS
    }

    /// Returns the nanoseconds from this event to a later event; 0 before the device has reached both.
    pub(crate) fn nanoseconds_until(&self, end: &Self) -> u64 {
        self.elapsed_ns(end).map_or(0, |ns| u64::try_from(ns).unwrap_or(0))
    }

    /// Returns the nanoseconds from this event to the given event, negative if the given event came first;
    /// `None` before the device has reached both.
    pub(crate) fn elapsed_ns(&self, end: &Self) -> Option<i64> {
        if !self.is_reached() || !end.is_reached() {
            return None;
        }
        let mut milliseconds = 0.0_f32;
        // SAFETY: both events are alive, and the pointer is to a local variable.
        let status = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, self.0.event, end.0.event) };
        (status == CUresult::CUDA_SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
    }
}
