//! Times every action of a step.

use std::time::Instant;

use dflop_balancer::schedule::Action;
use dflop_device::Device;

/// One action of a step, with its measured times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// The action.
    pub action: Action,
    /// Start, in nanoseconds since the start of the step.
    pub start_ns: u64,
    /// End, in nanoseconds since the start of the step.
    pub end_ns: u64,
    /// Time that the device computed, without waits, in nanoseconds. On a CPU this is CPU time, of the
    /// leading thread if a device computes a pass with several.
    pub busy_ns: u64,
}

/// Action whose work may still be running on the device.
struct Marked<D: Device> {
    action: Action,
    start_ns: u64,
    end_ns: u64,
    busy: [D::Event; 2],
}

/// Records the actions of a step.
pub(super) struct Clock<D: Device> {
    start: Instant,
    timeline: Vec<Marked<D>>,
}

impl<D: Device> Clock<D> {
    pub(super) fn start(actions: usize) -> Self {
        Self { start: Instant::now(), timeline: Vec::with_capacity(actions) }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    pub(super) fn add(&mut self, action: Action, start_ns: u64, busy: [D::Event; 2]) {
        let end_ns = self.now_ns();
        self.timeline.push(Marked { action, start_ns, end_ns, busy });
    }

    /// Returns all actions, after the device has done them.
    pub(super) fn timeline(&self, device: &D) -> Vec<TimedAction> {
        let timed = |Marked { action, start_ns, end_ns, busy: [start, end] }: &Marked<D>| TimedAction {
            action: *action,
            start_ns: *start_ns,
            end_ns: *end_ns,
            busy_ns: device.busy_ns(start, end),
        };
        self.timeline.iter().map(timed).collect()
    }
}
