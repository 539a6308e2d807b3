//! Times every action and all communication in a step.

use std::time::Instant;

use dflop_balancer::schedule::Action;
use dflop_device::{Device, Lane};

use super::communication_times::{Awaited, TimedCommunication, timed};

/// Action in a step, with measured times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// Executed action.
    pub action: Action,
    /// Start, in nanoseconds since the start of the step: of the call on a CPU, of the device work on a
    /// different processor, which runs asynchronously.
    pub start_ns: u64,
    /// End, in nanoseconds since the start of the step.
    pub end_ns: u64,
    /// Time that the device computed, without waits, in nanoseconds. On a CPU this is CPU time, of the
    /// leading thread if several threads compute a pass.
    pub busy_ns: u64,
}

/// Action that may still be running on the device.
struct Marked<D: Device> {
    action: Action,
    start_ns: u64,
    end_ns: u64,
    busy: [D::Event; 2],
}

/// Records the actions in a step.
pub(super) struct Clock<D: Device> {
    start: Instant,
    begin: D::Event,
    timeline: Vec<Marked<D>>,
    /// Communication that operations were ordered after.
    pub(super) awaited: Vec<Awaited<D>>,
}

impl<D: Device> Clock<D> {
    pub(super) fn start(device: &D, actions: usize) -> dflop_device::Result<Self> {
        let begin = device.mark(Lane::Compute)?;
        let (timeline, awaited) = (Vec::with_capacity(actions), Vec::new());
        Ok(Self { start: Instant::now(), begin, timeline, awaited })
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    pub(super) fn add(&mut self, action: Action, start_ns: u64, busy: [D::Event; 2]) {
        let end_ns = self.now_ns();
        self.timeline.push(Marked { action, start_ns, end_ns, busy });
    }

    /// Returns all communication that operations were ordered after, once the device has completed it.
    pub(super) fn communication(&self, device: &D) -> Vec<TimedCommunication> {
        timed(device, &self.begin, &self.awaited)
    }

    /// Returns all actions, after the device has completed them.
    pub(super) fn timeline(&self, device: &D) -> Vec<TimedAction> {
        // The calls on another processor return long before the work begins.
        let is_behind = device.host_threads().is_none();
        let since_begin = |event: &D::Event| u64::try_from(device.elapsed_ns(&self.begin, event)?).ok();
        let timed = |Marked { action, start_ns, end_ns, busy: [start, end] }: &Marked<D>| {
            let own = since_begin(start).zip(since_begin(end)).filter(|_| is_behind);
            let (start_ns, end_ns) = own.unwrap_or((*start_ns, *end_ns));
            TimedAction { action: *action, start_ns, end_ns, busy_ns: device.busy_ns(start, end) }
        };
        self.timeline.iter().map(timed).collect()
    }
}
