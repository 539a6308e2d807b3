//! Driver contexts and events, calls that may wait, and module loads.
//!
//! Every thread has a slot for the current call, which different threads read only for a report: recording a
//! call costs tens of nanoseconds, also during concurrent calls.
//!
//! The driver may let a load of a kernel, or an allocation of page-locked memory, wait for all work of the
//! device, and lets every other call wait for it meanwhile. A receive that was posted ahead waits for another
//! rank, which may wait for a message of this one that is not queued yet: then the job hangs. So kernels are
//! loaded before messages are posted ([`prepare`](dflop_device::Runtime::prepare)), and buffers that are
//! missing later are not page-locked.
//!
//! # Source
//! NVIDIA: "CUDA C++ Programming Guide", sections "Lazy Loading" and "Implicit Synchronization".

use super::check;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUevent_flags_enum, CUresult};
use std::ffi::CStr;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Minimum major compute capability required by the kernels.
const CAPABILITY_MIN: u32 = 8;

/// Retained primary device context.
#[derive(Clone)]
pub(crate) struct Context(Arc<Retained>);

struct Retained {
    context: sys::CUcontext,
    device: sys::CUdevice,
    ordinal: u32,
    name: String,
    capability: (u32, u32),
    processors: u32,
    total_bytes: u64,
    /// Driver version, major and minor.
    driver: (u32, u32),
}

// SAFETY: a context may be used by any thread that makes it current, which every call does.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: the context was retained once. A failure at the end of the process is of no use to anyone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Context {
    /// Returns the number of devices, at least one.
    pub(crate) fn count() -> Result<u32> {
        let no_device = |reason: String| Error::NoDevice { ordinal: 0, reason };
        let mut count = 0;
        // SAFETY: the pointer is to a local variable.
        unsafe {
            check("cuInit", sys::cuInit(0)).map_err(|error| no_device(error.to_string()))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))
                .map_err(|error| no_device(error.to_string()))?;
        }
        if count < 1 {
            return Err(no_device("the driver has no devices".to_owned()));
        }
        Ok(count as u32)
    }

    /// Retains a device's primary context.
    pub(crate) fn new(ordinal: u32) -> Result<Self> {
        // SAFETY: all pointers are to local variables of the types that the functions write.
        unsafe {
            let no_device = |error: Error| Error::NoDevice { ordinal, reason: error.to_string() };
            let count = Self::count()?;
            let (mut version, mut device) = (0, 0);
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
            if ordinal >= count {
                return Err(Error::NoDevice { ordinal, reason: format!("the driver has {count} devices") });
            }
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
            let mut name = [0; 256];
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let attribute = |attribute| {
                let mut value = 0;
                check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, attribute, device))?;
                Ok::<u32, Error>(value as u32)
            };
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            if major < CAPABILITY_MIN {
                return Err(Error::DeviceTooOld { ordinal, name, major, minor });
            }
            let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
            let mut total_bytes = 0;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut total_bytes, device))?;
            let mut context = std::ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))
                .map_err(no_device)?;
            let version = version as u32;
            Ok(Self(Arc::new(Retained {
                context,
                device,
                ordinal,
                name,
                capability: (major, minor),
                processors,
                total_bytes: total_bytes as u64,
                driver: (version / 1000, version % 1000 / 10),
            })))
        }
    }

    /// Returns whether modules and libraries load all kernels at once.
    ///
    /// # Source
    /// NVIDIA: "CUDA C++ Programming Guide", environment variables, `CUDA_MODULE_LOADING`.
    pub(crate) fn loads_eagerly() -> Result<bool> {
        let mut mode = sys::CUmoduleLoadingMode::CU_MODULE_LAZY_LOADING;
        // SAFETY: the pointer is to a local variable.
        check("cuModuleGetLoadingMode", unsafe { sys::cuModuleGetLoadingMode(&raw mut mode) })?;
        Ok(mode == sys::CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING)
    }

    /// Makes the context current on this thread.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Returns the device ordinal.
    pub(crate) fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Returns the device name.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the compute capability, major and minor.
    pub(crate) fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// Returns the number of streaming multiprocessors.
    pub(crate) fn processors(&self) -> u32 {
        self.0.processors
    }

    /// Returns the device memory in bytes.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.0.total_bytes
    }

    /// Returns the CUDA version that the driver supports, major and minor.
    pub(crate) fn driver_version(&self) -> (u32, u32) {
        self.0.driver
    }
}

/// Call in progress: name and start time.
type Call = Option<(&'static str, Instant)>;

/// Current call on a thread.
struct Place {
    thread: Thread,
    call: Mutex<Call>,
}

impl Place {
    fn set(&self, call: Call) -> Call {
        std::mem::replace(&mut *self.call.lock().unwrap_or_else(PoisonError::into_inner), call)
    }
}

/// Slots for all live threads that have recorded a call.
static PLACES: Mutex<Vec<Weak<Place>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: Arc<Place> = register();
}

fn register() -> Arc<Place> {
    let own = Arc::new(Place { thread: std::thread::current(), call: Mutex::default() });
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    places.retain(|place| place.strong_count() > 0);
    places.push(Arc::downgrade(&own));
    own
}

/// Guard that restores the enclosing call when a nested call ends.
struct Ended(Call);

impl Drop for Ended {
    fn drop(&mut self) {
        // a thread that ends has no place any more
        let _ = OWN.try_with(|own| own.set(self.0.take()));
    }
}

/// Runs a call that may take long.
pub(crate) fn during<R>(name: &'static str, call: impl FnOnce() -> R) -> R {
    let begun = Some((name, Instant::now()));
    let around = OWN.try_with(|own| own.set(begun)).unwrap_or_default();
    let _ended = Ended(around);
    call()
}

/// Returns names and threads for calls that have lasted at least `time`; `None` if there are none.
pub(crate) fn lasting(time: Duration) -> Option<String> {
    let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let named = places.iter().filter_map(Weak::upgrade).filter_map(|place| {
        let call = *place.call.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, _) = call.filter(|(_, begin)| begin.elapsed() >= time)?;
        Some(format!("{name} (thread {})", place.thread.name().unwrap_or("without a name")))
    });
    Some(named.collect::<Vec<_>>().join(", ")).filter(|named| !named.is_empty())
}

/// Longest time that a load waits for messages in flight.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Time between two looks at them.
const INTERVAL: Duration = Duration::from_micros(200);

/// What becomes of a load while messages are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LateLoads {
    /// It is an error.
    Refused,
    /// It waits for the messages, up to some seconds.
    PutOff,
}

impl Default for LateLoads {
    /// Debug builds refuse late loads, so that tests find what is not prepared.
    fn default() -> Self {
        if cfg!(debug_assertions) { Self::Refused } else { Self::PutOff }
    }
}

/// Operations that wait for other ranks.
pub(crate) struct Loads {
    late: LateLoads,
    in_lanes: InFlight,
    in_compute_lane: InFlight,
}

#[derive(Default)]
struct InFlight(Mutex<Vec<Arc<Gate>>>);

impl InFlight {
    fn note(&self, operation: &Arc<Gate>) {
        let mut operations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        operations.retain(|earlier| !earlier.is_passed());
        operations.push(Arc::clone(operation));
    }

    fn is_empty(&self) -> bool {
        let mut operations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        operations.retain(|operation| !operation.is_passed());
        operations.is_empty()
    }
}

impl Loads {
    pub(crate) fn new(late: LateLoads) -> Self {
        Self { late, in_lanes: InFlight::default(), in_compute_lane: InFlight::default() }
    }

    /// Notes an operation of a lane beside the compute lane, which may wait for what this rank queues later.
    pub(crate) fn note_in_lane(&self, operation: &Arc<Gate>) {
        self.in_lanes.note(operation);
    }

    /// Notes an operation of the compute lane, behind all that it depends on.
    pub(crate) fn note_in_compute_lane(&self, operation: &Arc<Gate>) {
        self.in_compute_lane.note(operation);
    }

    /// Returns whether no operation waits for another rank.
    pub(crate) fn are_safe(&self) -> bool {
        self.in_lanes.is_empty() && self.in_compute_lane.is_empty()
    }

    /// Waits until no operation waits for another rank, or for some seconds.
    pub(crate) fn wait(&self) {
        let begin = Instant::now();
        while !self.are_safe() && begin.elapsed() < WAIT_MAX {
            std::thread::sleep(INTERVAL);
        }
    }

    /// Makes sure that a load does not wait for another rank.
    ///
    /// # Errors
    /// [`Error::LateLoad`] if one might, unless late loads are [put off](LateLoads::PutOff).
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        if !self.in_lanes.is_empty() {
            if self.late == LateLoads::Refused {
                return Err(Error::LateLoad { what: what.to_owned() });
            }
            tracing::warn!("{what} is loaded while messages are in flight; the step waits for them");
        }
        self.wait();
        Ok(())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn named(call: &str) -> bool {
        lasting(Duration::ZERO).is_some_and(|calls| calls.contains(call))
    }

    #[test]
    fn calls_are_named_while_they_last() {
        during("outer", || {
            during("inner", || assert!(named("inner") && !named("outer")));
            assert!(named("outer") && !named("inner"));
            let (other, this) = std::thread::scope(|scope| {
                let look =
                    scope.spawn(|| during("of another thread", || (named("of another"), named("outer"))));
                look.join().expect("the thread ends")
            });
            assert!(other && this);
        });
        assert!(!named("outer") && !named("of another"));
        assert!(lasting(Duration::from_hours(1)).is_none());
    }

    #[test]
    #[ignore = "prints a time"]
    #[expect(clippy::print_stdout, reason = "shows the time")]
    fn a_call_costs_nanoseconds() {
        const CALLS: u32 = 1_000_000;
        let begin = Instant::now();
        for _ in 0..CALLS {
            during("call", || std::hint::black_box(0));
        }
        println!("{:?} a call", begin.elapsed() / CALLS);
    }
}
