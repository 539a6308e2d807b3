//! Points in lanes.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::device::Device;
use crate::runtime::Lane;

/// Point in a [`Deferred`](super::Deferred) lane.
pub struct DeferredEvent<D: Device> {
    pub(super) lane: Lane,
    /// Number of work items in the lane up to this point.
    pub(super) number: u64,
    pub(super) reached: Arc<OnceLock<D::Event>>,
}

impl<D: Device> Clone for DeferredEvent<D> {
    fn clone(&self) -> Self {
        Self { lane: self.lane, number: self.number, reached: Arc::clone(&self.reached) }
    }
}

impl<D: Device> fmt::Debug for DeferredEvent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeferredEvent({:?}, {})", self.lane, self.number)
    }
}

impl<D: Device> DeferredEvent<D> {
    /// Returns the event of the inner device, once the point is reached.
    pub(super) fn reached(&self) -> Option<&D::Event> {
        self.reached.get()
    }
}
