//! Tasks and channels whose schedule is chosen.

use shuttle::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;

pub(super) use shuttle::future::spawn;

/// Channel with several receivers, whose sender never waits: the given capacity must suffice.
pub(super) fn bounded<T>(length_max: usize) -> (Sender<T>, Receiver<T>) {
    let channel = Arc::new(Channel::new(length_max));
    (Sender(channel.clone()), Receiver(channel))
}

struct Channel<T> {
    state: Mutex<ChannelState<T>>,
    changed: Condvar,
    length_max: usize,
}

struct ChannelState<T> {
    waiting: VecDeque<T>,
    receivers: usize,
    is_closed: bool,
}

pub(super) struct Sender<T>(Arc<Channel<T>>);

pub(super) struct Receiver<T>(Arc<Channel<T>>);

/// The other half is gone.
#[derive(Debug)]
pub(super) struct Gone;

impl<T> Channel<T> {
    fn new(length_max: usize) -> Self {
        let state = ChannelState { waiting: VecDeque::new(), receivers: 1, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), length_max }
    }
}

impl<T> Sender<T> {
    pub(super) fn send(&self, item: T) -> Result<(), Gone> {
        let mut state = self.0.state.lock().unwrap();
        if state.receivers == 0 {
            return Err(Gone);
        }
        assert!(state.waiting.len() < self.0.length_max, "a task waits in a thread's way");
        state.waiting.push_back(item);
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().is_closed = true;
        self.0.changed.notify_all();
    }
}

impl<T> Receiver<T> {
    pub(super) fn recv(&self) -> Result<T, Gone> {
        let mut state = self.0.state.lock().unwrap();
        loop {
            if let Some(item) = state.waiting.pop_front() {
                return Ok(item);
            }
            if state.is_closed {
                return Err(Gone);
            }
            state = self.0.changed.wait(state).unwrap();
        }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.0.state.lock().unwrap().receivers += 1;
        Self(self.0.clone())
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().receivers -= 1;
    }
}
