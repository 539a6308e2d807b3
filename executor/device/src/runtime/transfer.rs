//! A communication in progress.

use super::device_runtime::{Lane, Runtime};
use super::tensor::Tensor;
use crate::error::Result;

/// Waits for a communication: orders a lane behind it.
type Wait<D> = Box<dyn FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send>;

/// A communication in progress, which owns its tensor until it is waited for.
#[must_use = "a communication is not known to be done before it is waited for"]
pub struct Transfer<D: Runtime>(Wait<D>);

impl<D: Runtime> Transfer<D> {
    /// Makes a transfer of a function that orders a lane behind it, and returns its tensor.
    pub fn new(wait: impl FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Orders the further work of a lane behind the communication, and returns what was received; `None` for
    /// what was sent.
    ///
    /// # Errors
    /// [`crate::Error::Comm`] if the job has ended, [`crate::Error::OutOfMemory`].
    pub fn wait(self, lane: Lane) -> Result<Option<Tensor<D>>> {
        (self.0)(lane)
    }
}
