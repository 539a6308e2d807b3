//! CPU device buffer pool: dropped buffers return to the pool and are reused.
//!
//! Reused pages cost no page faults, and a training step allocates nearly the same buffers again and again,
//! with different lengths whenever a microbatch has a different number of tokens. A buffer therefore serves
//! every length down to a quarter of its length; the smallest sufficient buffer is used. Uploads, in
//! particular parameters, get buffers with the exact length, because they may stay. The pool is bounded: used
//! and free buffers together hold at most a quarter more bytes than the used-bytes peak. The shortest free
//! buffers are released first, as they are the cheapest to allocate again.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Maximum ratio between buffer length and requested length.
pub(super) const SLACK: usize = 4;

/// Used and free device buffers.
#[derive(Debug, Default)]
pub(super) struct BufferPool {
    free_buffers: Mutex<FreeBuffers>,
}

#[derive(Debug, Default)]
struct FreeBuffers {
    /// Free buffers by length.
    free: BTreeMap<usize, Vec<Vec<f32>>>,
    free_bytes: u64,
    used_bytes: u64,
    used_bytes_max: u64,
    /// Bytes allocated outside the pool that count toward the limit.
    reserved_bytes: u64,
    /// Limit for used bytes; `None` for no limit.
    limit_bytes: Option<u64>,
}

fn element_bytes(len: usize) -> u64 {
    4 * len as u64
}

impl FreeBuffers {
    /// Takes the shortest free buffer with a length in this range.
    fn pop(&mut self, lengths: std::ops::RangeInclusive<usize>) -> Option<Vec<f32>> {
        let (&len, buffers) = self.free.range_mut(lengths).next()?;
        let values = buffers.pop();
        if buffers.is_empty() {
            self.free.remove(&len);
        }
        self.free_bytes -= values.as_ref().map_or(0, |_| element_bytes(len));
        values
    }

    /// Returns whether this many further bytes exceed the limit.
    fn exceeds(&self, bytes: u64) -> bool {
        let used_bytes = self.used_bytes.saturating_add(self.reserved_bytes);
        self.limit_bytes.is_some_and(|limit| used_bytes.saturating_add(bytes) > limit)
    }

    fn bytes_max(&self) -> u64 {
        self.used_bytes_max + self.used_bytes_max / 4
    }
}

impl BufferPool {
    /// Takes a buffer of unspecified contents, of this length up to a longer one.
    pub(super) fn take_up_to(&self, len: usize, longest: usize) -> Result<Vec<f32>> {
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = element_bytes(len) as usize;
        let none = Error::out_of_memory(bytes, free_buffers.used_bytes + free_buffers.reserved_bytes);
        if free_buffers.exceeds(element_bytes(len)) {
            return Err(none);
        }
        let mut values = free_buffers.pop(len..=longest).unwrap_or_default();
        if values.len() < len {
            // `vec!` would abort the process if memory is exhausted
            values.try_reserve_exact(len).map_err(|_| none)?;
            values.resize(len, 0.0);
        }
        // the complete buffer counts, not only the requested length
        free_buffers.used_bytes += element_bytes(values.len());
        free_buffers.used_bytes_max = free_buffers.used_bytes_max.max(free_buffers.used_bytes);
        drop(free_buffers);
        // so that a read before a write is noticed
        if cfg!(debug_assertions) {
            values[..len].fill(f32::NAN);
        }
        Ok(values)
    }

    pub(super) fn give_back(&self, values: Vec<f32>) {
        if values.is_empty() {
            return;
        }
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = element_bytes(values.len());
        free_buffers.used_bytes -= bytes;
        free_buffers.free_bytes += bytes;
        free_buffers.free.entry(values.len()).or_default().push(values);
        // shortest first, until the pool is within its bound again
        while free_buffers.used_bytes + free_buffers.free_bytes > free_buffers.bytes_max() {
            if free_buffers.pop(0..=usize::MAX).is_none() {
                break;
            }
        }
    }

    /// Counts values allocated outside the pool as a used buffer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if it exceeds the limit.
    pub(super) fn own(&self, values: &[f32]) -> Result<()> {
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = element_bytes(values.len());
        if free_buffers.exceeds(bytes) {
            let used_bytes = free_buffers.used_bytes + free_buffers.reserved_bytes;
            return Err(Error::out_of_memory(bytes as usize, used_bytes));
        }
        free_buffers.used_bytes += bytes;
        free_buffers.used_bytes_max = free_buffers.used_bytes_max.max(free_buffers.used_bytes);
        Ok(())
    }

    /// Stops counting a used buffer, which leaves the device.
    pub(super) fn disown(&self, values: &[f32]) {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner).used_bytes -=
            element_bytes(values.len());
    }

    /// Sets the limit for used bytes; buffers in use are not affected.
    pub(super) fn limit(&self, bytes: u64) {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner).limit_bytes = Some(bytes);
    }

    /// Counts bytes allocated outside the pool toward the limit, until they are released.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if they exceed the limit.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if free_buffers.exceeds(bytes) {
            let used_bytes = free_buffers.used_bytes + free_buffers.reserved_bytes;
            return Err(Error::out_of_memory(bytes as usize, used_bytes));
        }
        free_buffers.reserved_bytes += bytes;
        Ok(())
    }

    /// Releases reserved bytes.
    pub(super) fn release(&self, bytes: u64) {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner).reserved_bytes -= bytes;
    }

    /// Returns the sum of used buffer bytes and reserved bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        let free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        free_buffers.used_bytes + free_buffers.reserved_bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::memory::CpuMemory;
    use crate::runtime::Memory;

    #[test]
    fn dropped_buffers_are_reused_and_the_pool_is_bounded() {
        let pool = Arc::new(BufferPool::default());
        let (first, second) = (pool.take(1000).unwrap(), pool.take(10).unwrap());
        let place = first.address();
        drop(first);
        assert_eq!(pool.used_bytes(), 40);
        assert_eq!(pool.take(1000).unwrap().address(), place);
        drop(second);
        for len in 1..500 {
            drop(pool.take(len).unwrap());
            let free_buffers = pool.free_buffers.lock().unwrap();
            assert!(free_buffers.used_bytes + free_buffers.free_bytes <= 5050);
        }
        assert!(matches!(pool.take(usize::MAX / 8), Err(Error::OutOfMemory { .. })));
        assert_eq!(pool.used_bytes(), 0);
    }

    #[test]
    fn a_buffer_serves_shorter_lengths_and_uploads_get_exact_ones() {
        let pool = Arc::new(BufferPool::default());
        let long = pool.take(1000).unwrap();
        let place = long.address();
        drop(long);
        let shorter = pool.take(250).unwrap();
        assert_eq!((shorter.address(), shorter.len()), (place, 1000));
        assert_eq!(pool.used_bytes(), 4000, "all of the buffer is in use");
        drop(shorter);
        assert_ne!(pool.take(249).unwrap().address(), place);
        let exact = pool.take_exact(250).unwrap();
        assert!(exact.address() != place && exact.len() == 250);
    }

    #[test]
    fn microbatches_in_any_order_reuse_memory() {
        let pool = Arc::new(BufferPool::default());
        let step = |tokens: usize| {
            let buffers = [8, 64, 16, 64].map(|width| pool.take(tokens * width).unwrap());
            buffers.iter().map(CpuMemory::address).collect::<std::collections::BTreeSet<_>>()
        };
        let longest = step(400);
        for tokens in [250, 399, 201, 320, 400, 222] {
            assert!(step(tokens).is_subset(&longest), "{tokens}");
        }
    }
}
