//! Locks, channels and threads of this room. `tests/interleavings` runs the other files on its own.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(super) use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
pub(super) use std::thread;
