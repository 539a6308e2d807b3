//! Hands jobs from asynchronous tasks to threads: tasks never block, threads do.
//!
//! A task waits for *room* without blocking the executor thread; with room, a slot in the channel is certain.
//! Threads block on the channel. A job releases the room when a thread receives it.

use std::fmt;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::sync::{Receiver, Sender, bounded};

/// Sending half of a job queue.
pub(crate) struct JobQueue<J> {
    jobs: Sender<(Room, J)>,
    free: Arc<Semaphore>,
}

/// Receiving half of a job queue, cloned for each thread: an iterator that ends once the sending half and the
/// last job are gone.
pub(crate) struct Jobs<J>(Receiver<(Room, J)>);

/// Reserved slot for a job in the queue.
#[derive(Debug)]
pub(crate) struct Room(OwnedSemaphorePermit);

impl<J> JobQueue<J> {
    /// Creates a queue that holds at most `jobs_max` jobs.
    pub(crate) fn new(jobs_max: usize) -> (Self, Jobs<J>) {
        let (jobs, queue) = bounded(jobs_max);
        (Self { jobs, free: Arc::new(Semaphore::new(jobs_max)) }, Jobs(queue))
    }

    /// Reserves room if there is any now.
    pub(crate) fn try_room(&self) -> Option<Room> {
        self.free.clone().try_acquire_owned().ok().map(Room)
    }

    /// Waits for room.
    pub(crate) async fn room(&self) -> Room {
        Room(self.free.clone().acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// Queues a job; returns whether there are threads to run it.
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
        // before the job runs: the next job may wait in the channel meanwhile
        drop(permit);
        Some(job)
    }
}
