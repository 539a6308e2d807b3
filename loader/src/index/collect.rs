//! Processes many items on a few threads, and delivers the results as they become ready.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::error::Result;

/// Passes every item's result to `take` when it is ready, sequentially. At most one result per thread
/// exists at a time, so memory does not grow with the number of items. The calling thread also works; threads
/// that cannot be started are skipped.
///
/// # Errors
/// The first error from `work` or `take`; the remaining threads then stop after the current item.
pub(super) fn collect<T: Send>(
    items: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
    take: impl FnMut(usize, Result<T>) -> Result<()> + Send,
) -> Result<()> {
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    // A thread delivers its result itself: a separate thread would have to be woken for each result.
    let taking = Mutex::new((take, Ok(())));
    let run = || {
        while !is_stopped.load(Ordering::Relaxed) {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            let result = work(item);
            let mut turn = taking.lock().unwrap_or_else(PoisonError::into_inner);
            let (take, ended) = &mut *turn;
            if ended.is_ok() {
                *ended = take(item, result);
                is_stopped.fetch_or(ended.is_err(), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    taking.into_inner().unwrap_or_else(PoisonError::into_inner).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// Result that counts existing instances.
    struct Counted<'a>(&'a AtomicUsize);

    impl<'a> Counted<'a> {
        fn new(existing: &'a AtomicUsize) -> Self {
            existing.fetch_add(1, Ordering::SeqCst);
            Self(existing)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn few_results_exist_at_a_time_however_many_items_there_are() {
        for threads in [1, 2, 5] {
            let existing = AtomicUsize::new(0);
            let mut taken = vec![false; 500];
            let take = |item: usize, result: Result<Counted<'_>>| {
                // Gives the threads every chance to run ahead.
                std::thread::yield_now();
                assert!(existing.load(Ordering::SeqCst) <= 2 * threads + 1);
                assert!(!std::mem::replace(&mut taken[item], true));
                result.map(drop)
            };
            collect(500, threads, |_| Ok(Counted::new(&existing)), take).unwrap();
            assert!(taken.iter().all(|&is_taken| is_taken));
            assert_eq!(existing.load(Ordering::SeqCst), 0);
        }
    }

    #[test]
    fn an_error_ends_all_threads() {
        let failed = || Error::StageEnded { stage: "index" };
        for threads in [1, 4] {
            let started = AtomicUsize::new(0);
            let work = |item| {
                started.fetch_add(1, Ordering::SeqCst);
                if item == 10 { Err(failed()) } else { Ok(()) }
            };
            let error = collect(1_000_000, threads, work, |_, result| result).unwrap_err();
            assert_eq!(error.to_string(), failed().to_string());
            assert!(started.load(Ordering::SeqCst) < 1_000_000);
            let refused = collect(1_000_000, threads, |_| Ok(()), |_, _| Err(failed()));
            assert!(refused.is_err());
        }
    }
}
