//! A communication in progress, and communication times.

use std::sync::{Arc, OnceLock};

use super::device_runtime::{Lane, Runtime};
use super::tensor::Tensor;
use crate::error::Result;

/// Waits for a communication: orders a lane after it.
type Wait<D> = Box<dyn FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send>;

/// Communication in progress, which owns a tensor until it is waited for.
#[must_use = "a communication is not known to be done before it is waited for"]
pub struct Transfer<D: Runtime> {
    wait: Wait<D>,
    span: Span<D>,
}

impl<D: Runtime> Transfer<D> {
    /// Creates a transfer from a function that orders a lane after it and returns the tensor. The transfer
    /// times are never known.
    pub fn new(wait: impl FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send + 'static) -> Self {
        Self::timed(Span::default(), wait)
    }

    /// Creates a transfer as in [`new`](Self::new), with times set by the device.
    pub fn timed(
        span: Span<D>,
        wait: impl FnOnce(Lane) -> Result<Option<Tensor<D>>> + Send + 'static,
    ) -> Self {
        Self { wait: Box::new(wait), span }
    }

    /// Returns the communication times, which are known once the device has completed the communication and
    /// it was waited for.
    #[must_use]
    pub fn span(&self) -> Span<D> {
        self.span.clone()
    }

    /// Orders further work in a lane after the communication, and returns the received tensor; `None` for a
    /// send.
    ///
    /// # Errors
    /// [`crate::Error::Comm`] if the job has ended, [`crate::Error::OutOfMemory`].
    pub fn wait(self, lane: Lane) -> Result<Option<Tensor<D>>> {
        (self.wait)(lane)
    }
}

/// Start and end of a communication.
pub struct Span<D: Runtime>(Arc<OnceLock<[D::Event; 2]>>);

impl<D: Runtime> Span<D> {
    /// Sets start and end; the first values stay.
    pub fn set(&self, start: D::Event, end: D::Event) {
        // a communication has one end
        let _ = self.0.set([start, end]);
    }

    /// Returns start and end, once they are known.
    #[must_use]
    pub fn get(&self) -> Option<&[D::Event; 2]> {
        self.0.get()
    }
}

impl<D: Runtime> Clone for Span<D> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<D: Runtime> Default for Span<D> {
    fn default() -> Self {
        Self(Arc::default())
    }
}
