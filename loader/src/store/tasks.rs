//! Runs all requests on a shared runtime.
//!
//! The runtime is separate from those of loaders, so that connections outlive any one loader, and a task can
//! be started and awaited both inside and outside a runtime.

use std::io;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

/// Threads that move bytes of remote shards; nothing is decoded on them.
const IO_THREADS: usize = 2;

/// Starts a task; it is canceled when the returned handle is dropped.
pub(crate) fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    Task(io_runtime().spawn(task))
}

/// Starts a task without a handle.
pub(super) fn detach(task: impl Future<Output = ()> + Send + 'static) {
    drop(io_runtime().spawn(task));
}

/// A task that is cancelled when it is dropped.
#[derive(Debug)]
pub(crate) struct Task<T>(JoinHandle<T>);

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
        Pin::new(&mut self.0).poll(context).map_err(ended)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns the process-wide runtime of requests; it is never shut down.
fn io_runtime() -> Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let start = || {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(IO_THREADS).thread_name("dflop-io").enable_all().build()
    };
    RUNTIME.get_or_init(|| start().expect("threads can be started")).handle().clone()
}
