//! Memory of the CPU device: buffers that go back to a shelf of their length when they are dropped.
//!
//! A training step asks for the same lengths again and again, and pages that were touched before cost nothing. What
//! lies on the shelf is bounded: by the largest number of bytes that were in use at the same time.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::Buffer;
use crate::error::{Error, Result};

/// Buffers in use and on the shelf.
#[derive(Debug, Default)]
pub(super) struct Memory {
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    /// By length.
    free: BTreeMap<usize, Vec<Vec<f32>>>,
    free_bytes: u64,
    used_bytes: u64,
    used_bytes_max: u64,
}

fn bytes_of(len: usize) -> u64 {
    4 * len as u64
}

impl Memory {
    /// A buffer whose contents are not defined: in debug builds NaN, so that a read before a write is seen.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<CpuFloats> {
        let mut values = self.take_any(len)?;
        if cfg!(debug_assertions) {
            values.fill(f32::NAN);
        }
        Ok(CpuFloats { values, memory: Arc::clone(self) })
    }

    fn take_any(&self, len: usize) -> Result<Vec<f32>> {
        let mut shelf = self.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        let free = shelf.free.get_mut(&len).and_then(Vec::pop);
        let values = if let Some(values) = free {
            shelf.free_bytes -= bytes_of(len);
            values
        } else {
            let mut values = Vec::new();
            let bytes = bytes_of(len) as usize;
            values.try_reserve_exact(len).map_err(|_| Error::Memory { bytes, used: shelf.used_bytes })?;
            values.resize(len, 0.0);
            values
        };
        shelf.used_bytes += bytes_of(len);
        shelf.used_bytes_max = shelf.used_bytes_max.max(shelf.used_bytes);
        Ok(values)
    }

    fn give_back(&self, values: Vec<f32>) {
        let mut shelf = self.shelf.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes_of(values.len());
        shelf.used_bytes -= bytes;
        if shelf.used_bytes + shelf.free_bytes + bytes <= shelf.used_bytes_max {
            shelf.free_bytes += bytes;
            shelf.free.entry(values.len()).or_default().push(values);
        } else {
            shelf.free.clear();
            shelf.free_bytes = 0;
        }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner).used_bytes
    }
}

/// Numbers of the CPU device: a slice.
#[derive(Debug)]
pub struct CpuFloats {
    values: Vec<f32>,
    memory: Arc<Memory>,
}

impl Buffer for CpuFloats {
    fn len(&self) -> usize {
        self.values.len()
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
        &self.values
    }
}

impl DerefMut for CpuFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for CpuFloats {
    fn drop(&mut self) {
        self.memory.give_back(std::mem::take(&mut self.values));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_buffers_are_used_again_and_the_shelf_is_bounded() {
        let memory = Arc::new(Memory::default());
        let (first, second) = (memory.take(1000).unwrap(), memory.take(10).unwrap());
        let place = first.as_ptr();
        drop(first);
        assert_eq!(memory.used_bytes(), 40);
        assert_eq!(memory.take(1000).unwrap().as_ptr(), place);
        drop(second);
        for len in 1..500 {
            drop(memory.take(len).unwrap());
            let shelf = memory.shelf.lock().unwrap();
            assert!(shelf.used_bytes + shelf.free_bytes <= 4040);
        }
        assert!(matches!(memory.take(usize::MAX / 8), Err(Error::Memory { .. })));
        assert_eq!(memory.used_bytes(), 0);
    }
}
