//! Exit status of a rank process.

use crate::error::EXIT_SECONDARY;
use rustix::process::Signal;
use std::fmt;
use std::process::ExitStatus;

/// Exit status of a rank process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankStatus {
    /// Rank number.
    pub rank: usize,
    /// Exit status, or the signal that ended the rank.
    pub status: ExitStatus,
}

impl RankStatus {
    /// Returns whether the rank reported that it ended because another rank failed.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        self.status.code() == Some(i32::from(EXIT_SECONDARY))
    }

    /// Returns the signal on which the rank stopped in order: it ended with 128 plus the signal number.
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
