//! Rank waits for peers, as reported to other ranks.

use crate::error::StepContext;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Rank activity, as reported to ranks that wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Status {
    /// Oldest wait on caller threads; `None` if they compute.
    pub(crate) wait: Option<OpenWait>,
    /// Most recent action.
    pub(crate) last: Option<StepContext>,
}

/// Wait that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenWait {
    /// Rank that is waited for.
    pub(crate) peer: usize,
    /// Action that waits.
    pub(crate) at: StepContext,
    /// Time since the wait began, in integer milliseconds.
    pub(crate) age: Duration,
}

/// Wait on one thread for a peer, recorded from the moment that it blocks. It may be extended after the time
/// limit.
#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) peer: usize,
    pub(crate) at: StepContext,
    /// Whether the wait belongs to a collective that runs while the caller computes.
    pub(crate) is_overlapped: bool,
    /// Record number.
    id: Option<u64>,
}

impl Wait {
    pub(crate) fn new(peer: usize, at: StepContext, is_overlapped: bool) -> Self {
        Self { peer, at, is_overlapped, id: None }
    }
}

/// Recorded waits.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// By start, so that the first entry is the oldest wait.
    open: BTreeMap<u64, RecordedWait>,
    begun: u64,
    /// Number of caller threads that wait for an overlapped collective.
    awaiting_overlapped: usize,
}

#[derive(Debug)]
struct RecordedWait {
    peer: usize,
    at: StepContext,
    is_overlapped: bool,
    begin: Instant,
}

impl Waits {
    /// Records a wait; returns whether it was not recorded before.
    pub(crate) fn begin(&mut self, wait: &mut Wait) -> bool {
        if wait.id.is_some() {
            return false;
        }
        let Wait { peer, at, is_overlapped, .. } = *wait;
        self.open.insert(self.begun, RecordedWait { peer, at, is_overlapped, begin: Instant::now() });
        wait.id = Some(self.begun);
        self.begun += 1;
        true
    }

    /// Removes a wait; returns whether it was recorded.
    pub(crate) fn end(&mut self, wait: &mut Wait) -> bool {
        wait.id.take().is_some_and(|id| self.open.remove(&id).is_some())
    }

    /// Records that a caller thread waits for an overlapped collective, or no longer does: waits in the
    /// collective then count as caller waits.
    pub(crate) fn await_overlapped(&mut self, is_waiting: bool) {
        if is_waiting {
            self.awaiting_overlapped += 1;
        } else {
            self.awaiting_overlapped -= 1;
        }
    }

    /// Returns the oldest wait on caller threads; `None` if they compute.
    pub(crate) fn oldest(&self) -> Option<OpenWait> {
        let of_caller = self.open.values().find(|wait| !wait.is_overlapped);
        let overlapped = || self.open.values().next().filter(|_| self.awaiting_overlapped > 0);
        let wait = of_caller.or_else(overlapped)?;
        let age = Duration::from_millis(wait.begin.elapsed().as_millis() as u64);
        Some(OpenWait { peer: wait.peer, at: wait.at, age })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlapped_collective_counts_once_the_caller_waits_for_it() {
        let at = StepContext::step(0, "sum");
        let (mut waits, mut overlapped, mut own) =
            (Waits::default(), Wait::new(1, at, true), Wait::new(2, at, false));
        assert!(waits.begin(&mut overlapped) && !waits.begin(&mut overlapped), "extended, not begun again");
        assert_eq!(waits.oldest(), None, "the caller computes");
        waits.await_overlapped(true);
        assert_eq!(waits.oldest().unwrap().peer, 1);
        waits.begin(&mut own);
        assert_eq!(waits.oldest().unwrap().peer, 2, "its own waits come first");
        assert!(waits.end(&mut own) && !waits.end(&mut own));
        waits.await_overlapped(false);
        assert_eq!(waits.oldest(), None);
    }
}
