//! Moves messages from one rank's process or thread to another's; implemented by threads and TCP.

use super::error::Failure;
use super::mailbox::{Interrupt, Status};
use super::message::Message;
use super::step_context::StepContext;
use std::time::Duration;

/// A transport as the communicators see it. Ranks are those of the world.
pub(super) trait Transport: Send + Sync {
    /// Begins to send a message to another rank; returns at once.
    fn post(&self, to: usize, message: Message) -> SendState;

    /// Waits until what was [posted](Self::post) is on its way.
    fn wait_sent(
        &self,
        to: usize,
        sent: &SendState,
        at: StepContext,
        timeout: Duration,
    ) -> Result<(), Interrupt>;

    /// Whether [`wait_sent`](Self::wait_sent) would return at once.
    fn is_sent(&self, to: usize, sent: &SendState) -> bool;

    /// Ends the job: tells all others, as far as they can still be reached, then this rank's mailbox. Returns
    /// what the job failed of, which is another failure if one came first.
    fn end_job(&self, failure: Failure) -> Failure;

    /// Asks a rank what it is doing; `None` if it does not answer in time.
    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status>;
}

/// How far a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendState {
    /// The caller need not wait.
    Done,
    /// Sent once the peer has room.
    Delivered,
    /// Sent once so many messages were written.
    Queued(u64),
    /// The peer is no longer there.
    Closed,
}
