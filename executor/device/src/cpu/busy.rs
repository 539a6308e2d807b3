//! CPU time for device work, by calling thread.

use std::cell::Cell;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

thread_local! {
    /// CPU time for the operations that this thread called, in nanoseconds.
    static CALLED_NS: Cell<u64> = const { Cell::new(0) };
}

/// Point in the work that a thread called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuEvent {
    busy_ns: u64,
    at: Instant,
}

impl CpuEvent {
    /// Returns the CPU time between two events on the same thread, in nanoseconds: the time of the leading
    /// thread in each operation, without waits for other ranks.
    pub(super) fn since(self, start: Self) -> u64 {
        self.busy_ns.saturating_sub(start.busy_ns)
    }

    /// Returns the same work at a different time.
    pub(super) fn at(self, at: Instant) -> Self {
        Self { at, ..self }
    }

    /// Returns the time from this event to `to`, in nanoseconds.
    pub(super) fn elapsed_ns(self, to: Self) -> i64 {
        let ns =
            |later: Instant, earlier: Instant| later.saturating_duration_since(earlier).as_nanos() as i64;
        ns(to.at, self.at) - ns(self.at, to.at)
    }
}

/// Counts the CPU time for operations.
pub(super) struct Busy;

impl Busy {
    /// Runs a closure on a computing thread, and returns the CPU time.
    pub(super) fn time<R>(body: impl FnOnce() -> R) -> (R, u64) {
        let start = thread_cpu_ns();
        let result = body();
        (result, thread_cpu_ns().saturating_sub(start))
    }

    /// Adds the CPU time of an operation to the total of the calling thread.
    pub(super) fn count<R>(run: impl FnOnce() -> (R, u64)) -> R {
        let (result, ns) = run();
        CALLED_NS.set(CALLED_NS.get() + ns);
        result
    }

    /// Returns the CPU time so far: the time of this thread if it computes, otherwise the time of the
    /// operations that it called.
    pub(super) fn now(is_computing: bool) -> CpuEvent {
        let busy_ns = if is_computing { thread_cpu_ns() } else { CALLED_NS.get() };
        CpuEvent { busy_ns, at: Instant::now() }
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
