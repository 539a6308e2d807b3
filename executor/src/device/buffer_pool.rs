//! Memory of the CPU device: buffers that go back to a shelf when they are dropped, and are taken from there again.
//!
//! Pages that were touched before cost nothing, and a training step asks for much the same buffers again and again, of other
//! lengths whenever a microbatch has another number of tokens. A buffer therefore serves every length down to a quarter of
//! its own; the smallest that is long enough is taken. What is uploaded, parameters above all, gets buffers of its exact length, as
//! it may stay. The shelf is bounded: buffers in use and on it take at most a quarter more bytes than were
//! ever in use at the same time. The shortest go first, as they cost least to make anew.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::Buffer;
use crate::error::{Error, Result};

/// A buffer is at most this many times as long as what it is taken for.
const SLACK: usize = 4;

/// Buffers in use and on the shelf.
#[derive(Debug, Default)]
pub(super) struct BufferPool {
    free_buffers: Mutex<FreeBuffers>,
}

#[derive(Debug, Default)]
struct FreeBuffers {
    /// By length.
    free: BTreeMap<usize, Vec<Vec<f32>>>,
    free_bytes: u64,
    used_bytes: u64,
    used_bytes_max: u64,
    /// Most bytes that may be in use; `None` for no limit.
    limit_bytes: Option<u64>,
}

fn bytes_of(len: usize) -> u64 {
    4 * len as u64
}

impl FreeBuffers {
    /// The shortest free buffer of such a length.
    fn pop(&mut self, lengths: std::ops::RangeInclusive<usize>) -> Option<Vec<f32>> {
        let (&len, buffers) = self.free.range_mut(lengths).next()?;
        let values = buffers.pop();
        if buffers.is_empty() {
            self.free.remove(&len);
        }
        self.free_bytes -= values.as_ref().map_or(0, |_| bytes_of(len));
        values
    }

    fn bytes_max(&self) -> u64 {
        self.used_bytes_max + self.used_bytes_max / 4
    }
}

impl BufferPool {
    /// A buffer whose contents are not defined: in debug builds NaN, so that a read before a write is seen.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<CpuFloats> {
        self.take_up_to(len, len.saturating_mul(SLACK))
    }

    /// The same, with nothing behind the elements that are asked for.
    pub(super) fn take_exact(self: &Arc<Self>, len: usize) -> Result<CpuFloats> {
        self.take_up_to(len, len)
    }

    fn take_up_to(self: &Arc<Self>, len: usize, longest: usize) -> Result<CpuFloats> {
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes_of(len) as usize;
        let none = Error::out_of_memory(bytes, free_buffers.used_bytes);
        if free_buffers
            .limit_bytes
            .is_some_and(|limit| free_buffers.used_bytes.saturating_add(bytes_of(len)) > limit)
        {
            return Err(none);
        }
        let mut values = free_buffers.pop(len..=longest).unwrap_or_default();
        if values.len() < len {
            values.try_reserve_exact(len).map_err(|_| none)?;
            values.resize(len, 0.0);
        }
        free_buffers.used_bytes += bytes_of(values.len());
        free_buffers.used_bytes_max = free_buffers.used_bytes_max.max(free_buffers.used_bytes);
        drop(free_buffers);
        if cfg!(debug_assertions) {
            values[..len].fill(f32::NAN);
        }
        Ok(CpuFloats { values, len, pool: Arc::clone(self) })
    }

    fn give_back(&self, values: Vec<f32>) {
        let mut free_buffers = self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes_of(values.len());
        free_buffers.used_bytes -= bytes;
        free_buffers.free_bytes += bytes;
        free_buffers.free.entry(values.len()).or_default().push(values);
        while free_buffers.used_bytes + free_buffers.free_bytes > free_buffers.bytes_max() {
            if free_buffers.pop(0..=usize::MAX).is_none() {
                break;
            }
        }
    }

    /// Sets the most bytes that may be in use; what is in use stays.
    pub(super) fn limit(&self, bytes: u64) {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner).limit_bytes = Some(bytes);
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.free_buffers.lock().unwrap_or_else(PoisonError::into_inner).used_bytes
    }
}

/// Numbers of the CPU device: a slice.
#[derive(Debug)]
pub struct CpuFloats {
    /// At least `len` elements.
    values: Vec<f32>,
    len: usize,
    pool: Arc<BufferPool>,
}

impl Buffer for CpuFloats {
    fn len(&self) -> usize {
        self.len
    }
}

impl Buffer for Vec<u32> {
    fn len(&self) -> usize {
        Vec::len(self)
    }
}

impl Deref for CpuFloats {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl DerefMut for CpuFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.len]
    }
}

impl Drop for CpuFloats {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.values));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_buffers_are_used_again_and_the_shelf_is_bounded() {
        let pool = Arc::new(BufferPool::default());
        let (first, second) = (pool.take(1000).unwrap(), pool.take(10).unwrap());
        let place = first.as_ptr();
        drop(first);
        assert_eq!(pool.used_bytes(), 40);
        assert_eq!(pool.take(1000).unwrap().as_ptr(), place);
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
    fn a_buffer_serves_shorter_lengths_and_what_stays_has_its_own() {
        let pool = Arc::new(BufferPool::default());
        let long = pool.take(1000).unwrap();
        let place = long.as_ptr();
        drop(long);
        let shorter = pool.take(250).unwrap();
        assert_eq!((shorter.as_ptr(), shorter.len(), Buffer::len(&shorter)), (place, 250, 250));
        assert_eq!(pool.used_bytes(), 4000, "all of the buffer is in use");
        drop(shorter);
        assert_ne!(pool.take(249).unwrap().as_ptr(), place);
        let exact = pool.take_exact(250).unwrap();
        assert!(exact.as_ptr() != place && exact.values.len() == 250);
    }

    #[test]
    fn microbatches_of_any_order_find_memory_that_was_touched() {
        let pool = Arc::new(BufferPool::default());
        let step = |tokens: usize| {
            let buffers = [8, 64, 16, 64].map(|width| pool.take(tokens * width).unwrap());
            buffers.iter().map(|buffer| buffer.as_ptr() as usize).collect::<std::collections::BTreeSet<_>>()
        };
        let longest = step(400);
        for tokens in [250, 399, 201, 320, 400, 222] {
            assert!(step(tokens).is_subset(&longest), "{tokens}");
        }
    }
}
