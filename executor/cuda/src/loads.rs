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

use crate::error::{Error, Result};
use crate::event::Gate;

/// Longest time that a load waits for messages in flight.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Time between two looks at them.
const INTERVAL: Duration = Duration::from_micros(200);

/// Operations of lanes that wait for other ranks.
#[derive(Default)]
pub(crate) struct Loads {
    in_flight: Mutex<Vec<Arc<Gate>>>,
}

impl Loads {
    /// Notes an operation that may wait for another rank.
    pub(crate) fn note(&self, operation: &Arc<Gate>) {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        in_flight.retain(|earlier| !earlier.is_passed());
        in_flight.push(Arc::clone(operation));
    }

    /// Returns whether no operation waits for another rank.
    pub(crate) fn are_safe(&self) -> bool {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        in_flight.retain(|operation| !operation.is_passed());
        in_flight.is_empty()
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
    /// [`Error::LateLoad`] in a debug build if one might; in a release build the load is put off while
    /// messages are in flight.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        if self.are_safe() {
            return Ok(());
        }
        if cfg!(debug_assertions) {
            return Err(Error::LateLoad { what: what.to_owned() });
        }
        tracing::warn!("{what} is loaded while messages are in flight; the step waits for them");
        self.wait();
        Ok(())
    }
}
