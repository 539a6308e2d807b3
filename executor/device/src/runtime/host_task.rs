//! Host work in a device lane: exchanges through host memory.

use std::time::Instant;

use dflop_comm::{Buffer, Slice};

use crate::error::Result;

/// Exchange with other ranks through host memory.
///
/// A device either calls [`start`](Self::start) and [`finish`](Self::finish), with other work between them,
/// or [`run`](Self::run), if the exchange changes elements and the caller waits for it.
pub trait HostTask: Send {
    /// Starts the exchange, without waiting for other ranks.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn start(&mut self, input: Option<Buffer>) -> Result<()>;

    /// Returns whether [`finish`](Self::finish) would not wait.
    fn is_ready(&self) -> bool;

    /// Waits for the exchange, and returns the result.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn finish(self: Box<Self>) -> Result<Option<Buffer>>;

    /// Waits like [`finish`](Self::finish), and returns the time at which the exchange was complete. Default:
    /// the end of the wait.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn finish_timed(self: Box<Self>) -> Result<(Option<Buffer>, Instant)> {
        let result = self.finish()?;
        Ok((result, Instant::now()))
    }

    /// Returns whether numbers are added, so that bf16 is widened to `f32` for the exchange.
    fn adds(&self) -> bool;

    /// Exchanges elements in place, and waits.
    ///
    /// # Errors
    /// Errors from the communicator.
    fn run(self: Box<Self>, values: Slice<'_>) -> Result<()>;
}
