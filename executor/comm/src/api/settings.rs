//! Communicator time limits and memory limits.

use crate::error::{Error, Result};
use std::time::Duration;

/// Time and buffer limits; must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    pub(crate) wait: Duration,
    pub(crate) slow: Duration,
    pub(crate) rendezvous: Duration,
    pub(crate) buffered_bytes_max: usize,
}

/// Limits that follow from [`Settings`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Time after which a waiting rank requests the status of its peer.
    pub wait: Duration,
    /// Maximum time that a rank waits for a busy peer; at least `wait`.
    pub slow: Duration,
    /// Time limit for the answer of a peer.
    pub answer: Duration,
    /// Maximum number of unreceived bytes from one peer, in addition to one message.
    pub buffered_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            slow: Duration::from_mins(30),
            rendezvous: Duration::from_mins(1),
            buffered_bytes_max: 1 << 30,
        }
    }
}

impl Settings {
    /// Sets the time after which a waiting rank requests its peer's status. Default: 30 s.
    ///
    /// A peer that computes, or that waits for a rank that computes, is busy: the wait continues, at most to
    /// the [`slow`](Self::slow) limit, and the peer's status is requested again after every such period. The
    /// job ends if a rank does not answer, or if ranks have waited for each other for this time: a dead or
    /// stopped process and a deadlock end the job everywhere within this time, plus at most a quarter of it
    /// (1 s to 10 s) for the rank that does not answer.
    #[must_use]
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.wait = timeout;
        self
    }

    /// Sets the maximum time that a rank waits for a busy peer, after which the job ends. Default: 30 min.
    ///
    /// The longest computation between two messages, such as a checkpoint or the first kernel compilation,
    /// must be shorter. A limit below [`wait`](Self::wait) counts as `wait`.
    #[must_use]
    pub fn slow(mut self, timeout: Duration) -> Self {
        self.slow = timeout;
        self
    }

    /// Returns the time limit for the answer to a status request.
    pub(crate) fn answer(&self) -> Duration {
        (self.wait / 4).clamp(Duration::from_secs(1), Duration::from_secs(10))
    }

    /// Returns the limits, for transports in other crates.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let Self { wait, slow, buffered_bytes_max, .. } = *self;
        Limits { wait, slow: slow.max(wait), answer: self.answer(), buffered_bytes_max }
    }

    /// Sets the time within which all ranks must join and find each other. Default: 60 s.
    #[must_use]
    pub fn rendezvous(mut self, timeout: Duration) -> Self {
        self.rendezvous = timeout;
        self
    }

    /// Sets the maximum number of unreceived bytes that are buffered per peer, plus at most one message.
    /// Default: 1 GiB.
    ///
    /// Beyond this limit, the peer's sends do not complete until the receiver takes or awaits a message from
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
    pub fn check(&self) -> Result<()> {
        let zero = [("wait", self.wait), ("slow", self.slow), ("rendezvous", self.rendezvous)];
        match zero.into_iter().find(|(_, limit)| limit.is_zero()) {
            Some((setting, _)) => {
                Err(Error::InvalidSetting { setting, reason: "must be longer than 0".into() })
            }
            None => Ok(()),
        }
    }
}
