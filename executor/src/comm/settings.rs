//! Time limits and memory bounds of a communicator.

use super::error::{Error, Result};
use std::time::Duration;

/// Bounds of waiting and buffering; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    pub(super) wait: Duration,
    pub(super) rendezvous: Duration,
    pub(super) buffered_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            rendezvous: Duration::from_mins(1),
            buffered_bytes_max: 1 << 30,
        }
    }
}

impl Settings {
    /// How long a rank that waits for a message asks others why they do not answer.
    pub(super) const STATUS: Duration = Duration::from_secs(1);

    /// Sets how long one wait may last before the job ends. Default: 30 s.
    ///
    /// The longest computation between two messages has to be shorter. A hang ends the job everywhere
    /// within this time and one second for every rank that waits for another in turn.
    #[must_use]
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.wait = timeout;
        self
    }

    /// Sets within what time all ranks have to come and find one another. Default: 60 s.
    #[must_use]
    pub fn rendezvous(mut self, timeout: Duration) -> Self {
        self.rendezvous = timeout;
        self
    }

    /// Sets how many bytes of one peer may wait unreceived, one message more at most. Default: 1 GiB.
    ///
    /// Beyond, the peer's sends do not complete until the receiver takes or awaits something of that peer.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: usize) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a time limit of zero.
    pub(super) fn check(&self) -> Result<()> {
        let zero = [("wait", self.wait), ("rendezvous", self.rendezvous)];
        match zero.into_iter().find(|(_, limit)| limit.is_zero()) {
            Some((setting, _)) => {
                Err(Error::InvalidSetting { setting, reason: "a time limit of zero".into() })
            }
            None => Ok(()),
        }
    }
}
