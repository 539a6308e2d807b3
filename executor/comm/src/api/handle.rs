//! Handles for pending sends, receives and collectives.

use crate::error::Result;
use std::time::Instant;

/// Operation that completes later; implemented by each transport.
pub trait Completion<T>: Send {
    /// Returns whether [`wait`](Self::wait) would return immediately.
    fn is_complete(&self) -> bool;

    /// Waits, at most for the time limit of the communicator.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::Error::Failed) if the job has ended or the time limit is reached.
    fn wait(self: Box<Self>) -> Result<T>;

    /// Waits like [`wait`](Self::wait), and returns the time at which the operation was complete, as far as
    /// the transport can tell. Default: the end of the wait.
    ///
    /// # Errors
    /// Errors from [`wait`](Self::wait).
    fn wait_timed(self: Box<Self>) -> Result<(T, Instant)> {
        let value = self.wait()?;
        Ok((value, Instant::now()))
    }
}

/// Pending send, receive or collective. The caller may compute until [`wait`](Self::wait).
#[must_use = "a message that no one waits for may never have arrived"]
pub struct Handle<T>(Box<dyn Completion<T>>);

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle(complete: {})", self.is_complete())
    }
}

impl<T> Handle<T> {
    /// Wraps a pending transport operation.
    pub fn new(completion: impl Completion<T> + 'static) -> Self {
        Self(Box::new(completion))
    }

    /// Creates a handle for an operation that is complete.
    pub fn ready(value: T) -> Self
    where
        T: Send + 'static,
    {
        Self::new(Ready(value, Instant::now()))
    }

    /// Returns whether [`wait`](Self::wait) would return immediately.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// Waits for completion, at most for the time limit of the communicator.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::Error::Failed) if the job has ended, or ends because the time limit is
    /// reached.
    pub fn wait(self) -> Result<T> {
        self.0.wait()
    }

    /// Waits like [`wait`](Self::wait), and returns the time at which the operation was complete, as far as
    /// the transport can tell: before the wait, if the caller computed longer.
    ///
    /// # Errors
    /// Errors from [`wait`](Self::wait).
    pub fn wait_timed(self) -> Result<(T, Instant)> {
        self.0.wait_timed()
    }
}

/// Completed operation, and the completion time.
struct Ready<T>(T, Instant);

impl<T: Send> Completion<T> for Ready<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<T> {
        Ok(self.0)
    }

    fn wait_timed(self: Box<Self>) -> Result<(T, Instant)> {
        Ok((self.0, self.1))
    }
}
