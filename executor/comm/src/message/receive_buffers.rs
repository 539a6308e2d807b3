//! Receive buffer pool.

use super::payload::Buffer;
use crate::dtype::Dtype;
use crate::sync::Mutex;
use std::sync::PoisonError;

/// Free f32 buffers, the most recently used last.
#[derive(Debug, Default)]
pub(crate) struct ReceiveBufferPool(Mutex<Vec<Vec<f32>>>);

impl ReceiveBufferPool {
    /// Maximum number of buffers in the pool.
    const BUFFERS_MAX: usize = 8;
    /// Length below which allocating is cheaper than searching the pool.
    const ELEMENTS_MIN: usize = 4096;

    /// Returns a buffer with unspecified elements.
    pub(crate) fn take(&self, dtype: Dtype, elements: usize) -> Buffer {
        if dtype == Dtype::F32 && elements >= Self::ELEMENTS_MIN {
            let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // at most twice the requested length, so that small messages do not occupy large buffers
            let fits = |buffer: &Vec<f32>| (elements..=2 * elements).contains(&buffer.len());
            if let Some(index) = free.iter().rposition(fits) {
                let mut buffer = free.remove(index);
                buffer.truncate(elements);
                return Buffer::F32(buffer);
            }
        }
        Buffer::zeros(dtype, elements)
    }

    /// Returns a buffer to the pool.
    pub(crate) fn give(&self, buffer: Buffer) {
        if let Buffer::F32(mut elements) = buffer
            && elements.len() >= Self::ELEMENTS_MIN
        {
            // the full capacity counts, so that a truncated buffer can serve its original length again
            elements.resize(elements.capacity(), 0.0);
            let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if free.len() == Self::BUFFERS_MAX {
                free.remove(0);
            }
            free.push(elements);
        }
    }
}
