//! Hands jobs from asynchronous tasks to threads, without either waiting for the other's kind.
//!
//! A task waits for *room* without blocking its thread; a place in the channel is then certain. Threads block
//! on the channel. A job leaves its room when a thread takes it.

use std::fmt;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::sync::{Receiver, Sender, bounded};

/// Sending half of a queue of jobs.
pub(crate) struct JobQueue<J> {
    jobs: Sender<(Room, J)>,
    free: Arc<Semaphore>,
}

/// Receiving half of a queue, one for each thread: an iterator that ends once the sending half and the last
/// job are gone.
pub(crate) struct Jobs<J>(Receiver<(Room, J)>);

/// Place of a job in the queue.
#[derive(Debug)]
pub(crate) struct Room(OwnedSemaphorePermit);

impl<J> JobQueue<J> {
    /// Makes a queue in which this number of jobs waits at most.
    pub(crate) fn new(jobs_max: usize) -> (Self, Jobs<J>) {
        let (jobs, queue) = bounded(jobs_max);
        (Self { jobs, free: Arc::new(Semaphore::new(jobs_max)) }, Jobs(queue))
    }

    /// Takes room if there is any now.
    pub(crate) fn try_room(&self) -> Option<Room> {
        self.free.clone().try_acquire_owned().ok().map(Room)
    }

    /// Waits for room.
    pub(crate) async fn room(&self) -> Room {
        Room(self.free.clone().acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// Queues a job; returns whether there are threads to take it.
    pub(crate) fn push(&self, room: Room, job: J) -> bool {
        self.jobs.send((room, job)).is_ok()
    }
}

impl<J> fmt::Debug for JobQueue<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobQueue(room: {})", self.free.available_permits())
    }
}

impl<J> Clone for Jobs<J> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<J> Iterator for Jobs<J> {
    type Item = J;

    fn next(&mut self) -> Option<J> {
        let (Room(permit), job) = self.0.recv().ok()?;
        // before the job runs: the next one may wait in the channel meanwhile
        drop(permit);
        Some(job)
    }
}
