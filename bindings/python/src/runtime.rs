//! Runs waits on a Tokio runtime, lets Ctrl-C interrupt them, and rejects use after a fork.
//!
//! Threads do not exist in a forked process, so waiting for a thread that was started before the fork would
//! never end. Every object with threads therefore records the process, and rejects use in any other process.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dflop_loader::flow::start_runtime;
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::error::DflopError;

/// Interval after which a wait lets Python handle signals.
const SIGNALS_SEEN_AFTER: Duration = Duration::from_millis(50);

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// Returns this process's runtime. It does I/O and hands over, so two threads suffice.
fn runtime() -> PyResult<&'static Runtime> {
    if RUNTIME.get().is_none() {
        // If two runtimes are started at the same time, one is dropped.
        let _other = RUNTIME.set((std::process::id(), start_runtime("dflop", 2)?));
    }
    match RUNTIME.get() {
        Some((process, runtime)) if *process == std::process::id() => Ok(runtime),
        _ => Err(DflopError::forked().into()),
    }
}

/// Waits for a future with the interpreter released.
///
/// # Errors
/// The exception from a signal handler, such as `KeyboardInterrupt`, which drops the future; `ForkError`
/// after a fork.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = runtime()?;
    let mut future = pin!(future);
    loop {
        let waited =
            || runtime.block_on(async { tokio::time::timeout(SIGNALS_SEEN_AFTER, future.as_mut()).await });
        // The interpreter is released during the wait, and held to check for signals.
        match py.detach(waited) {
            Ok(done) => return Ok(done),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Runs blocking work on another thread with the interpreter released. After a signal the work continues
/// unobserved.
///
/// # Errors
/// The errors of [`wait`], and the work's errors.
pub(crate) fn run<T: Send + 'static, E: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> PyResult<T>
where
    PyErr: From<E>,
{
    let working = runtime()?.spawn_blocking(work);
    let done = wait(py, working)?;
    match done {
        Ok(done) => done.map_err(PyErr::from),
        Err(_) => Err(DflopError::from(dflop_loader::Error::StageEnded { stage: "background" }).into()),
    }
}

/// Value with threads, which can be closed; after a fork, the value is neither used nor waited for.
#[derive(Debug)]
pub(crate) struct Threaded<T> {
    process: u32,
    /// The value; `None` once closed.
    inner: Mutex<Option<Arc<T>>>,
    /// Wakes waits when the value is closed.
    closing: Notify,
}

impl<T> Threaded<T> {
    pub(crate) fn new(inner: T) -> Self {
        let inner = Mutex::new(Some(Arc::new(inner)));
        Self { process: std::process::id(), inner, closing: Notify::new() }
    }

    /// # Errors
    /// `ForkError` in a fork of the process that created the value; `Error` once the value is closed.
    pub(crate) fn get(&self) -> PyResult<Arc<T>> {
        if self.process != std::process::id() {
            return Err(DflopError::forked().into());
        }
        self.lock().clone().ok_or_else(|| DflopError::closed().into())
    }

    /// Drops the value and the threads, and ends waits for the value.
    pub(crate) fn close(&self, py: Python<'_>)
    where
        T: Send + Sync,
    {
        if self.process == std::process::id() {
            let inner = self.lock().take();
            self.closing.notify_waiters();
            // Threads that end may wait for the interpreter.
            py.detach(|| drop(inner));
        }
    }

    /// Waits for work with the value, with the interpreter released.
    ///
    /// # Errors
    /// The errors of [`Self::get`] and [`wait`].
    pub(crate) fn wait<R: Send, F: Future<Output = R> + Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(Arc<T>) -> F,
    ) -> PyResult<R>
    where
        T: Send + Sync,
    {
        let mut closing = pin!(self.closing.notified());
        // Before the value is looked up, so that no close is missed.
        closing.as_mut().enable();
        let work = work(self.get()?);
        let done = wait(py, async {
            tokio::select! {
                biased;
                () = closing => None,
                done = work => Some(done),
            }
        })?;
        done.ok_or_else(|| DflopError::closed().into())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<T>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Threaded<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Dropping would join threads that do not exist in this process.
            std::mem::forget(self.lock().take());
        }
    }
}
