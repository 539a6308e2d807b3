//! Locks, channels and threads in this crate. `tests/interleavings` compiles the other files separately.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(super) use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
pub(super) use std::thread;
