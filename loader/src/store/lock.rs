//! Acquires file locks with a time limit: a lock holder may be stopped.

use std::fs::{File, TryLockError};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval between attempts.
const POLL: Duration = Duration::from_millis(20);

/// Time limits for a process that waits for a lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Time after which the holder is reported, once.
    pub(crate) until_report: Duration,
    /// Maximum wait for a stopped holder.
    pub(crate) for_stopped: Duration,
    /// Maximum wait for any holder.
    pub(crate) for_any: Duration,
}

/// Locks a file.
///
/// # Errors
/// [`ErrorKind::TimedOut`] with the path and the holder once the time limit is over; the operating system
/// error.
pub(crate) fn lock_patiently(file: &File, path: &Path, patience: Patience) -> Result<()> {
    let started = Instant::now();
    let mut is_reported = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {}
        }
        let waited = started.elapsed();
        if waited >= patience.until_report.min(patience.for_stopped) {
            let holder = Holder::of(file);
            let is_over = waited >= patience.for_any
                || (waited >= patience.for_stopped && holder.as_ref().is_some_and(Holder::is_stopped));
            if is_over {
                return Err(Error::new(ErrorKind::TimedOut, locked(path, holder.as_ref(), waited)));
            }
            if waited >= patience.until_report && !std::mem::replace(&mut is_reported, true) {
                tracing::warn!("waiting: {}", locked(path, holder.as_ref(), waited));
            }
            std::thread::sleep(POLL * 5);
        }
        std::thread::sleep(POLL);
    }
}

fn locked(path: &Path, holder: Option<&Holder>, waited: Duration) -> String {
    let by = holder.map_or_else(|| "another process".to_owned(), Holder::describe);
    format!("`{}` has been locked by {by} for more than {:.1} s", path.display(), waited.as_secs_f64())
}

/// Process that holds a file lock.
#[derive(Debug)]
pub(crate) struct Holder {
    process: u32,
}

impl Holder {
    /// Finds the holder in the kernel's lock list; `None` if the system has no such list, or hides the
    /// process.
    pub(crate) fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let wanted = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
        // `1: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF`; lines with `->` wait for the lock.
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        let mut held = locks.lines().filter(|line| !line.contains("->"));
        let process = held.find_map(|line| {
            let mut words = line.split_whitespace().skip(4);
            let (process, file) = (words.next()?, words.next()?);
            (file == wanted).then(|| process.parse().ok())?
        });
        Some(Self { process: process? })
    }

    /// Returns whether the process is stopped by a signal or a debugger.
    pub(crate) fn is_stopped(&self) -> bool {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", self.process)).unwrap_or_default();
        // The name in parentheses may itself contain spaces and parentheses.
        let state = state.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('T' | 't'))
    }

    /// Describes the process for a message.
    pub(crate) fn describe(&self) -> String {
        let stopped = if self.is_stopped() { ", which is stopped," } else { "" };
        format!("process {}{stopped}", self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_stays_is_reported_with_its_holder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let held = File::open(file.path()).unwrap();
        held.lock().unwrap();
        let other = File::open(file.path()).unwrap();
        let [soon, late] = [100, 600_000].map(Duration::from_millis);
        let patience = Patience { until_report: soon, for_stopped: soon, for_any: soon * 3 };
        let error = lock_patiently(&other, file.path(), patience).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        if Path::new("/proc/locks").exists() {
            let holder = Holder::of(&other).expect("the kernel lists it");
            assert_eq!((holder.process, holder.is_stopped()), (std::process::id(), false));
            assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        }
        let patience = Patience { for_any: late, ..patience };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock_patiently(&other, file.path(), patience));
            std::thread::sleep(Duration::from_millis(300));
            drop(held);
            assert!(waiting.join().unwrap().is_ok());
        });
    }
}
