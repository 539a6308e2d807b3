//! Time limits and memory bounds of a communicator.

use super::error::{Error, Result};
use std::time::Duration;

/// Bounds of waiting and buffering; must be the same on all ranks.
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
    /// Time limit of a status request, by which a waiting rank asks why its peer does not answer.
    pub(super) const STATUS: Duration = Duration::from_secs(1);

    /// Sets the time limit of a single wait, after which the job ends. Default: 30 s.
    ///
    /// The longest computation between two messages must be shorter. A hang ends the job everywhere within
    /// this time plus one second for every rank in a chain of waiting ranks.
    #[must_use]
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.wait = timeout;
        self
    }

    /// Sets the time within which all ranks must join and find each other. Default: 60 s.
    #[must_use]
    pub fn rendezvous(mut self, timeout: Duration) -> Self {
        self.rendezvous = timeout;
        self
    }

    /// Sets how many unreceived bytes of one peer are buffered, plus at most one message. Default: 1 GiB.
    ///
    /// Beyond this bound, sends of the peer do not complete until the receiver takes or awaits a message of
    /// that peer.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: usize) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a time limit is zero.
    pub(super) fn check(&self) -> Result<()> {
        let zero = [("wait", self.wait), ("rendezvous", self.rendezvous)];
        match zero.into_iter().find(|(_, limit)| limit.is_zero()) {
            Some((setting, _)) => {
                Err(Error::InvalidSetting { setting, reason: "must be longer than 0".into() })
            }
            None => Ok(()),
        }
    }
}
