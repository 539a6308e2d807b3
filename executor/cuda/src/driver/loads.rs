//! What the driver may not be asked for while ranks wait for each other.
//!
//! The driver may let a load of a kernel, or an allocation of page-locked memory, wait for all work of the
//! device, and lets every other call wait for it meanwhile. A receive that was posted ahead waits for another
//! rank, which may wait for a message of this one that is not queued yet: then the job hangs. So kernels are
//! loaded before messages are posted ([`prepare`](dflop_device::Runtime::prepare)), and buffers that are
//! missing later are not page-locked.
//!
//! # Source
//! NVIDIA: "CUDA C++ Programming Guide", sections "Lazy Loading" and "Implicit Synchronization".

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::event::Gate;
use crate::error::{Error, Result};

/// Longest time that a load waits for messages in flight.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Time between two looks at them.
const INTERVAL: Duration = Duration::from_micros(200);

/// What becomes of a load while messages are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LateLoads {
    /// It is an error.
    Refused,
    /// It waits for the messages, up to some seconds.
    PutOff,
}

impl Default for LateLoads {
    /// Debug builds refuse late loads, so that tests find what is not prepared.
    fn default() -> Self {
        if cfg!(debug_assertions) { Self::Refused } else { Self::PutOff }
    }
}

/// Operations that wait for other ranks.
pub(crate) struct Loads {
    late: LateLoads,
    in_lanes: InFlight,
    in_compute_lane: InFlight,
}

#[derive(Default)]
struct InFlight(Mutex<Vec<Arc<Gate>>>);

impl InFlight {
    fn note(&self, operation: &Arc<Gate>) {
        let mut operations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        operations.retain(|earlier| !earlier.is_passed());
        operations.push(Arc::clone(operation));
    }

    fn is_empty(&self) -> bool {
        let mut operations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        operations.retain(|operation| !operation.is_passed());
        operations.is_empty()
    }
}

impl Loads {
    pub(crate) fn new(late: LateLoads) -> Self {
        Self { late, in_lanes: InFlight::default(), in_compute_lane: InFlight::default() }
    }

    /// Notes an operation of a lane beside the compute lane, which may wait for what this rank queues later.
    pub(crate) fn note_in_lane(&self, operation: &Arc<Gate>) {
        self.in_lanes.note(operation);
    }

    /// Notes an operation of the compute lane, behind all that it depends on.
    pub(crate) fn note_in_compute_lane(&self, operation: &Arc<Gate>) {
        self.in_compute_lane.note(operation);
    }

    /// Returns whether no operation waits for another rank.
    pub(crate) fn are_safe(&self) -> bool {
        self.in_lanes.is_empty() && self.in_compute_lane.is_empty()
    }

    /// Waits until no operation waits for another rank, or for some seconds.
    pub(crate) fn wait(&self) {
        let begin = Instant::now();
        while !self.are_safe() && begin.elapsed() < WAIT_MAX {
            std::thread::sleep(INTERVAL);
        }
    }

    /// Makes sure that a load does not wait for another rank.
    ///
    /// # Errors
    /// [`Error::LateLoad`] if one might, unless late loads are [put off](LateLoads::PutOff).
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        if !self.in_lanes.is_empty() {
            if self.late == LateLoads::Refused {
                return Err(Error::LateLoad { what: what.to_owned() });
            }
            tracing::warn!("{what} is loaded while messages are in flight; the step waits for them");
        }
        self.wait();
        Ok(())
    }
}
