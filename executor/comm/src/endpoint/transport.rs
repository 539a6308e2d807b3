//! Transport interface: moves messages between rank processes or threads.

use super::mailbox::Interrupt;
use super::waits::{Status, Wait};
use crate::error::Failure;
use crate::message::Message;
use std::time::Duration;

/// Rank transport. Ranks are world ranks.
pub(crate) trait Transport: Send + Sync {
    /// Starts to send a message to another rank; returns immediately.
    fn post(&self, to: usize, message: Message) -> SendState;

    /// Waits until a [posted](Self::post) message to the awaited peer is in flight.
    fn wait_sent(&self, sent: &SendState, wait: &mut Wait, timeout: Duration) -> Result<(), Interrupt>;

    /// Returns whether [`wait_sent`](Self::wait_sent) would return immediately.
    fn is_sent(&self, to: usize, sent: &SendState) -> bool;

    /// Sends a small message to a neighbor in the job tree. A neighbor that does not accept it is detected
    /// elsewhere.
    fn send_control(&self, to: usize, message: Message);

    /// Aborts the job: notifies all reachable ranks, then the mailbox of this rank. Returns the job failure,
    /// which differs from `failure` if another failure came first.
    fn end_job(&self, failure: Failure) -> Failure;

    /// Requests the status of a rank; returns `None` if it does not answer in time.
    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status>;
}

/// Progress of a message send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendState {
    /// Completed; nothing to wait for.
    Done,
    /// Completes once the peer has room.
    Delivered,
    /// Completes once this many messages are written.
    Queued(u64),
    /// The peer is gone.
    Closed,
}
