//! Interface by which a rank calls others and answers them. `tests/interleavings` has one in memory.

use super::socket::Socket;
use std::fmt::Debug;
use std::io;
use std::time::Duration;

/// Use of a connection that is made while the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// Messages of the caller.
    Data,
    /// One control message of the caller, and the reply to it.
    Inquiry,
}

/// Calls other ranks.
pub(super) trait Dial: Send + Sync + Debug {
    /// Connects to a rank, within a time limit.
    ///
    /// # Errors
    /// `ConnectionRefused` immediately if the process of the rank no longer listens.
    fn dial(&self, peer: usize, line: Line, patience: Duration) -> io::Result<Socket>;

    /// Accepts no more calls.
    fn close(&self);
}
