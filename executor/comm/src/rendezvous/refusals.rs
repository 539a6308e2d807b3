//! Counts rejected connections by reason, and logs them at a bounded rate.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

/// Reason to reject a connection.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The handshake took longer than the time limit.
    Slow,
    /// Other callers needed the room.
    Crowded,
    /// The first bytes belong to a different protocol.
    Foreign,
    /// The caller closed the connection during the handshake.
    Closed,
    /// The caller does not know the job token.
    Token,
    /// The identity of a caller with the token is invalid; the caller learns this reason.
    Identity(String),
    /// This process has no thread or file descriptor left; the caller tries again.
    Resources(io::Error),
}

impl Refusal {
    /// Returns the name of the reason in the counts, after "refused 3 connections".
    fn name(&self) -> &'static str {
        match self {
            Self::Slow => "too slow",
            Self::Crowded => "crowded out",
            Self::Foreign => "of another protocol",
            Self::Closed => "closed early",
            Self::Token => "with a wrong job token",
            Self::Identity(_) => "of an unexpected rank",
            Self::Resources(_) => "for lack of threads or files",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity(reason) => write!(f, "{}: {reason}", self.name()),
            Self::Resources(source) => write!(f, "{}: {source}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

/// Rejected connections on one listener, or on several listeners that share this counter.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<BTreeMap<&'static str, u64>>);

impl Refusals {
    /// Number of rejections that are logged individually; from then on the total is logged when it has
    /// doubled.
    const LOGGED_MAX: u64 = 8;

    /// Counts a rejection.
    pub(super) fn note(&self, caller: SocketAddr, refusal: &Refusal) {
        let total = self.count(refusal);
        if total <= Self::LOGGED_MAX {
            tracing::warn!(%caller, reason = %refusal, "refused a connection");
        } else if total.is_power_of_two() {
            tracing::warn!("{}", self.summary().unwrap_or_default());
        }
    }

    /// Counts a rejection and returns the total.
    fn count(&self, refusal: &Refusal) -> u64 {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(refusal.name()).or_default() += 1;
        counts.values().sum()
    }

    /// Returns the number of rejected connections and the reasons, such as `refused 3 connections: 2 too
    /// slow, 1 closed early`; `None` if there are none.
    pub(crate) fn summary(&self) -> Option<String> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let reasons: Vec<String> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
        let total: u64 = counts.values().sum();
        (total > 0).then(|| format!("refused {total} connections: {}", reasons.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_by_reason() {
        let refusals = Refusals::default();
        assert_eq!(refusals.summary(), None);
        for refusal in [Refusal::Slow, Refusal::Identity("rank 7".into()), Refusal::Slow] {
            refusals.count(&refusal);
        }
        let summary = refusals.summary().unwrap();
        assert_eq!(summary, "refused 3 connections: 1 of an unexpected rank, 2 too slow");
    }
}
