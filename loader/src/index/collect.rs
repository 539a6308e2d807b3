//! Processes many items on a few threads, and hands over the results while they are made.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use crate::error::Result;

/// Passes the result of every item to `take`, in the order in which they are ready. At most twice `threads`
/// results wait at a time, and one is in `take`, so memory does not grow with the number of items.
///
/// # Errors
/// The first error of `work` or `take`; the other threads then stop at the end of their item.
pub(super) fn collect<T: Send>(
    items: usize,
    threads: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
    mut take: impl FnMut(usize, Result<T>) -> Result<()>,
) -> Result<()> {
    let (next, is_stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::sync_channel(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, is_stopped, work) = (sender.clone(), &next, &is_stopped, &work);
            scope.spawn(move || {
                while !is_stopped.load(Ordering::Relaxed) {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    if item >= items || sender.send((item, work(item))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        // Dropped at the first error, which wakes a thread that waits for room.
        for (item, result) in receiver {
            take(item, result).inspect_err(|_| is_stopped.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// Result that counts how many of it exist.
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
