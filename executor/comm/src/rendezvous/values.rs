//! Job key values, and ranks that have joined or left: state shared by the server threads.

use super::protocol::ReplyKind;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Values that are set once, and waits for them.
#[derive(Debug, Default)]
pub(super) struct Values {
    state: Mutex<ValuesState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ValuesState {
    of_key: BTreeMap<String, Vec<u8>>,
    counts: BTreeMap<String, u64>,
    /// Published address for every rank.
    addresses: BTreeMap<usize, Vec<u8>>,
    /// Ranks with a connection.
    admitted: BTreeSet<usize>,
    /// Ranks that have sent a request: they know that they were admitted.
    joined: BTreeSet<usize>,
    lost: Option<usize>,
    /// Whether the server is gone, and with it all waits.
    is_over: bool,
}

impl Values {
    /// Sets the value for a key that has none.
    pub(super) fn set(&self, key: String, value: Vec<u8>) -> (ReplyKind, Vec<u8>) {
        let mut state = self.lock();
        if state.of_key.contains_key(&key) {
            return (ReplyKind::Taken, Vec::new());
        }
        state.of_key.insert(key, value);
        self.changed.notify_all();
        (ReplyKind::Value, Vec::new())
    }

    /// Adds one to a counter.
    pub(super) fn count(&self, key: String) -> (ReplyKind, Vec<u8>) {
        let mut state = self.lock();
        let count = state.counts.entry(key).or_default();
        *count += 1;
        (ReplyKind::Value, count.to_le_bytes().to_vec())
    }

    /// Waits for the value of a key, at most until a rank is lost, the server is gone or the time limit is
    /// reached.
    pub(super) fn wait(&self, key: &str, timeout: Duration) -> (ReplyKind, Vec<u8>) {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(value) = state.of_key.get(key) {
                return (ReplyKind::Value, value.clone());
            }
            if let Some(rank) = state.lost {
                return (ReplyKind::Lost, (rank as u32).to_le_bytes().to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_over {
                return (ReplyKind::TimedOut, Vec::new());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Publishes the address of a rank and waits for the addresses of all ranks, which are returned in rank
    /// order, one per line. If the time limit is reached first, the value contains the missing ranks, four
    /// bytes each.
    pub(super) fn exchange_address(
        &self,
        rank: usize,
        address: Vec<u8>,
        size: usize,
        timeout: Duration,
    ) -> (ReplyKind, Vec<u8>) {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        state.addresses.insert(rank, address);
        if state.addresses.len() == size {
            self.changed.notify_all();
        }
        loop {
            if state.addresses.len() == size {
                let addresses: Vec<_> = state.addresses.values().map(Vec::as_slice).collect();
                return (ReplyKind::Value, addresses.join(&b'\n'));
            }
            if let Some(rank) = state.lost {
                return (ReplyKind::Lost, (rank as u32).to_le_bytes().to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_over {
                let missing = (0..size).filter(|rank| !state.addresses.contains_key(rank));
                return (ReplyKind::TimedOut, missing.flat_map(|rank| (rank as u32).to_le_bytes()).collect());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records a rank connection; returns whether it is the only connection of the rank.
    pub(super) fn admit(&self, rank: usize) -> bool {
        self.lock().admitted.insert(rank)
    }

    /// Forgets a rank that was admitted but is gone: the rank may call again.
    pub(super) fn release(&self, rank: usize) {
        self.lock().admitted.remove(&rank);
    }

    /// Records that a rank knows about its admission.
    pub(super) fn join(&self, rank: usize) {
        self.lock().joined.insert(rank);
    }

    /// Returns the number of ranks that have joined.
    pub(super) fn joined(&self) -> usize {
        self.lock().joined.len()
    }

    /// Records that a rank disconnected without leaving, which ends the waits of all remaining ranks if it
    /// had joined.
    pub(super) fn lose(&self, rank: usize) {
        let mut state = self.lock();
        if state.joined.contains(&rank) {
            state.lost.get_or_insert(rank);
        } else {
            // it gave up before it knew that it was admitted, and may call again
            state.admitted.remove(&rank);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        // changed under the lock: a wait that has just checked it would miss the notification
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Returns whether [`close`](Self::close) was called.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    fn lock(&self) -> MutexGuard<'_, ValuesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
