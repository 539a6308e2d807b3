//! State shared by a rank's communicators: device, job, operations in flight.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Comm, Failure, StepContext};
use dflop_device::{Error, Result};

use super::communicator::Communicator;
use super::environment::{QUEUES, QUEUES_MAX};
use super::functions::UniqueId;
use super::lane_plan::QUEUES_PER_LANE;
use super::library::Nccl;
use super::operation::Operation;
use crate::device::Cuda;
use crate::event::Gate;

/// Maximum wait for the remaining ranks when communicators end.
const END_WAIT: Duration = Duration::from_secs(10);
/// Maximum wait for the job's communicator to name the rank that made an NCCL call fail.
const BLAME_WAIT: Duration = Duration::from_secs(1);

/// A rank's communicators, and the state that the watchdog reads.
pub(super) struct Session {
    pub(super) device: Cuda,
    pub(super) nccl: Nccl,
    /// Job communicator: wait limits, blame, job shutdown.
    pub(super) host: Arc<dyn Comm>,
    pub(super) operations: Mutex<Vec<Arc<Operation>>>,
    communicators: Mutex<Vec<Arc<Communicator>>>,
    /// Lanes with a stream.
    streams: Mutex<BTreeSet<u64>>,
    /// Number of device queues.
    queues: usize,
    /// Next device lane number.
    next_lane: AtomicU64,
    /// Number of bytes sent to remote ranks.
    pub(super) bytes_sent: AtomicU64,
    /// Time taken to create communicators.
    connect_ns: AtomicU64,
}

impl Session {
    /// Creates a session without communicators.
    ///
    /// - `queues`: number of device queues
    pub(super) fn new(device: &Cuda, nccl: Nccl, host: Arc<dyn Comm>, queues: usize) -> Self {
        Self {
            device: device.clone(),
            nccl,
            host,
            operations: Mutex::default(),
            communicators: Mutex::default(),
            streams: Mutex::default(),
            queues,
            next_lane: AtomicU64::new(dflop_device::reserve_lanes()),
            bytes_sent: AtomicU64::new(0),
            connect_ns: AtomicU64::new(0),
        }
    }

    /// Rank in the job.
    pub(super) fn rank(&self) -> usize {
        self.host.rank()
    }

    /// Returns an unused device lane number.
    pub(super) fn lane(&self) -> u64 {
        self.next_lane.fetch_add(1, Ordering::Relaxed)
    }

    /// Creates a communicator; all member ranks call it with the same id.
    ///
    /// - `peer`: job rank to query when the connection takes too long
    pub(super) fn connect(
        &self,
        id: UniqueId,
        (rank, size): (usize, usize),
        name: &str,
        at: StepContext,
        peer: usize,
    ) -> Result<Arc<Communicator>> {
        let context = &self.device.shared().context;
        let made = Communicator::start(&self.nccl, context, id, (rank, size), name.to_owned())?;
        let what = format!("connect {name}");
        let _wait = self.host.record_wait(peer, at);
        let ready = made.ready(|waited| Ok(self.host.check_wait(peer, at, &what, waited)?));
        if ready.is_err() {
            made.abort();
        }
        ready?;
        let made = Arc::new(made);
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&made));
        Ok(made)
    }

    /// Runs work that creates communicators, and counts its time.
    pub(super) fn connecting<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let made = work();
        self.connect_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        made
    }

    /// Returns the time taken so far to create communicators.
    pub(super) fn connect_time(&self) -> Duration {
        Duration::from_nanos(self.connect_ns.load(Ordering::Relaxed))
    }

    /// Returns the communicators created so far.
    pub(super) fn communicators(&self) -> Vec<Arc<Communicator>> {
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of queues not used by compute, communicators or possible communicator lanes.
    pub(super) fn free_queues(&self) -> usize {
        let communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner).len();
        // the compute lane has one, and all communicators so far have lanes or may
        self.queues.saturating_sub(1 + QUEUES_PER_LANE * communicators)
    }

    /// Counts a lane's stream. Each communicator has a stream as well, on which NCCL waits for operations.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the device has fewer queues than this rank has streams.
    pub(super) fn take_stream(&self, lane: u64) -> Result<()> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.insert(lane);
        let communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner).len();
        // the compute lane has one, too
        let needed = streams.len() + communicators + 1;
        if needed <= self.queues {
            return Ok(());
        }
        let (lanes, queues) = (streams.len(), self.queues);
        let reason = format!(
            "this rank needs {needed} streams ({lanes} lanes, {communicators} of NCCL, 1 of compute), and the device \
             has {queues} queues for them; streams that share one could wait for each other (at most {QUEUES_MAX})"
        );
        Err(Error::InvalidSetting { setting: QUEUES, reason })
    }

    /// Puts an operation under watch.
    pub(super) fn watch(
        &self,
        at: StepContext,
        what: String,
        peer: usize,
        done: Arc<Gate>,
    ) -> Arc<Operation> {
        let operation = Arc::new(Operation::new(at, what, peer, done));
        self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&operation));
        operation
    }

    /// Returns the action for the oldest operation in flight.
    pub(super) fn last_action(&self) -> StepContext {
        let operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        operations.first().map_or_else(|| StepContext::step(0, "communicate"), |operation| operation.at)
    }

    /// Ends the job on all ranks and returns the job failure, which may be an earlier failure.
    pub(super) fn fail(&self, cause: Cause, at: StepContext, message: String) -> Failure {
        let failure = Failure { cause, culprit: None, by: self.rank(), at, message };
        self.host.fail(failure.clone()).failure().cloned().unwrap_or(failure)
    }

    /// Ends the job after a failed NCCL call and returns this rank's error.
    pub(super) fn call_failed(&self, at: StepContext, error: &dyn std::fmt::Display) -> dflop_device::Error {
        // another rank that has failed is named by the job's communicator
        let deadline = Instant::now() + BLAME_WAIT;
        while self.host.failure().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let message = format!("rank {}: {error}", self.rank());
        let failure = self.host.failure().unwrap_or_else(|| self.fail(Cause::Transport, at, message));
        self.end(failure.clone());
        dflop_comm::Error::Failed { failure: Box::new(failure), rank: self.rank(), at: Box::new(at) }.into()
    }

    /// Ends this rank's work in a failed job.
    pub(super) fn end(&self, failure: Failure) {
        // before the work of the device ends with wrong numbers
        self.device.fail(failure, self.rank());
        // side by side: an abort that waits for the driver must not hold up that of what the driver waits for
        std::thread::scope(|scope| {
            for communicator in self.communicators() {
                scope.spawn(move || communicator.abort());
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let communicators = self.communicators();
        if self.host.failure().is_some() || std::thread::panicking() {
            for communicator in communicators {
                communicator.abort();
            }
            return;
        }
        // all are told to end before any is waited for, because ranks may have other orders
        for communicator in &communicators {
            communicator.finalize();
        }
        let deadline = Instant::now() + END_WAIT;
        for communicator in communicators {
            communicator.destroy(deadline);
        }
    }
}
