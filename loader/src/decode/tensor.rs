//! Provides batch buffers that several threads fill at once and whose memory is reused.
//!
//! A buffer is cut into slots, one per row; each thread owns the slot that it fills, and the filled slots are
//! joined without a copy. When the finished [`Tensor`] is dropped, the memory returns to the pool, because
//! faulting in fresh pages costs more than filling them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::BytesMut;
use dflop_samples::media::PixelType;

/// Alignment of the first value in bytes, enough for any vector instruction and for `DLPack`.
const ALIGNMENT: usize = 64;
/// Maximum number of buffers kept for reuse: buffers for batches in flight, and a few that the consumer still
/// holds.
const BUFFERS_KEPT: usize = 6;

/// Pool of buffers from dropped batches.
#[derive(Debug, Clone, Default)]
pub(crate) struct TensorPool(Arc<Mutex<FreeBuffers>>);

#[derive(Debug, Default)]
struct FreeBuffers {
    buffers: Vec<BytesMut>,
    /// Size of the largest batch so far in bytes; new buffers have this size, so that any buffer fits any
    /// batch.
    bytes_max: usize,
}

/// Batch under construction, with equal row lengths.
#[derive(Debug)]
pub(crate) struct Slots {
    pool: TensorPool,
    padding: BytesMut,
    /// Unused end of the buffer; it must be joined again, or the allocation cannot be reused.
    rest: BytesMut,
    row_bytes: usize,
    pixels: PixelType,
}

/// Row owned by the thread that fills it.
#[derive(Debug)]
pub(crate) struct Slot(BytesMut);

impl Slot {
    /// Returns the value bytes of the row, aligned for the value type; stale until they are written.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl TensorPool {
    /// Cuts a buffer into `rows` slots with `row_values` values each.
    pub(crate) fn slots(&self, rows: usize, row_values: usize, pixels: PixelType) -> (Slots, Vec<Slot>) {
        let row_bytes = row_values * pixels.bytes() as usize;
        // Allocations are less aligned, so there must be room to start the first row at an aligned address.
        let wanted = rows * row_bytes + ALIGNMENT;
        let mut buffer = self.lock().take(wanted);
        buffer.resize(wanted, 0);
        let padding = buffer.as_ptr().align_offset(ALIGNMENT);
        let padding = buffer.split_to(padding);
        let slots = (0..rows).map(|_| Slot(buffer.split_to(row_bytes))).collect();
        (Slots { pool: self.clone(), padding, rest: buffer, row_bytes, pixels }, slots)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeBuffers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, buffer: BytesMut) {
        let mut free = self.lock();
        if free.buffers.len() < BUFFERS_KEPT {
            free.buffers.push(buffer);
        }
    }
}

impl FreeBuffers {
    /// Returns a kept or new buffer with at least `bytes` bytes; the content is stale.
    fn take(&mut self, bytes: usize) -> BytesMut {
        self.bytes_max = self.bytes_max.max(bytes);
        let fits = self.buffers.iter().rposition(|buffer| buffer.capacity() >= bytes);
        if let Some(place) = fits {
            return self.buffers.swap_remove(place);
        }
        // Sizes rarely shrink, so a buffer that is too small now would never be used again.
        self.buffers.pop();
        BytesMut::zeroed(self.bytes_max)
    }
}

impl Slots {
    /// Joins all slots in the order in which they were cut, keeping the rows for which `is_kept` is true.
    pub(crate) fn join(self, slots: Vec<Slot>, is_kept: &[bool]) -> Tensor {
        let (row_bytes, pixels) = (self.row_bytes, self.pixels);
        let padding = self.padding.len();
        let mut joined = self.padding;
        for slot in slots {
            joined.unsplit(slot.0);
        }
        let mut rows = 0;
        // Gaps from skipped samples are closed in place.
        for row in (0..is_kept.len()).filter(|&row| is_kept[row]) {
            if row != rows {
                let start = padding + row * row_bytes;
                joined.copy_within(start..start + row_bytes, padding + rows * row_bytes);
            }
            rows += 1;
        }
        joined.unsplit(self.rest);
        let end = padding + rows * row_bytes;
        Tensor { whole: joined, start: padding, end, rows, pixels, pool: self.pool }
    }
}

/// Finished batch of rows, 64-byte aligned; dropping it returns the memory to the pool.
#[derive(Debug)]
pub struct Tensor {
    whole: BytesMut,
    start: usize,
    end: usize,
    rows: usize,
    pixels: PixelType,
    pool: TensorPool,
}

impl Tensor {
    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the value type.
    #[must_use]
    pub fn pixel_type(&self) -> PixelType {
        self.pixels
    }

    /// Returns all values in single precision, row after row; empty for any other value type.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        if self.pixels == PixelType::Float32 { bytemuck::cast_slice(self.bytes()) } else { &[] }
    }

    /// Returns all value bytes, row after row, in native byte order.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.whole[self.start..self.end]
    }

    /// Returns all value bytes, row after row, for changes in place.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.whole[self.start..self.end]
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.whole));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &TensorPool, is_kept: &[bool]) -> Tensor {
        let (batch, mut slots) = pool.slots(is_kept.len(), 16, PixelType::Float32);
        for (row, slot) in slots.iter_mut().enumerate() {
            bytemuck::cast_slice_mut(slot.bytes()).fill(row as f32);
        }
        batch.join(slots, is_kept)
    }

    #[test]
    fn rows_keep_their_order_and_bad_ones_close_up() {
        let tensor = filled(&TensorPool::default(), &[true, false, true, true]);
        let first: Vec<f32> = tensor.values().chunks(16).map(|row| row[0]).collect();
        assert_eq!((tensor.rows(), first), (3, vec![0.0, 2.0, 3.0]));
        assert_eq!(tensor.values().as_ptr().align_offset(ALIGNMENT), 0);
    }

    #[test]
    fn memory_is_used_again() {
        let pool = TensorPool::default();
        let first = filled(&pool, &[true; 4]).values().as_ptr();
        assert_eq!(filled(&pool, &[true; 4]).values().as_ptr(), first);
        assert_eq!(filled(&pool, &[true; 2]).values().as_ptr(), first);
    }

    #[test]
    fn an_empty_batch_is_empty() {
        assert_eq!(filled(&TensorPool::default(), &[]).values().len(), 0);
        assert_eq!(filled(&TensorPool::default(), &[false]).rows(), 0);
    }
}
