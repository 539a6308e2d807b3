//! Reports which rank caused a timeout.
//!
//! The awaited rank may itself wait for another one. It is therefore asked for its status, then the rank that
//! it waits for, until a rank does not answer, computes, or was asked before.

use super::mailbox::Mailbox;
use super::settings::Settings;
use super::transport::Transport;

/// End of a chain of waiting ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TimeoutReport {
    pub(super) culprit: Option<usize>,
    pub(super) message: String,
}

/// Follows the chain of waiting ranks from `peer` on.
pub(super) fn find(rank: usize, transport: &dyn Transport, mailbox: &Mailbox, peer: usize) -> TimeoutReport {
    let mut chain = vec![rank];
    let mut current = peer;
    loop {
        // a cycle: every rank of it waits, so none can be blamed
        if chain.contains(&current) {
            chain.push(current);
            return TimeoutReport {
                culprit: None,
                message: format!("deadlock: ranks wait for each other: {}", arrows(&chain)),
            };
        }
        chain.push(current);
        let Some(status) = transport.ask(current, Settings::STATUS) else {
            let heard = mailbox.heard(current);
            let heard = heard.map_or("never heard of before".into(), |at| format!("last heard of at {at}"));
            return TimeoutReport {
                culprit: Some(current),
                message: format!("rank {current} does not answer, {heard}"),
            };
        };
        match (status.wait, status.last) {
            (Some((next, _)), _) => current = next,
            (None, Some(at)) => {
                return TimeoutReport {
                    culprit: Some(current),
                    message: format!("rank {current} is busy since {at}"),
                };
            }
            (None, None) => {
                return TimeoutReport {
                    culprit: Some(current),
                    message: format!("rank {current} has not started"),
                };
            }
        }
    }
}

fn arrows(chain: &[usize]) -> String {
    chain.iter().map(usize::to_string).collect::<Vec<_>>().join(" → ")
}
