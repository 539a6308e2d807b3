//! Locks, channels and threads whose schedule is chosen. Time does not pass: only a zero limit expires.

use shuttle::sync::mpsc::{self, RecvTimeoutError};
use std::fmt;
use std::time::Duration;

pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(super) use shuttle::sync::mpsc::{RecvError, TryRecvError};
pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard};

pub(super) mod thread {
    pub(crate) use shuttle::thread::{Builder, spawn, yield_now};

    /// Lets other threads run.
    pub(crate) fn sleep(_: std::time::Duration) {
        yield_now();
    }
}

pub(super) struct Sender<T>(mpsc::Sender<T>);

#[derive(Debug)]
pub(super) struct Receiver<T>(mpsc::Receiver<T>);

pub(super) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::channel();
    (Sender(sender), Receiver(receiver))
}

impl<T> Sender<T> {
    pub(super) fn send(&self, item: T) -> Result<(), mpsc::SendError<T>> {
        self.0.send(item)
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

impl<T> Receiver<T> {
    pub(super) fn recv(&self) -> Result<T, RecvError> {
        self.0.recv()
    }

    pub(super) fn try_recv(&self) -> Result<T, TryRecvError> {
        self.0.try_recv()
    }

    pub(super) fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
        if timeout.is_zero() {
            return self.0.try_recv().map_err(|_| RecvTimeoutError::Timeout);
        }
        self.0.recv_timeout(timeout)
    }
}

impl<'a, T> IntoIterator for &'a Receiver<T> {
    type Item = T;
    type IntoIter = mpsc::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<T> IntoIterator for Receiver<T> {
    type Item = T;
    type IntoIter = mpsc::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
