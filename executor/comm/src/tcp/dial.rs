//! Interface by which a rank calls other ranks and answers them. `tests/interleavings` has an in-memory
//! implementation.

use super::socket::Socket;
use std::fmt::Debug;
use std::io;
use std::time::Duration;

/// Purpose of a connection that is created while the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// Messages from the caller.
    Data,
    /// One control message from the caller, and the reply.
    Inquiry,
}

/// Calls other ranks.
pub(super) trait Dial: Send + Sync + Debug {
    /// Connects to a rank, within a time limit.
    ///
    /// # Errors
    /// `ConnectionRefused` immediately if the rank process no longer listens.
    fn dial(&self, peer: usize, line: Line, patience: Duration) -> io::Result<Socket>;

    /// Accepts no more calls.
    fn close(&self);
}
