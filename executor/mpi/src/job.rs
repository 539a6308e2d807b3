//! Job rank: state, and the thread that calls MPI, which ends with the last communicator.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};

use dflop_comm::{Error, Result, Settings};

use crate::engine;
use crate::shared::Shared;

/// Whether this process has used MPI, which is possible only once per process.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Job rank, shared by communicators and operations.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Job {
    /// Joins the ranks that `mpirun` has started.
    pub(crate) fn join(settings: Settings) -> Result<Self> {
        settings.check()?;
        if IS_USED.swap(true, Ordering::Relaxed) {
            return Err(refused("a process joins its job once"));
        }
        let (started, state) = mpsc::channel();
        let limits = settings.limits();
        let thread = Builder::new().name("mpi".into()).spawn(move || engine::run(limits, &started));
        let thread =
            thread.map_err(|source| Error::Io { action: "start a thread for MPI".into(), source })?;
        match state.recv() {
            Ok(Some(shared)) => Ok(Self { shared, thread: Some(thread) }),
            _ => Err(refused("MPI was initialized by another part of the program, or allows no threads")),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.commanded.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has already been reported.
            let _ = thread.join();
        }
    }
}

fn refused(reason: &str) -> Error {
    Error::InvalidSetting { setting: "MPI", reason: reason.into() }
}
