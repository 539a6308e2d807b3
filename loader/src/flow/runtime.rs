//! Starts threads and Tokio runtimes where threads may be scarce.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Returns the number of cores that the process may use, as found by the first call: the query needs dozens
/// of system calls under a control group.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

/// Maximum time for starting a runtime.
const START: Duration = Duration::from_secs(10);

/// Starts a runtime with `threads` named worker threads for I/O and timers.
///
/// Tokio panics if a worker cannot be started, and then waits forever for the started workers. So as many
/// threads are started and ended first, and a separate thread starts the runtime.
///
/// # Errors
/// The operating system error if there are not enough threads or descriptors.
pub fn start_runtime(name: &'static str, threads: usize) -> io::Result<Runtime> {
    let failed = |error: io::Error| {
        let reason = format!("{threads} threads for input and output cannot be started: {error}");
        io::Error::new(error.kind(), reason)
    };
    // Plus the thread that starts the workers.
    check_threads(threads + 1).map_err(failed)?;
    let (send, started) = mpsc::channel();
    let start = move || {
        let mut builder = Builder::new_multi_thread();
        // No receiver is left after the time limit.
        let _late = send.send(builder.worker_threads(threads).thread_name(name).enable_all().build());
    };
    thread::Builder::new().name(name.to_owned()).spawn(start).map_err(failed)?;
    started.recv_timeout(START).unwrap_or_else(|_| Err(failed(io::ErrorKind::WouldBlock.into())))
}

/// Calls `work` on this thread and on up to `threads - 1` additional threads, as many as the system has;
/// returns the results in any order.
///
/// # Panics
/// If `work` does, when all threads have ended.
pub fn on_threads<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, &work).ok();
        let running: Vec<_> = (1..threads).map_while(start).collect();
        let mut results = vec![work()];
        for thread in running {
            results.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        results
    })
}

/// Processes every item on up to `threads` threads, as many as the system has; returns the results in item
/// order.
///
/// # Panics
/// If `work` does.
pub fn in_parallel<T: Sync, R: Send>(threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = on_threads(threads.min(items.len()), || {
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(place) else { return done };
            done.push((place, work(item)));
        }
    });
    let mut results: Vec<(usize, R)> = results.into_iter().flatten().collect();
    results.sort_unstable_by_key(|(place, _)| *place);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Starts threads that end when all are there.
fn check_threads(threads: usize) -> io::Result<()> {
    thread::scope(|scope| {
        let mut waiting = Vec::new();
        for _ in 0..threads {
            let (end, ended) = mpsc::channel::<()>();
            // Fails, and thereby ends, when `end` is dropped.
            thread::Builder::new().spawn_scoped(scope, move || ended.recv())?;
            waiting.push(end);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items_on_any_number_of_threads() {
        let items: Vec<u64> = (0..1000).collect();
        let squares: Vec<u64> = items.iter().map(|item| item * item).collect();
        for threads in [0, 1, 2, 7, 5000] {
            assert_eq!(in_parallel(threads, &items, |item| item * item), squares, "{threads}");
        }
        assert_eq!(in_parallel(3, &[], |item: &u64| *item), Vec::<u64>::new());
        assert_eq!(on_threads(3, || 1), [1, 1, 1]);
    }

    #[test]
    fn a_runtime_runs_on_its_threads() {
        let runtime = start_runtime("named", 2).unwrap();
        let named = async { thread::current().name().map(str::to_owned) };
        assert_eq!(runtime.block_on(async { tokio::spawn(named).await.unwrap() }).as_deref(), Some("named"));
    }
}
