//! Communication in flight, as the watchdog and the waits of the compute lane see it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use dflop_comm::{StepContext, WaitRecord};

use crate::driver::Event;
use crate::event::Gate;

/// Operation between the call and the end on the device.
pub(super) struct Operation {
    /// Step, microbatch and action.
    pub(super) at: StepContext,
    /// What it does, such as `receive from rank 1`.
    pub(super) what: String,
    /// Rank in the job communicator that status queries name when the operation takes too long.
    pub(super) peer: usize,
    /// Opens with the event behind the operation.
    done: Arc<Gate>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Point in the compute lane before the wait for the operation.
    awaited: Option<Event>,
    /// Compute lane wait, once observed.
    wait: Option<(Instant, WaitRecord)>,
}

/// What the watchdog finds.
pub(super) enum Progress {
    /// The operation is done, or was never queued.
    Done,
    /// Nothing waits for it.
    Ahead,
    /// The compute lane waits for it since then.
    Awaited(Instant),
}

impl Operation {
    pub(super) fn new(at: StepContext, what: String, peer: usize, done: Arc<Gate>) -> Self {
        Self { at, what, peer, done, state: Mutex::default() }
    }

    /// Records that the compute lane waits for the operation from this point on.
    pub(super) fn await_from(&self, event: Event) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).awaited = Some(event);
    }

    /// Checks the operation's progress; `record` records a compute lane wait.
    pub(super) fn look(&self, record: impl FnOnce() -> WaitRecord) -> Progress {
        if self.done.is_passed() {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).wait = None;
            return Progress::Done;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.awaited.as_ref().is_some_and(Event::is_reached) {
            return Progress::Ahead;
        }
        let wait = state.wait.get_or_insert_with(|| (Instant::now(), record()));
        Progress::Awaited(wait.0)
    }
}
