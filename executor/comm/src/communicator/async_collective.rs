//! Runs collectives on a communicator thread, while the caller computes.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::collective::Group;
use crate::api::{Completion, Handle};
use crate::error::{Cause, Error, Result, StepContext};
use crate::message::Buffer;
use crate::sync::{Mutex, Receiver, RecvError, Sender, TryRecvError, channel, thread};

type Task = Box<dyn FnOnce() + Send>;

/// Communicator thread, started with the first collective; runs collectives in queue order.
#[derive(Debug, Default)]
pub(super) struct CollectiveThread(Mutex<Option<Sender<Task>>>);

impl CollectiveThread {
    /// Queues a collective.
    pub(super) fn start(
        &self,
        group: &Arc<Group>,
        at: StepContext,
        collective: impl FnOnce() -> Result<Buffer> + Send + 'static,
    ) -> Result<Handle<Buffer>> {
        let (done, result) = channel();
        let task: Task = Box::new(move || {
            let result = collective().map(|buffer| (buffer, Instant::now()));
            // the caller may have dropped its handle
            let _ = done.send(result);
        });
        // held until the task is queued: queue order must match the collective numbers
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let tasks = match &*thread {
            Some(tasks) => tasks,
            None => thread.insert(spawn(group, at)?),
        };
        if tasks.send(task).is_err() {
            return Err(gone(group, at));
        }
        Ok(Handle::new(PendingCollective { group: group.clone(), at, result, early: Mutex::new(None) }))
    }
}

fn spawn(group: &Arc<Group>, at: StepContext) -> Result<Sender<Task>> {
    let (tasks, queue) = channel::<Task>();
    let name = format!("comm-overlap-{}", group.rank);
    let thread = thread::Builder::new().name(name).spawn(move || {
        for task in queue {
            task();
        }
    });
    thread.map(|_| tasks).map_err(|source| {
        let endpoint = &group.endpoint;
        let message = format!("rank {} could not start a thread: {source}", endpoint.rank);
        endpoint.fail(endpoint.failure(Cause::Caller, Some(endpoint.rank), at, message))
    })
}

fn gone(group: &Group, at: StepContext) -> Error {
    let endpoint = &group.endpoint;
    let message = format!("the communication thread of rank {} panicked", endpoint.rank);
    endpoint.fail(endpoint.failure(Cause::Caller, Some(endpoint.rank), at, message))
}

/// Collective result and end time.
type Timed = Result<(Buffer, Instant)>;

/// Collective that is queued or running. Waits inside the collective have the time limit.
struct PendingCollective {
    group: Arc<Group>,
    at: StepContext,
    result: Receiver<Timed>,
    early: Mutex<Option<Timed>>,
}

impl PendingCollective {
    /// Waits for the collective thread; meanwhile waits on that thread count as caller waits.
    fn recv(&self) -> std::result::Result<Timed, RecvError> {
        let mailbox = &self.group.endpoint.mailbox;
        mailbox.await_overlapped(true);
        let result = self.result.recv();
        mailbox.await_overlapped(false);
        result
    }
}

impl Completion<Buffer> for PendingCollective {
    // a channel returns its value only once: a value received early is kept for `wait`
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
        self.wait_timed().map(|(buffer, _)| buffer)
    }

    fn wait_timed(self: Box<Self>) -> Timed {
        let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = early.map_or_else(|| self.recv(), Ok);
        result.unwrap_or_else(|_| Err(gone(&self.group, self.at)))
    }
}
