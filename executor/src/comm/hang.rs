//! Who is to blame when a wait reaches its time limit.
//!
//! The rank that is waited for may itself wait for another one. So it is asked, then the one that it
//! names, until one does not answer, computes, or waits for a rank that was asked before.

use super::fabric::Fabric;
use super::settings::Settings;

/// The end of a chain of waiting ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blame {
    pub(super) culprit: Option<usize>,
    pub(super) message: String,
}

/// Follows who waits for whom, from `peer` on.
pub(super) fn find(fabric: &Fabric, peer: usize) -> Blame {
    let mut chain = vec![fabric.rank];
    let mut at_rank = peer;
    loop {
        if chain.contains(&at_rank) {
            chain.push(at_rank);
            return Blame {
                culprit: None,
                message: format!("ranks wait for one another: {}", arrows(&chain)),
            };
        }
        chain.push(at_rank);
        let Some(status) = fabric.wire.ask(at_rank, Settings::STATUS) else {
            let heard = fabric.mailbox.heard(at_rank);
            let heard =
                heard.map_or("nothing was heard of it before".into(), |at| format!("last heard of at {at}"));
            return Blame {
                culprit: Some(at_rank),
                message: format!("rank {at_rank} does not answer, {heard}"),
            };
        };
        match (status.wait, status.last) {
            (Some((next, _)), _) => at_rank = next,
            (None, Some(at)) => {
                return Blame {
                    culprit: Some(at_rank),
                    message: format!("rank {at_rank} is busy since {at}"),
                };
            }
            (None, None) => {
                return Blame { culprit: Some(at_rank), message: format!("rank {at_rank} has not begun") };
            }
        }
    }
}

fn arrows(chain: &[usize]) -> String {
    chain.iter().map(usize::to_string).collect::<Vec<_>>().join(" → ")
}
