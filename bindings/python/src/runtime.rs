//! The one Tokio runtime, waits that Ctrl-C can interrupt, and what a fork leaves behind.
//!
//! Threads do not live on in a forked process: who uses there what was started before would wait for ever. So the
//! process in which something was started is remembered, and in any other it is refused, and never waited for.

use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::error::DflopError;

/// How long a wait may go on before Python looks at its signals.
const SIGNALS_SEEN_AFTER: Duration = Duration::from_millis(50);

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// The runtime of this process; it does I/O and hands over, so two threads do.
fn runtime() -> PyResult<&'static Runtime> {
    let start = || {
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("dflop").enable_all().build();
        (std::process::id(), runtime.expect("two threads can be started"))
    };
    let (process, runtime) = RUNTIME.get_or_init(start);
    if *process != std::process::id() {
        return Err(DflopError::forked().into());
    }
    Ok(runtime)
}

/// Waits for a future with the interpreter released.
///
/// # Errors
/// What a signal handler raises, such as `KeyboardInterrupt`: the future is dropped then; `ForkError` in a fork.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = runtime()?;
    let mut future = pin!(future);
    loop {
        let waited =
            || runtime.block_on(async { tokio::time::timeout(SIGNALS_SEEN_AFTER, future.as_mut()).await });
        match py.detach(waited) {
            Ok(done) => return Ok(done),
            Err(_) => py.check_signals()?,
        }
    }
}

/// Runs work that blocks on a thread of its own with the interpreter released. After a signal it goes on unseen.
///
/// # Errors
/// As [`wait`], and those of the work.
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

/// Something with threads; in a fork it is neither used nor waited for.
#[derive(Debug)]
pub(crate) struct Threaded<T> {
    process: u32,
    /// Always there, until the drop.
    inner: Option<T>,
}

impl<T> Threaded<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { process: std::process::id(), inner: Some(inner) }
    }

    /// # Errors
    /// `ForkError` in a fork of the process that it was made in.
    pub(crate) fn get(&self) -> PyResult<&T> {
        match &self.inner {
            Some(inner) if self.process == std::process::id() => Ok(inner),
            _ => Err(DflopError::forked().into()),
        }
    }
}

impl<T> Drop for Threaded<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.inner.take());
        }
    }
}
