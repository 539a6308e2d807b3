//! Determines why an awaited rank is late: it does not answer, it computes, or ranks wait for each other.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::control::{Control, Status};
use crate::shared::{Command, Shared};

/// Outcome at the end of a chain of waiting ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A rank computes or is in a collective, or a wait in a cycle is younger than the short limit.
    Busy,
    /// A rank does not answer.
    Silent,
    /// Ranks have waited for each other for the short limit.
    Deadlock,
}

/// End of a chain of waiting ranks.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) verdict: Verdict,
    pub(crate) culprit: Option<usize>,
    pub(crate) message: String,
}

/// Follows the chain of waiting ranks, starting at a rank; a wait for a collective counts as busy.
pub(crate) fn report(shared: &Shared, peer: Option<usize>) -> Report {
    let Some(mut current) = peer else {
        let message = "not all ranks take part in the collective".to_owned();
        return Report { verdict: Verdict::Busy, culprit: None, message };
    };
    let mut chain: Vec<(usize, Duration)> = Vec::new();
    loop {
        let Some(status) = ask(shared, current) else {
            let message = format!("rank {current} does not answer");
            return Report { verdict: Verdict::Silent, culprit: Some(current), message };
        };
        let Some((next, age)) = status.wait else {
            let message = status.last.map_or_else(
                || format!("rank {current} has not started"),
                |at| format!("rank {current} is busy since {at}"),
            );
            return Report { verdict: Verdict::Busy, culprit: Some(current), message };
        };
        chain.push((current, age));
        current = next;
        if let Some(first) = chain.iter().position(|&(rank, _)| rank == current) {
            let cycle = &chain[first..];
            let is_young = cycle.iter().any(|&(_, age)| age < shared.limits.wait);
            let verdict = if is_young { Verdict::Busy } else { Verdict::Deadlock };
            let ranks = cycle.iter().chain(cycle.first()).map(|(rank, _)| rank.to_string());
            let arrows = ranks.collect::<Vec<_>>().join(" → ");
            let message = format!("deadlock: ranks wait for each other: {arrows}");
            return Report { verdict, culprit: None, message };
        }
    }
}

/// Returns the activity of a rank, if it answers in time.
fn ask(shared: &Shared, rank: usize) -> Option<Status> {
    let mut state = shared.lock();
    if rank == shared.rank {
        return Some(state.status());
    }
    state.answers.remove(&rank);
    shared.command(&mut state, Command::Control(rank, Control::Ask));
    let end = Instant::now() + shared.limits.answer;
    loop {
        if let Some(status) = state.answers.remove(&rank) {
            return Some(status);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}
