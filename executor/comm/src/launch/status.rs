//! Exit status of a rank's process.

use crate::EXIT_SECONDARY;
use rustix::process::Signal;
use std::fmt;
use std::process::ExitStatus;

/// Exit of a rank's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankStatus {
    /// The rank.
    pub rank: usize,
    /// Its exit status, or the signal that ended it.
    pub status: ExitStatus,
}

impl RankStatus {
    /// Returns whether the rank reported that it ended because of another one.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        self.status.code() == Some(i32::from(EXIT_SECONDARY))
    }

    /// Returns the signal at whose request the rank stopped in order: it ended with 128 plus its number.
    #[must_use]
    pub fn stopped_by(&self) -> Option<i32> {
        let signals = [Signal::INT, Signal::TERM].map(Signal::as_raw);
        signals.into_iter().find(|signal| self.status.code() == Some(128 + signal))
    }

    /// Returns whether the rank neither succeeded nor stopped in order.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        !self.status.success() && self.stopped_by().is_none()
    }
}

impl fmt::Display for RankStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ended with {}", self.rank, self.status)
    }
}
