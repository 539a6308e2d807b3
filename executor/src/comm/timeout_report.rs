//! Who is to blame when a wait reaches its time limit.
//!
//! The rank that is waited for may itself wait for another one. So it is asked, then the one that it
//! names, until one does not answer, computes, or waits for a rank that was asked before.

use super::mailbox::Mailbox;
use super::settings::Settings;
use super::transport::Transport;

/// The end of a chain of waiting ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TimeoutReport {
    pub(super) culprit: Option<usize>,
    pub(super) message: String,
}

/// Follows who waits for whom, from `peer` on.
pub(super) fn find(rank: usize, transport: &dyn Transport, mailbox: &Mailbox, peer: usize) -> TimeoutReport {
    let mut chain = vec![rank];
    let mut current = peer;
    loop {
        if chain.contains(&current) {
            chain.push(current);
            return TimeoutReport {
                culprit: None,
                message: format!("ranks wait for one another: {}", arrows(&chain)),
            };
        }
        chain.push(current);
        let Some(status) = transport.ask(current, Settings::STATUS) else {
            let heard = mailbox.heard(current);
            let heard =
                heard.map_or("nothing was heard of it before".into(), |at| format!("last heard of at {at}"));
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
                    message: format!("rank {current} has not begun"),
                };
            }
        }
    }
}

fn arrows(chain: &[usize]) -> String {
    chain.iter().map(usize::to_string).collect::<Vec<_>>().join(" → ")
}
