//! Times every action of a step.

use std::time::Instant;

use dflop_balancer::schedule::Action;
use rustix::time::{ClockId, clock_gettime};

/// One action of a step, with its measured times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// The action.
    pub action: Action,
    /// Start, in nanoseconds since the start of the step.
    pub start_ns: u64,
    /// End, in nanoseconds since the start of the step.
    pub end_ns: u64,
    /// CPU time of the thread that computed it, without waits; of the leading thread if a device computes a
    /// pass with several.
    pub cpu_ns: u64,
}

/// Records the actions of a step.
#[derive(Debug)]
pub(super) struct Clock {
    start: Instant,
    timeline: Vec<TimedAction>,
}

impl Clock {
    pub(super) fn start(actions: usize) -> Self {
        Self { start: Instant::now(), timeline: Vec::with_capacity(actions) }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    pub(super) fn add(&mut self, action: Action, start_ns: u64, cpu_ns: u64) {
        let end_ns = self.now_ns();
        self.timeline.push(TimedAction { action, start_ns, end_ns, cpu_ns });
    }

    pub(super) fn into_timeline(self) -> Vec<TimedAction> {
        self.timeline
    }
}

/// Runs a closure and returns the CPU time that this thread spent on it, in nanoseconds.
pub(super) fn cpu_timed<R>(body: impl FnOnce() -> R) -> (R, u64) {
    let start = thread_cpu_ns();
    let result = body();
    (result, thread_cpu_ns().saturating_sub(start))
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
