//! Where the messages of a rank arrive and are waited for.
//!
//! One per rank, filled by a transport. Knows who left, what the job failed of and what this rank waits
//! for, which other ranks may ask. Every wait ends: with the message, the job's failure, or the time limit.

use super::error::Failure;
use super::message::{Key, Message};
use super::receive_buffers::ReceiveBufferPool;
use super::step_context::StepContext;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a rank is doing, as told to others that wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Status {
    /// Rank that is waited for longest, and where.
    pub(super) wait: Option<(usize, StepContext)>,
    /// What was done, or begun, last.
    pub(super) last: Option<StepContext>,
}

/// Why a wait ended without what it waited for.
#[derive(Debug)]
pub(super) enum Interrupt {
    /// The job is over.
    Failed(Failure),
    /// The peer finished; nothing more will come.
    Left,
    /// The time limit is reached.
    TimedOut,
}

/// Messages of one key. Receives are numbered when they are posted, messages when they arrive.
#[derive(Debug, Default)]
struct Queue {
    posted: u64,
    arrived: u64,
    messages: BTreeMap<u64, Message>,
}

#[derive(Debug, Default)]
struct Peer {
    buffered_bytes: usize,
    awaiting: usize,
    written: u64,
    /// Nothing more can be written.
    is_broken: bool,
    has_left: bool,
    heard: Option<StepContext>,
}

#[derive(Debug)]
struct State {
    queues: BTreeMap<Key, Queue>,
    peers: Vec<Peer>,
    waits: BTreeMap<u64, (usize, StepContext)>,
    waits_begun: u64,
    last: Option<StepContext>,
    failure: Option<Failure>,
}

/// Arrived messages and everything that a wait depends on.
#[derive(Debug)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
    buffered_bytes_max: usize,
    /// Buffers to receive into.
    pub(super) receive_buffers: ReceiveBufferPool,
}

impl Mailbox {
    pub(super) fn new(size: usize, buffered_bytes_max: usize) -> Self {
        let state = State {
            queues: BTreeMap::new(),
            peers: (0..size).map(|_| Peer::default()).collect(),
            waits: BTreeMap::new(),
            waits_begun: 0,
            last: None,
            failure: None,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            buffered_bytes_max,
            receive_buffers: ReceiveBufferPool::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // every change is complete before the lock is given up
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message into its queue.
    pub(super) fn deliver(&self, from: usize, message: Message) {
        let mut state = self.lock();
        let peer = &mut state.peers[from];
        peer.buffered_bytes += message.buffer.as_bytes().len();
        peer.heard = Some(message.header.at);
        let queue = state.queues.entry(message.header.key(from)).or_default();
        queue.messages.insert(queue.arrived, message);
        queue.arrived += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Reserves the next message of a key, and returns its number there.
    pub(super) fn post(&self, key: Key) -> u64 {
        let mut state = self.lock();
        let queue = state.queues.entry(key).or_default();
        queue.posted += 1;
        queue.posted - 1
    }

    /// Whether the message arrived, or will never.
    pub(super) fn is_ready(&self, key: Key, number: u64) -> bool {
        let state = self.lock();
        let has_arrived = state.queues.get(&key).is_some_and(|queue| queue.messages.contains_key(&number));
        has_arrived || state.failure.is_some()
    }

    /// Waits for a message that was posted.
    pub(super) fn take(
        &self,
        key: Key,
        number: u64,
        peer: usize,
        at: StepContext,
        timeout: Duration,
    ) -> Result<Message, Interrupt> {
        self.wait(
            peer,
            at,
            timeout,
            |peer| peer.has_left,
            |state| {
                let queue = state.queues.get_mut(&key)?;
                let message = queue.messages.remove(&number)?;
                if queue.messages.is_empty() && queue.posted == queue.arrived {
                    state.queues.remove(&key);
                }
                state.peers[peer].buffered_bytes -= message.buffer.as_bytes().len();
                Some(message)
            },
        )
    }

    /// Waits until the transport wrote as many messages to a peer.
    pub(super) fn wait_written(
        &self,
        peer: usize,
        count: u64,
        at: StepContext,
        timeout: Duration,
    ) -> Result<(), Interrupt> {
        // a peer may leave with the last message before its writer says that it was written
        let is_gone = |peer: &Peer| peer.has_left && peer.is_broken;
        self.wait(peer, at, timeout, is_gone, |state| (state.peers[peer].written >= count).then_some(()))
    }

    fn wait<T>(
        &self,
        peer: usize,
        at: StepContext,
        timeout: Duration,
        is_gone: impl Fn(&Peer) -> bool,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Interrupt> {
        let mut state = self.lock();
        state.last = Some(at);
        if let Some(value) = ready(&mut state) {
            drop(state);
            self.changed.notify_all();
            return Ok(value);
        }
        let deadline = Instant::now() + timeout;
        let id = state.begin_wait(peer, at);
        self.changed.notify_all();
        let ended = loop {
            if let Some(value) = ready(&mut state) {
                break Ok(value);
            }
            if let Some(failure) = &state.failure {
                break Err(Interrupt::Failed(failure.clone()));
            }
            if is_gone(&state.peers[peer]) {
                break Err(Interrupt::Left);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(Interrupt::TimedOut);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        // a wait without an end stays on record: others that wait in turn ask for it
        if !matches!(ended, Err(Interrupt::TimedOut)) {
            state.end_wait(id, peer);
        }
        drop(state);
        self.changed.notify_all();
        ended
    }

    /// Says that this rank waits for a peer elsewhere than here, until the returned number is given back.
    pub(super) fn begin_wait(&self, peer: usize, at: StepContext) -> u64 {
        let mut state = self.lock();
        state.last = Some(at);
        state.begin_wait(peer, at)
    }

    /// Ends what [`begin_wait`](Self::begin_wait) began.
    pub(super) fn end_wait(&self, id: u64, peer: usize) {
        self.lock().end_wait(id, peer);
        self.changed.notify_all();
    }

    /// Waits until there is room for more messages of a peer. There always is while someone waits for it.
    pub(super) fn wait_for_room(&self, from: usize, timeout: Duration) -> Result<(), Interrupt> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(Interrupt::Failed(failure.clone()));
            }
            let peer = &state.peers[from];
            if peer.buffered_bytes <= self.buffered_bytes_max || peer.awaiting > 0 {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Interrupt::TimedOut);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether [`wait_for_room`](Self::wait_for_room) would return at once.
    pub(super) fn has_room(&self, from: usize) -> bool {
        self.wait_for_room(from, Duration::ZERO).is_ok()
    }

    /// Says that one more message to a peer was written.
    pub(super) fn note_written(&self, peer: usize) {
        self.lock().peers[peer].written += 1;
        self.changed.notify_all();
    }

    /// Says that nothing more can be written to a peer.
    pub(super) fn set_broken(&self, peer: usize) {
        self.lock().peers[peer].is_broken = true;
        self.changed.notify_all();
    }

    /// Number of messages that were written to a peer.
    pub(super) fn written(&self, peer: usize) -> u64 {
        self.lock().peers[peer].written
    }

    /// Says what this rank does now.
    pub(super) fn note(&self, at: StepContext) {
        self.lock().last = Some(at);
    }

    /// Says that a peer finished. What it sent before can still be received.
    pub(super) fn set_left(&self, peer: usize) {
        self.lock().peers[peer].has_left = true;
        self.changed.notify_all();
    }

    /// Whether a peer finished.
    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.lock().peers[peer].has_left
    }

    /// Ends all waits; the first failure stays.
    pub(super) fn set_failure(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// What the job failed of.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// What this rank does.
    pub(super) fn status(&self) -> Status {
        let state = self.lock();
        Status { wait: state.waits.values().next().copied(), last: state.last }
    }

    /// Where a peer was when it sent what arrived last.
    pub(super) fn heard(&self, peer: usize) -> Option<StepContext> {
        self.lock().peers[peer].heard
    }
}

impl State {
    fn begin_wait(&mut self, peer: usize, at: StepContext) -> u64 {
        self.peers[peer].awaiting += 1;
        self.waits.insert(self.waits_begun, (peer, at));
        self.waits_begun += 1;
        self.waits_begun - 1
    }

    fn end_wait(&mut self, id: u64, peer: usize) {
        self.peers[peer].awaiting -= 1;
        self.waits.remove(&id);
    }
}
