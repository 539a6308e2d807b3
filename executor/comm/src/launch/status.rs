//! Exit status of a rank's process.

use crate::EXIT_SECONDARY;
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
}

impl fmt::Display for RankStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ended with {}", self.rank, self.status)
    }
}
