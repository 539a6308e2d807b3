//! Interface of transports, which move messages between the processes or threads of ranks.

use super::error::Failure;
use super::mailbox::{Interrupt, Status, Wait};
use super::message::Message;
use std::time::Duration;

/// Transport of one rank. Ranks are world ranks.
pub(super) trait Transport: Send + Sync {
    /// Starts to send a message to another rank; returns immediately.
    fn post(&self, to: usize, message: Message) -> SendState;

    /// Waits until a [posted](Self::post) message to the peer of the wait is on its way.
    fn wait_sent(&self, sent: &SendState, wait: &mut Wait, timeout: Duration) -> Result<(), Interrupt>;

    /// Returns whether [`wait_sent`](Self::wait_sent) would return immediately.
    fn is_sent(&self, to: usize, sent: &SendState) -> bool;

    /// Aborts the job: notifies all reachable ranks, then the mailbox of this rank. Returns the failure of
    /// the job, which is another one if it came first.
    fn end_job(&self, failure: Failure) -> Failure;

    /// Requests the status of a rank; returns `None` if it does not answer in time.
    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status>;
}

/// Progress of a message that is being sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendState {
    /// Completed; nothing to wait for.
    Done,
    /// Completes once the peer has room.
    Delivered,
    /// Completes once this number of messages is written.
    Queued(u64),
    /// The peer is gone.
    Closed,
}
