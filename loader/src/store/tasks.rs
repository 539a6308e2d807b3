//! Runs all requests on a shared runtime.
//!
//! The runtime is separate from the loader runtimes, so that connections outlive any single loader, and a
//! task can be started and awaited both inside and outside a runtime.

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::runtime::{Handle, Runtime};
use tokio::task::JoinHandle;

use crate::flow::start_runtime;

/// Number of threads that transfer remote shard bytes; nothing is decoded on them.
const IO_THREADS: usize = 2;

/// Starts a task; it is canceled when the returned handle is dropped.
pub(crate) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    Task(io_runtime().map(|runtime| runtime.spawn(task)))
}

/// Starts a task without a handle; it is dropped if no thread can be started.
pub(super) fn detach(task: impl Future<Output = ()> + Send + 'static) {
    drop(io_runtime().map(|runtime| runtime.spawn(task)));
}

/// Task that is canceled when it is dropped.
#[derive(Debug)]
pub(crate) struct Task<T>(io::Result<JoinHandle<T>>);

impl<T> Task<T> {
    /// Blocks the calling thread until the task is done.
    pub(crate) fn wait(self) -> io::Result<T> {
        futures::executor::block_on(self)
    }
}

impl<T> Future for Task<T> {
    type Output = io::Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = |_| io::Error::other("the task that read the shard ended early");
        match &mut self.0 {
            Ok(task) => Pin::new(task).poll(context).map_err(ended),
            Err(error) => Poll::Ready(Err(io::Error::new(error.kind(), error.to_string()))),
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Ok(task) = &self.0 {
            task.abort();
        }
    }
}

/// Returns the process-wide request runtime; it is never shut down.
fn io_runtime() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let started = match runtime.take() {
        Some(started) => started,
        None => start_runtime("dflop-io", IO_THREADS)?,
    };
    Ok(runtime.insert(started).handle().clone())
}
