//! Holds the messages that arrived at a rank until they are received.
//!
//! Rank waits for peers, as reported to other ranks.
//!
//! A rank has one mailbox, filled by the transport. The mailbox also records the peers that left, the job
//! failure, and the peers that this rank waits for, which other ranks may request. Every wait ends: with the
//! message, the job failure, or the time limit.

use crate::error::{Failure, StepContext};
use crate::message::{Header, Key, Message, ReceiveBufferPool};
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Number of messages to one peer whose times are kept.
const WRITTEN_TIMES: usize = 1024;

/// Reason why a wait ended without the message.
#[derive(Debug)]
pub(crate) enum Interrupt {
    /// The job has ended.
    Failed(Failure),
    /// The peer has finished and sends nothing more.
    Left,
    /// The time limit is reached.
    TimedOut,
}

/// Receive that was posted before the message arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// A message with this header.
    Message(Header),
    /// Any message, which is discarded: the receive was dropped.
    Nothing,
}

/// Messages with the same key. Receives are numbered when they are posted, messages when they arrive.
#[derive(Debug, Default)]
struct Queue {
    posted: u64,
    arrived: u64,
    /// Receives whose message has not arrived.
    expected: BTreeMap<u64, Expected>,
    /// Messages with arrival times.
    messages: BTreeMap<u64, (Message, Instant)>,
}

#[derive(Debug, Default)]
struct Peer {
    buffered_bytes: usize,
    awaiting: usize,
    written: u64,
    /// Times at which the last messages were written.
    written_times: VecDeque<Instant>,
    /// Whether writing to the peer failed.
    is_broken: bool,
    has_left: bool,
    heard: Option<StepContext>,
}

#[derive(Debug)]
struct MailboxState {
    queues: BTreeMap<Key, Queue>,
    peers: Vec<Peer>,
    waits: Waits,
    last: Option<StepContext>,
    failure: Option<Failure>,
    /// Whether this rank has left, and receives nothing more.
    is_closed: bool,
}

/// Arrived messages, and all state that waits depend on.
#[derive(Debug)]
pub(crate) struct Mailbox {
    state: Mutex<MailboxState>,
    changed: Condvar,
    buffered_bytes_max: usize,
    /// Buffers for incoming messages.
    pub(crate) receive_buffers: ReceiveBufferPool,
}

impl Mailbox {
    pub(crate) fn new(size: usize, buffered_bytes_max: usize) -> Self {
        let state = MailboxState {
            queues: BTreeMap::new(),
            peers: (0..size).map(|_| Peer::default()).collect(),
            waits: Waits::default(),
            last: None,
            failure: None,
            is_closed: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            buffered_bytes_max,
            receive_buffers: ReceiveBufferPool::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        // a panicking thread leaves consistent state: every change is complete before the lock is released
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message to the matching queue, unless the receive was dropped.
    pub(crate) fn deliver(&self, from: usize, message: Message) {
        let mut state = self.lock();
        let key = message.header.key(from);
        let bytes = message.buffer.as_bytes().len();
        state.peers[from].heard = Some(message.header.at);
        let queue = state.queues.entry(key).or_default();
        let number = queue.arrived;
        queue.arrived += 1;
        if queue.expected.remove(&number) == Some(Expected::Nothing) {
            state.remove_if_done(key);
        } else {
            queue.messages.insert(number, (message, Instant::now()));
            state.peers[from].buffered_bytes += bytes;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the receive for the next message with a key; `None` if it was not posted yet.
    pub(crate) fn expected(&self, key: Key) -> Option<Expected> {
        let state = self.lock();
        let queue = state.queues.get(&key)?;
        queue.expected.get(&queue.arrived).copied()
    }

    /// Returns the limit for unreceived bytes from one peer.
    pub(crate) fn buffered_bytes_max(&self) -> usize {
        self.buffered_bytes_max
    }

    /// Reserves the next message with a key, which must have this header, and returns the queue number.
    pub(crate) fn post(&self, key: Key, header: Header) -> u64 {
        let mut state = self.lock();
        let queue = state.queues.entry(key).or_default();
        let number = queue.posted;
        queue.posted += 1;
        if number >= queue.arrived {
            queue.expected.insert(number, Expected::Message(header));
        }
        number
    }

    /// Discards a reserved message, now or when it arrives, and frees the message bytes.
    pub(crate) fn discard(&self, key: Key, number: u64, peer: usize) {
        let mut state = self.lock();
        let Some(queue) = state.queues.get_mut(&key) else { return };
        if let Some((message, _)) = queue.messages.remove(&number) {
            state.peers[peer].buffered_bytes -= message.buffer.as_bytes().len();
            state.remove_if_done(key);
        } else if let Some(expected) = queue.expected.get_mut(&number) {
            *expected = Expected::Nothing;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns whether the message has arrived or never will.
    pub(crate) fn is_ready(&self, key: Key, number: u64) -> bool {
        let state = self.lock();
        let has_arrived = state.queues.get(&key).is_some_and(|queue| queue.messages.contains_key(&number));
        has_arrived || state.failure.is_some()
    }

    /// Waits for a reserved message; also returns the arrival time.
    pub(crate) fn take(
        &self,
        key: Key,
        number: u64,
        wait: &mut Wait,
        timeout: Duration,
    ) -> Result<(Message, Instant), Interrupt> {
        let peer = wait.peer;
        self.wait(
            wait,
            timeout,
            |peer| peer.has_left,
            |state| {
                let (message, arrived) = state.queues.get_mut(&key)?.messages.remove(&number)?;
                state.remove_if_done(key);
                state.peers[peer].buffered_bytes -= message.buffer.as_bytes().len();
                Some((message, arrived))
            },
        )
    }

    /// Waits until the transport has written this number of messages to a peer.
    pub(crate) fn wait_written(
        &self,
        count: u64,
        wait: &mut Wait,
        timeout: Duration,
    ) -> Result<(), Interrupt> {
        let peer = wait.peer;
        // a peer may leave after the last message but before its writer has counted that message
        let is_gone = |peer: &Peer| peer.has_left && peer.is_broken;
        self.wait(wait, timeout, is_gone, |state| (state.peers[peer].written >= count).then_some(()))
    }

    fn wait<T>(
        &self,
        wait: &mut Wait,
        timeout: Duration,
        is_gone: impl Fn(&Peer) -> bool,
        mut ready: impl FnMut(&mut MailboxState) -> Option<T>,
    ) -> Result<T, Interrupt> {
        let mut state = self.lock();
        state.last = Some(wait.at);
        if let Some(value) = ready(&mut state) {
            state.end_wait(wait);
            drop(state);
            self.changed.notify_all();
            return Ok(value);
        }
        state.begin_wait(wait);
        // after recording: at the time limit the wait is as old as the limit
        let deadline = Instant::now() + timeout;
        self.changed.notify_all();
        let ended = loop {
            if let Some(value) = ready(&mut state) {
                break Ok(value);
            }
            // after `ready`: a message that arrived before the failure can still be received
            if let Some(failure) = &state.failure {
                break Err(Interrupt::Failed(failure.clone()));
            }
            if is_gone(&state.peers[wait.peer]) {
                break Err(Interrupt::Left);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(Interrupt::TimedOut);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        // a timed-out wait stays recorded: it may be extended, and waiting ranks may request it
        if !matches!(ended, Err(Interrupt::TimedOut)) {
            state.end_wait(wait);
        }
        drop(state);
        self.changed.notify_all();
        ended
    }

    /// Records a wait outside the mailbox, until [`end_wait`](Self::end_wait).
    pub(crate) fn begin_wait(&self, wait: &mut Wait) {
        let mut state = self.lock();
        state.last = Some(wait.at);
        state.begin_wait(wait);
        drop(state);
        // the peer may wait for room, which this frees
        self.changed.notify_all();
    }

    /// Ends a wait recorded by [`begin_wait`](Self::begin_wait).
    pub(crate) fn end_wait(&self, wait: &mut Wait) {
        self.lock().end_wait(wait);
        self.changed.notify_all();
    }

    /// Records that a caller thread waits for an overlapped collective, or no longer does.
    pub(crate) fn await_overlapped(&self, is_waiting: bool) {
        self.lock().waits.await_overlapped(is_waiting);
    }

    /// Waits until there is room for more messages from a peer. There is always room while any thread waits
    /// for that peer, and never once this rank has left.
    pub(crate) fn wait_for_room(&self, from: usize, timeout: Duration) -> Result<(), Interrupt> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(Interrupt::Failed(failure.clone()));
            }
            if state.is_closed {
                return Err(Interrupt::Left);
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

    /// Returns whether [`wait_for_room`](Self::wait_for_room) would return immediately.
    pub(crate) fn has_room(&self, from: usize) -> bool {
        self.wait_for_room(from, Duration::ZERO).is_ok()
    }

    /// Counts another message as written to a peer.
    pub(crate) fn note_written(&self, peer: usize) {
        let mut state = self.lock();
        let Peer { written, written_times, .. } = &mut state.peers[peer];
        *written += 1;
        written_times.push_back(Instant::now());
        if written_times.len() > WRITTEN_TIMES {
            written_times.pop_front();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the time at which a recent message to a peer was written, by message number from 1.
    pub(crate) fn written_at(&self, peer: usize, number: u64) -> Option<Instant> {
        let state = self.lock();
        let Peer { written, written_times, .. } = &state.peers[peer];
        let from_last = usize::try_from(written.checked_sub(number)?).ok()?;
        written_times.get(written_times.len().checked_sub(from_last + 1)?).copied()
    }

    /// Records that writing to a peer failed.
    pub(crate) fn set_broken(&self, peer: usize) {
        self.lock().peers[peer].is_broken = true;
        self.changed.notify_all();
    }

    /// Returns the number of messages written to a peer.
    pub(crate) fn written(&self, peer: usize) -> u64 {
        self.lock().peers[peer].written
    }

    /// Records the current action of this rank.
    pub(crate) fn note(&self, at: StepContext) {
        self.lock().last = Some(at);
    }

    /// Records that a peer has finished. Earlier messages from the peer can still be received.
    pub(crate) fn set_left(&self, peer: usize) {
        self.lock().peers[peer].has_left = true;
        self.changed.notify_all();
    }

    /// Returns whether a peer has finished.
    pub(crate) fn has_left(&self, peer: usize) -> bool {
        self.lock().peers[peer].has_left
    }

    /// Waits until the job fails, or this rank or a peer leaves; returns whether this happened in time.
    pub(crate) fn wait_for_end(&self, peer: usize, timeout: Duration) -> bool {
        let goes_on = |state: &mut MailboxState| {
            state.failure.is_none() && !state.is_closed && !state.peers[peer].has_left
        };
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, goes_on);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns whether this rank has left.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Records that this rank has left, which ends all waits for room.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Ends all waits; the first failure is kept.
    pub(crate) fn set_failure(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Returns the job failure.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Returns the activity of this rank.
    pub(crate) fn status(&self) -> Status {
        let state = self.lock();
        Status { wait: state.waits.oldest(), last: state.last }
    }

    /// Returns the action of a peer when it sent the most recent message.
    pub(crate) fn heard(&self, peer: usize) -> Option<StepContext> {
        self.lock().peers[peer].heard
    }
}

impl MailboxState {
    /// Removes a queue without messages and receives: collectives use every tag once, and unused queues would
    /// accumulate over the run.
    fn remove_if_done(&mut self, key: Key) {
        let is_done = |queue: &Queue| queue.messages.is_empty() && queue.posted == queue.arrived;
        if self.queues.get(&key).is_some_and(is_done) {
            self.queues.remove(&key);
        }
    }

    /// Records a wait, unless it is an extended wait.
    fn begin_wait(&mut self, wait: &mut Wait) {
        if self.waits.begin(wait) {
            self.peers[wait.peer].awaiting += 1;
        }
    }

    fn end_wait(&mut self, wait: &mut Wait) {
        if self.waits.end(wait) {
            self.peers[wait.peer].awaiting -= 1;
        }
    }
}

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
    use crate::message::{Buffer, Op, PayloadShape};

    const BYTES: usize = 64;

    fn header() -> Header {
        let shape = PayloadShape::f32(1, BYTES / 4);
        Header { comm: 0, op: Op::Point, tag: 7, at: StepContext::step(0, "recv"), shape }
    }

    fn message() -> Message {
        Message { header: header(), buffer: Buffer::F32(vec![1.0; BYTES / 4]) }
    }

    fn take(mailbox: &Mailbox, number: u64) -> Result<Message, Interrupt> {
        let mut wait = Wait::new(1, header().at, false);
        mailbox.take(header().key(1), number, &mut wait, Duration::from_millis(5)).map(|(message, _)| message)
    }

    #[test]
    fn a_discarded_receive_frees_its_message_and_its_share_of_the_bound() {
        let mailbox = Mailbox::new(2, BYTES);
        let key = header().key(1);
        // a receive is dropped after its message arrived, before, and without any message
        let numbers = [0, 1, 2].map(|_| mailbox.post(key, header()));
        mailbox.deliver(1, message());
        assert_eq!(mailbox.lock().peers[1].buffered_bytes, BYTES);
        for number in numbers {
            mailbox.discard(key, number, 1);
        }
        assert_eq!(mailbox.lock().peers[1].buffered_bytes, 0);
        assert_eq!(mailbox.expected(key), Some(Expected::Nothing));
        mailbox.deliver(1, message());
        assert_eq!(mailbox.lock().peers[1].buffered_bytes, 0);
        mailbox.deliver(1, message());
        assert!(mailbox.lock().queues.is_empty(), "nothing of the queue remains");
        // the next receive gets the next message
        let next = mailbox.post(key, header());
        assert_eq!(mailbox.expected(key), Some(Expected::Message(header())));
        mailbox.deliver(1, message());
        assert_eq!(mailbox.expected(key), None);
        assert_eq!(take(&mailbox, next).unwrap().buffer, message().buffer);
        assert!(mailbox.lock().queues.is_empty());
        assert_eq!(mailbox.lock().peers[1].buffered_bytes, 0);
    }

    #[test]
    fn messages_keep_their_order_around_a_discarded_receive() {
        let mailbox = Mailbox::new(2, 1 << 20);
        let key = header().key(1);
        let numbers = [0, 1, 2].map(|_| mailbox.post(key, header()));
        mailbox.discard(key, numbers[1], 1);
        for value in [10.0, 11.0, 12.0] {
            mailbox.deliver(1, Message { header: header(), buffer: Buffer::F32(vec![value; BYTES / 4]) });
        }
        for (number, value) in [(0, 10.0), (2, 12.0)] {
            assert_eq!(take(&mailbox, number).unwrap().buffer, Buffer::F32(vec![value; BYTES / 4]));
        }
        assert!(mailbox.lock().queues.is_empty());
    }

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
