//! Compute stream work times, by kernel name or product shape.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::driver::{Event, Stream};
use crate::error::Result;

/// Device time for a kernel, or for products with the same shape.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Kernel name, or product shape.
    pub name: String,
    /// Number of launches.
    pub launches: u64,
    /// Total time of all launches in nanoseconds.
    pub nanoseconds: u64,
}

/// Events around every launch, while they are recorded.
#[derive(Default)]
pub(crate) struct KernelTimes {
    is_on: AtomicBool,
    /// Name, begin and end for every launch so far.
    launches: Mutex<Vec<(String, Event, Event)>>,
}

impl KernelTimes {
    /// Starts or stops recording launches.
    pub(crate) fn record(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Queues work; while launches are recorded, between two events.
    pub(crate) fn time<T, E: From<crate::error::Error>>(
        &self,
        stream: &Stream,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        if !self.is_on.load(Ordering::Relaxed) {
            return work();
        }
        let begin = stream.record()?;
        let done = work()?;
        let end = stream.record()?;
        self.launches.lock().unwrap_or_else(PoisonError::into_inner).push((name(), begin, end));
        Ok(done)
    }

    /// Waits for the stream, and takes the times so far, longest first.
    pub(crate) fn take(&self, stream: &Stream) -> Result<Vec<KernelTime>> {
        stream.synchronize()?;
        let launches = std::mem::take(&mut *self.launches.lock().unwrap_or_else(PoisonError::into_inner));
        let mut by_name = BTreeMap::<String, (u64, u64)>::new();
        for (name, begin, end) in launches {
            let (count, nanoseconds) = by_name.entry(name).or_default();
            *count += 1;
            *nanoseconds += begin.nanoseconds_until(&end);
        }
        let time = |(name, (launches, nanoseconds))| KernelTime { name, launches, nanoseconds };
        let mut times: Vec<KernelTime> = by_name.into_iter().map(time).collect();
        times.sort_by_key(|time| std::cmp::Reverse(time.nanoseconds));
        Ok(times)
    }
}
