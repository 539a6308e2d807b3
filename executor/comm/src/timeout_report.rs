//! Reports why a wait exceeded the short limit: a dead rank, a deadlock, or a rank that is merely busy.
//!
//! The awaited rank may itself wait for another one. It is therefore asked for its status, then the rank that
//! it waits for, until a rank does not answer, computes, or was asked before.

use super::endpoint::Endpoint;
use super::mailbox::Status;
use std::time::Duration;

/// Kind of the end of a chain of waiting ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A rank computes, or a wait of a cycle is younger than the short limit: the wait may go on.
    Busy,
    /// A rank does not answer.
    Dead,
    /// Ranks have waited for each other for the short limit.
    Deadlock,
}

/// End of a chain of waiting ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TimeoutReport {
    pub(super) verdict: Verdict,
    /// Rank at the end of the chain; `None` for a deadlock.
    pub(super) culprit: Option<usize>,
    pub(super) message: String,
}

/// Follows the chain of waiting ranks from `peer` on.
pub(super) fn find(endpoint: &Endpoint, peer: usize) -> TimeoutReport {
    let (mut chain, mut current) = (Vec::new(), peer);
    loop {
        let Some(status) = status(endpoint, current) else {
            let heard = endpoint.mailbox.heard(current);
            let heard = heard.map_or("never heard of before".into(), |at| format!("last heard of at {at}"));
            let message = format!("rank {current} does not answer, {heard}");
            return TimeoutReport { verdict: Verdict::Dead, culprit: Some(current), message };
        };
        let busy = |message| TimeoutReport { verdict: Verdict::Busy, culprit: Some(current), message };
        let Some(wait) = status.wait else {
            return busy(match status.last {
                Some(at) => format!("rank {current} is busy since {at}"),
                None => format!("rank {current} has not started"),
            });
        };
        chain.push((current, wait.age));
        current = wait.peer;
        // a cycle: every rank of it waits, so none can be blamed
        if let Some(first) = chain.iter().position(|&(rank, _)| rank == current) {
            let cycle = &chain[first..];
            // a young wait may be about to end: the message that it waits for may be on its way
            let is_young = cycle.iter().any(|&(_, age)| age < endpoint.settings.wait);
            let verdict = if is_young { Verdict::Busy } else { Verdict::Deadlock };
            let message = format!("deadlock: ranks wait for each other: {}", arrows(cycle));
            return TimeoutReport { verdict, culprit: None, message };
        }
    }
}

/// Returns the status of a rank; of this one too, of which another thread may wait elsewhere or compute.
fn status(endpoint: &Endpoint, rank: usize) -> Option<Status> {
    if rank == endpoint.rank {
        return Some(endpoint.mailbox.status());
    }
    endpoint.transport.ask(rank, endpoint.settings.answer())
}

/// Formats a cycle, which ends with its first rank.
fn arrows(cycle: &[(usize, Duration)]) -> String {
    cycle.iter().chain(cycle.first()).map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(" → ")
}
