//! Buffers through which host numbers go to the device and back.

#![expect(unsafe_code, reason = "copies take addresses")]

use std::sync::{Arc, Mutex, PoisonError};

use super::context::Loads;
use super::{Context, Event, HostBuffer, Stream};
use crate::error::Result;

/// Minimum buffer size in bytes.
const BYTES_MIN: usize = 4 << 10;
/// Size and number of buffers for results, which are made before ranks wait for each other.
const RESULTS: (usize, usize) = (64 << 10, 2);
/// Maximum number of buffers in flight; beyond it, a copy to the device waits for an earlier copy.
const BUFFERS_MAX: usize = 256;

/// Buffers that are reused once the device has read them.
///
/// They are page-locked, except buffers that are allocated while ranks wait for each other ([`Loads`]);
/// page-locked buffers replace these as soon as allowed.
pub(crate) struct Staging {
    context: Context,
    loads: Arc<Loads>,
    /// Buffers with the event after the last copy, oldest first.
    buffers: Mutex<Vec<(HostBuffer, Event)>>,
    /// Buffers for results that nothing uses, and whether they have been made.
    results: Mutex<(Vec<HostBuffer>, bool)>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        let buffers = self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in buffers {
            // a device that has failed no longer copies
            let _ = event.synchronize();
        }
    }
}

impl Staging {
    pub(crate) fn new(context: Context, loads: Arc<Loads>) -> Self {
        Self { context, loads, buffers: Mutex::default(), results: Mutex::default() }
    }

    /// Makes the buffers for results, unless there are any; may wait for all work of the device.
    pub(crate) fn make_results(&self) -> Result<()> {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut results.1, true) {
            for _ in 0..RESULTS.1 {
                results.0.push(HostBuffer::page_locked(&self.context, RESULTS.0)?);
            }
        }
        Ok(())
    }

    /// Returns a buffer of at least this many bytes for a result, which should be page-locked: a copy to
    /// another one waits for the device.
    pub(crate) fn take_result(&self, bytes: usize) -> Result<HostBuffer> {
        let made =
            (bytes <= RESULTS.0).then(|| self.results.lock().unwrap_or_else(PoisonError::into_inner).0.pop());
        made.flatten().map_or_else(|| self.take(bytes), Ok)
    }

    /// Gives a buffer of a result back, after its copy.
    pub(crate) fn give_back_result(&self, buffer: HostBuffer, event: Event) {
        if buffer.is_page_locked() && buffer.len() == RESULTS.0 {
            self.results.lock().unwrap_or_else(PoisonError::into_inner).0.push(buffer);
        } else {
            self.give_back(buffer, event);
        }
    }

    /// Returns a buffer with at least this many bytes that no work uses.
    pub(crate) fn take(&self, bytes: usize) -> Result<HostBuffer> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &HostBuffer| buffer.len() >= bytes && buffer.len() / 4 <= bytes.max(BYTES_MIN);
        let find = |buffers: &[(HostBuffer, Event)], is_locked: bool| {
            let is_free = |(buffer, event): &(HostBuffer, Event)| {
                buffer.is_page_locked() == is_locked && fits(buffer) && event.is_reached()
            };
            buffers.iter().position(is_free)
        };
        if let Some(index) = find(&buffers, true) {
            return Ok(buffers.remove(index).0);
        }
        let len = bytes.next_power_of_two().max(BYTES_MIN);
        if !self.loads.are_safe() {
            return Ok(match find(&buffers, false) {
                Some(index) => buffers.remove(index).0,
                None => HostBuffer::pageable(len),
            });
        }
        if buffers.len() >= BUFFERS_MAX {
            // buffers whose sizes are no longer needed go first
            for (buffer, event) in buffers.drain(..BUFFERS_MAX / 2) {
                event.synchronize()?;
                drop(buffer);
            }
        }
        if let Some(index) = find(&buffers, false) {
            buffers.remove(index);
        }
        HostBuffer::page_locked(&self.context, len)
    }

    /// Copies bytes that a closure writes to the device, in stream order.
    ///
    /// # Safety
    /// The address points to at least this many bytes of device memory that live until the work is done.
    pub(crate) unsafe fn copy_up(
        &self,
        stream: &Stream,
        address: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut buffer = self.take(bytes)?;
        fill(&mut buffer.bytes_mut()[..bytes]);
        // SAFETY: the caller's contract. The buffer is not reused before the event after the copy.
        unsafe { stream.copy_up(&buffer, bytes, address)? };
        self.give_back(buffer, stream.record()?);
        Ok(())
    }

    /// Returns a buffer whose last copy is before an event.
    pub(crate) fn give_back(&self, buffer: HostBuffer, event: Event) {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push((buffer, event));
    }
}
