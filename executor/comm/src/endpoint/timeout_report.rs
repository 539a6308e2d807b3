//! Reports why a wait exceeded the short limit: a dead rank, a deadlock, or a rank that is merely busy.
//!
//! The awaited rank may itself wait for another rank. First the status of the awaited rank is requested, then
//! the status of the rank that it waits for, until a rank does not answer, computes, or was already visited.

use super::mailbox::Mailbox;
use super::transport::Transport;
use super::waits::Status;
use crate::api::Settings;
use std::time::Duration;

/// Outcome at the end of a chain of waiting ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A rank computes, or a wait in a cycle is younger than the short limit: the wait may continue.
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

/// Rank that requests the status of other ranks.
pub(super) struct Inquirer<'a> {
    pub(super) rank: usize,
    pub(super) transport: &'a dyn Transport,
    pub(super) mailbox: &'a Mailbox,
    pub(super) settings: &'a Settings,
}

/// Follows the chain of waiting ranks from `peer` on.
pub(super) fn find(own: &Inquirer<'_>, peer: usize) -> TimeoutReport {
    let (mut chain, mut current) = (Vec::new(), peer);
    loop {
        let Some(status) = status(own, current) else {
            let heard = own.mailbox.heard(current);
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
        // a cycle: every rank in it waits, so none can be blamed
        if let Some(first) = chain.iter().position(|&(rank, _)| rank == current) {
            let cycle = &chain[first..];
            // a young wait may be about to end: its message may be in flight
            let is_young = cycle.iter().any(|&(_, age)| age < own.settings.wait);
            let verdict = if is_young { Verdict::Busy } else { Verdict::Deadlock };
            let message = format!("deadlock: ranks wait for each other: {}", arrows(cycle));
            return TimeoutReport { verdict, culprit: None, message };
        }
    }
}

/// Returns the status of a rank; also for this rank, in which another thread may wait elsewhere or compute.
fn status(own: &Inquirer<'_>, rank: usize) -> Option<Status> {
    if rank == own.rank {
        return Some(own.mailbox.status());
    }
    own.transport.ask(rank, own.settings.answer())
}

/// Formats a cycle, which ends with its first rank.
fn arrows(cycle: &[(usize, Duration)]) -> String {
    cycle.iter().chain(cycle.first()).map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(" → ")
}
