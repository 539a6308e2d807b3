//! Events: points in streams and in lanes. A host thread may still have to reach the latter.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

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

/// Point in a lane.
#[derive(Clone)]
pub struct CudaEvent(Kind);

#[derive(Clone)]
enum Kind {
    /// Recorded in a stream.
    Recorded(Event),
    /// Recorded once a lane thread reaches it.
    Later(Arc<Gate>),
}

/// Event that a thread will record.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<Option<Result<Event, Failure>>>,
    opened: Condvar,
}

/// Reason why an event was not recorded: the error itself for the first caller, the error text for later
/// callers.
struct Failure {
    error: Option<dflop_device::Error>,
    reason: String,
}

impl Gate {
    /// Opens the gate; the first result stays.
    pub(crate) fn open(&self, result: Result<Event, dflop_device::Error>) {
        let failure = |error: dflop_device::Error| Failure { reason: error.to_string(), error: Some(error) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.get_or_insert(result.map_err(failure));
        self.opened.notify_all();
    }

    /// Returns whether the gate is open and the device has reached its event, or there will be none.
    pub(crate) fn is_passed(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().is_some_and(|result| result.as_ref().is_ok_and(Event::is_reached) || result.is_err())
    }

    /// Waits until the gate is open; returns the event, or `None` for a failure, which stays for
    /// [`wait`](Self::wait).
    pub(crate) fn opened(&self) -> Option<Event> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*state {
                Some(result) => return result.as_ref().ok().cloned(),
                None => state = self.opened.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits for the event.
    pub(crate) fn wait(&self) -> Result<Event, dflop_device::Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &mut *state {
                Some(Ok(event)) => return Ok(event.clone()),
                Some(Err(Failure { error, reason })) => {
                    let known = || dflop_device::Error::Failed { reason: reason.clone() };
                    return Err(error.take().unwrap_or_else(known));
                }
                None => state = self.opened.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl CudaEvent {
    pub(crate) const fn recorded(event: Event) -> Self {
        Self(Kind::Recorded(event))
    }

    pub(crate) const fn later(gate: Arc<Gate>) -> Self {
        Self(Kind::Later(gate))
    }

    /// Returns the stream event; a host thread may have to record it first.
    pub(crate) fn get(&self) -> Result<Event, dflop_device::Error> {
        match &self.0 {
            Kind::Recorded(event) => Ok(event.clone()),
            Kind::Later(gate) => gate.wait(),
        }
    }

    /// Returns the time until a second event in nanoseconds, negative if the second event came first; `None`
    /// before the device has reached both.
    pub(crate) fn elapsed_ns(&self, end: &Self) -> Option<i64> {
        match (&self.0, &end.0) {
            (Kind::Recorded(start), Kind::Recorded(end)) => start.elapsed_ns(end),
            _ => None,
        }
    }

    /// Returns the time until a second event in nanoseconds; 0 before the device has reached both.
    pub(crate) fn nanoseconds_until(&self, end: &Self) -> u64 {
        match (&self.0, &end.0) {
            (Kind::Recorded(start), Kind::Recorded(end)) => start.nanoseconds_until(end),
            _ => 0,
        }
    }
}
