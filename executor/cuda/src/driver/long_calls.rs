//! Calls of the driver that may wait for work of the device, while they last: for reports of a driver that
//! does not answer.

use std::sync::{Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A call in progress.
struct LongCall {
    name: &'static str,
    thread: Thread,
    begin: Instant,
}

/// Calls of all threads of this process, by a number.
static CALLS: Mutex<(u64, Vec<(u64, LongCall)>)> = Mutex::new((0, Vec::new()));

/// Takes a call from the list when it ends.
struct Entry(u64);

impl Drop for Entry {
    fn drop(&mut self) {
        CALLS.lock().unwrap_or_else(PoisonError::into_inner).1.retain(|(number, _)| *number != self.0);
    }
}

/// Makes a call that may take long.
pub(crate) fn during<R>(name: &'static str, call: impl FnOnce() -> R) -> R {
    let made = LongCall { name, thread: std::thread::current(), begin: Instant::now() };
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls.0 += 1;
    let number = calls.0;
    calls.1.push((number, made));
    drop(calls);
    let _entry = Entry(number);
    call()
}

/// Names the calls that have lasted for this time, with their threads; `None` if there are none.
pub(crate) fn lasting(time: Duration) -> Option<String> {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let long = calls.1.iter().filter(|(_, call)| call.begin.elapsed() >= time);
    let named = long.map(|(_, call)| {
        format!("{} (thread {})", call.name, call.thread.name().unwrap_or("without a name"))
    });
    Some(named.collect::<Vec<_>>().join(", ")).filter(|named| !named.is_empty())
}
