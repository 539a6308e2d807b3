//! Process resources: threads and Tokio runtimes where threads may be scarce, and memory that can still be
//! allocated.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;
use std::{io, thread};

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

/// Returns the bytes that this process can still allocate: the available system memory, limited by the
/// control group; `None` where neither can be read.
pub(crate) fn memory_available() -> Option<u64> {
    let system = available_of_system(&read_to_string("/proc/meminfo").ok()?);
    [system, left_in_group(Path::new("/sys/fs/cgroup"))].into_iter().flatten().min()
}

/// Reads `MemAvailable` from `/proc/meminfo`.
fn available_of_system(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// Reads the bytes left in a version 2 control group; `None` without a limit.
fn left_in_group(group: &Path) -> Option<u64> {
    let bytes = |name: &str| read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    // Without a limit the file says `max`.
    Some(bytes("memory.max")?.saturating_sub(bytes("memory.current")?))
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

    #[test]
    fn available_memory_is_read() {
        let meminfo = "MemTotal:       24576000 kB\nMemAvailable:       2048 kB\n";
        assert_eq!(available_of_system(meminfo), Some(2 << 20));
        assert_eq!(available_of_system("MemTotal: 1 kB"), None);
        #[cfg(target_os = "linux")]
        assert!(memory_available().unwrap() > 0);
    }

    #[test]
    fn a_limit_of_the_group_counts() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        write("memory.current", "300\n");
        write("memory.max", "max\n");
        assert_eq!(left_in_group(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(left_in_group(group.path()), Some(700));
    }
}
