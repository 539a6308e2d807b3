//! Collectives on a thread of their own, while the caller computes.

use super::at::At;
use super::communicator::Group;
use super::error::{Cause, Result};
use super::handle::{Completion, Handle};
use super::payload::Buffer;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// The thread of a communicator, started with its first collective. It works them off in order.
#[derive(Debug, Default)]
pub(super) struct Overlap(Mutex<Option<Sender<Job>>>);

impl Overlap {
    /// Queues a collective.
    pub(super) fn start(
        &self,
        group: &Arc<Group>,
        at: At,
        collective: impl FnOnce() -> Result<Buffer> + Send + 'static,
    ) -> Result<Handle<Buffer>> {
        let (done, result) = channel();
        let job: Job = Box::new(move || {
            // the caller may have dropped its handle
            let _ = done.send(collective());
        });
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = match &*thread {
            Some(jobs) => jobs,
            None => thread.insert(spawn(group, at)?),
        };
        if jobs.send(job).is_err() {
            return Err(gone(group, at));
        }
        Ok(Handle::new(Running { group: group.clone(), at, result, early: Mutex::new(None) }))
    }
}

fn spawn(group: &Arc<Group>, at: At) -> Result<Sender<Job>> {
    let (jobs, queue) = channel::<Job>();
    let name = format!("comm-overlap-{}", group.rank);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        for job in queue {
            job();
        }
    });
    thread.map(|_| jobs).map_err(|source| {
        let fabric = &group.fabric;
        let message = format!("rank {} could not start a thread: {source}", fabric.rank);
        fabric.fail(fabric.failure(Cause::Caller, Some(fabric.rank), at, message))
    })
}

fn gone(group: &Group, at: At) -> super::Error {
    let fabric = &group.fabric;
    let message = format!("the communication thread of rank {} panicked", fabric.rank);
    fabric.fail(fabric.failure(Cause::Caller, Some(fabric.rank), at, message))
}

/// A collective that is queued or under way. Its own waits have the time limit.
struct Running {
    group: Arc<Group>,
    at: At,
    result: Receiver<Result<Buffer>>,
    early: Mutex<Option<Result<Buffer>>>,
}

impl Completion<Buffer> for Running {
    fn is_complete(&self) -> bool {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        if early.is_none() {
            match self.result.try_recv() {
                Ok(result) => *early = Some(result),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        true
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = early.map_or_else(|| self.result.recv(), Ok);
        result.unwrap_or_else(|_| Err(gone(&self.group, self.at)))
    }
}
