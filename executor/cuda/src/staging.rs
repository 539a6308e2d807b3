//! Page-locked buffers through which numbers of the host go to the device and back.

use std::sync::{Mutex, PoisonError};

use crate::driver::{Context, Event, PinnedBuffer};
use crate::error::Result;

/// Smallest buffer.
const BYTES_MIN: usize = 4 << 10;
/// Buffers that may be under way; above it, a copy to the device waits for an earlier one.
const BUFFERS_MAX: usize = 256;

/// Buffers that are reused once the device has read them.
pub(crate) struct Staging {
    context: Context,
    /// Buffers with the event behind their last copy, oldest first.
    buffers: Mutex<Vec<(PinnedBuffer, Event)>>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        let buffers = self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in buffers {
            // a device that has failed copies nothing any more
            let _ = event.synchronize();
        }
    }
}

impl Staging {
    pub(crate) fn new(context: Context) -> Self {
        Self { context, buffers: Mutex::default() }
    }

    /// Returns a buffer of at least this many bytes that no work uses.
    pub(crate) fn take(&self, bytes: usize) -> Result<PinnedBuffer> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &PinnedBuffer| buffer.len() >= bytes && buffer.len() / 4 <= bytes.max(BYTES_MIN);
        if buffers.len() >= BUFFERS_MAX {
            // buffers of sizes that are not needed any more go first
            for (buffer, event) in buffers.drain(..BUFFERS_MAX / 2) {
                event.synchronize()?;
                drop(buffer);
            }
        }
        match buffers.iter().position(|(buffer, event)| fits(buffer) && event.is_reached()) {
            Some(index) => Ok(buffers.remove(index).0),
            None => PinnedBuffer::new(&self.context, bytes.next_power_of_two().max(BYTES_MIN)),
        }
    }

    /// Gives a buffer back, whose last copy is before an event.
    pub(crate) fn give_back(&self, buffer: PinnedBuffer, event: Event) {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push((buffer, event));
    }
}
