//! Handles of what is on its way.

use super::error::Result;

/// Something that completes later; implemented by each transport.
pub trait Completion<T>: Send {
    /// Whether [`wait`](Self::wait) would return at once.
    fn is_complete(&self) -> bool;

    /// Waits, no longer than the communicator's time limit.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) where the job is over or the time limit is reached.
    fn wait(self: Box<Self>) -> Result<T>;
}

/// A send or receive on its way. Computation may go on until [`wait`](Self::wait).
#[must_use = "a message that no one waits for may never have arrived"]
pub struct Handle<T>(Box<dyn Completion<T>>);

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle(complete: {})", self.is_complete())
    }
}

impl<T> Handle<T> {
    /// Wraps what a transport makes.
    pub fn new(completion: impl Completion<T> + 'static) -> Self {
        Self(Box::new(completion))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// Waits for the end, no longer than the communicator's time limit.
    ///
    /// # Errors
    /// [`Error::Failed`](super::Error::Failed) where the job is over, or ends because the time limit is reached.
    pub fn wait(self) -> Result<T> {
        self.0.wait()
    }
}
