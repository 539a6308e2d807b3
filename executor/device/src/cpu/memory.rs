//! CPU device memory, and tensor slices.
//!
//! CPU device buffer pool: dropped buffers return to the pool and are reused.
//!
//! Tensors in the same allocation never overlap ([`Tensor`]), so a shared tensor is a slice and an exclusive
//! tensor a mutable slice, although they share an allocation. Only this file relies on that.
//!
//! Reused pages cost no page faults, and a training step allocates nearly the same buffers again and again,
//! with different lengths whenever a microbatch has a different number of tokens. A buffer therefore serves
//! every length down to a quarter of its length; the smallest sufficient buffer is used. Uploads, in
//! particular parameters, get buffers with the exact length, because they may stay. The pool is bounded: used
//! and free buffers together hold at most a quarter more bytes than the used-bytes peak. The shortest free
//! buffers are released first, as they are the cheapest to allocate again.
#![expect(unsafe_code, reason = "disjoint ranges of one allocation are mutable at the same time")]
use super::Cpu;
use crate::error::{Error, Result};
use crate::runtime::{Dtype, Memory, Tensor};
use half::bf16;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// CPU device allocation.
pub struct CpuMemory {
    elements: Elements,
    pool: Arc<BufferPool>,
}

/// Elements by type.
enum Elements {
    F32(Cells<f32>),
    Bf16(Cells<bf16>),
    F64(Cells<f64>),
    U32(Cells<u32>),
}

/// Vector that is accessed through tensor ranges.
struct Cells<T> {
    pointer: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: the cells own their elements like the vector they were created from, and every access goes through
// a tensor: a shared tensor reads, an exclusive tensor reads and writes only its range.
unsafe impl<T: Send> Send for Cells<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Cells<T> {}

impl<T> Cells<T> {
    fn new(values: Vec<T>) -> Self {
        let mut values = ManuallyDrop::new(values);
        let (len, capacity) = (values.len(), values.capacity());
        // SAFETY: a vector's pointer is never null.
        let pointer = unsafe { NonNull::new_unchecked(values.as_mut_ptr()) };
        Self { pointer, len, capacity }
    }

    fn take(&mut self) -> Vec<T> {
        let taken = std::mem::replace(self, Self::new(Vec::new()));
        let taken = ManuallyDrop::new(taken);
        // SAFETY: the three parts come from a vector, which nothing else owns any more.
        unsafe { Vec::from_raw_parts(taken.pointer.as_ptr(), taken.len, taken.capacity) }
    }
}

impl<T> Drop for Cells<T> {
    fn drop(&mut self) {
        // SAFETY: as in `take`; it is not used again.
        drop(unsafe { Vec::from_raw_parts(self.pointer.as_ptr(), self.len, self.capacity) });
    }
}

impl BufferPool {
    /// Takes a buffer of unspecified contents: NaN in debug builds, so that a read before a write is noticed.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Result<CpuMemory> {
        let values = self.take_up_to(len, len.saturating_mul(SLACK))?;
        Ok(CpuMemory::f32(values, Arc::clone(self)))
    }

    /// Takes a buffer with exactly this length.
    pub(super) fn take_exact(self: &Arc<Self>, len: usize) -> Result<CpuMemory> {
        let values = self.take_up_to(len, len)?;
        Ok(CpuMemory::f32(values, Arc::clone(self)))
    }

    /// Takes a vector allocated outside the pool as a used buffer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if it exceeds the limit.
    pub(super) fn adopt(self: &Arc<Self>, values: Vec<f32>) -> Result<CpuMemory> {
        self.own(&values)?;
        Ok(CpuMemory::f32(values, Arc::clone(self)))
    }
}

impl CpuMemory {
    pub(super) fn f32(values: Vec<f32>, pool: Arc<BufferPool>) -> Self {
        Self { elements: Elements::F32(Cells::new(values)), pool }
    }

    pub(super) fn bf16(values: Vec<bf16>, pool: Arc<BufferPool>) -> Self {
        Self { elements: Elements::Bf16(Cells::new(values)), pool }
    }

    pub(super) fn f64(values: Vec<f64>, pool: Arc<BufferPool>) -> Self {
        Self { elements: Elements::F64(Cells::new(values)), pool }
    }

    pub(super) fn u32(values: Vec<u32>, pool: Arc<BufferPool>) -> Self {
        Self { elements: Elements::U32(Cells::new(values)), pool }
    }

    /// Moves `f32` elements out of the device; returns none for other types.
    pub(super) fn into_f32(mut self) -> Vec<f32> {
        let Elements::F32(cells) = &mut self.elements else { return Vec::new() };
        let values = cells.take();
        self.pool.disown(&values);
        values
    }

    #[cfg(test)]
    pub(super) fn address(&self) -> usize {
        match &self.elements {
            Elements::F32(cells) => cells.pointer.as_ptr() as usize,
            _ => 0,
        }
    }
}

impl Memory for CpuMemory {
    fn len(&self) -> usize {
        match &self.elements {
            Elements::F32(cells) => cells.len,
            Elements::Bf16(cells) => cells.len,
            Elements::F64(cells) => cells.len,
            Elements::U32(cells) => cells.len,
        }
    }

    fn dtype(&self) -> Dtype {
        match &self.elements {
            Elements::F32(_) => Dtype::F32,
            Elements::Bf16(_) => Dtype::Bf16,
            Elements::F64(_) => Dtype::F64,
            Elements::U32(_) => Dtype::U32,
        }
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        match &mut self.elements {
            Elements::F32(cells) => self.pool.give_back(cells.take()),
            Elements::Bf16(cells) => self.pool.release(2 * cells.len as u64),
            Elements::F64(cells) => self.pool.release(8 * cells.len as u64),
            Elements::U32(cells) => self.pool.release(4 * cells.len as u64),
        }
    }
}

/// Defines tensor slices by element type.
macro_rules! slices {
    ($($kind:ident, $type:ty, $shared:ident, $exclusive:ident;)*) => {
        impl Tensor<Cpu> {$(
            /// Returns the elements of a tensor with this type.
            ///
            /// # Panics
            /// If the elements have a different type.
            pub(crate) fn $shared(&self) -> &[$type] {
                let Elements::$kind(cells) = &self.memory().elements else { self.other(Dtype::$kind) };
                let range = self.range();
                assert!(range.end <= cells.len, "a tensor lies in its allocation");
                // SAFETY: the range is in the allocation, which lives as long as the tensor. No other tensor
                // overlaps it, and while this tensor is borrowed, nothing writes to it.
                unsafe { std::slice::from_raw_parts(cells.pointer.as_ptr().add(range.start), range.len()) }
            }

            /// Returns the mutable elements of a tensor with this type.
            ///
            /// # Panics
            /// If the elements have a different type.
            pub(crate) fn $exclusive(&mut self) -> &mut [$type] {
                let range = self.range();
                let Elements::$kind(cells) = &self.memory().elements else { self.other(Dtype::$kind) };
                assert!(range.end <= cells.len, "a tensor lies in its allocation");
                // SAFETY: as above, and the tensor is borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(cells.pointer.as_ptr().add(range.start), range.len()) }
            }
        )*}
    };
}

slices! {
    F32, f32, f32, f32_mut;
    Bf16, bf16, bf16, bf16_mut;
    F64, f64, f64, f64_mut;
    U32, u32, u32, u32_mut;
}

impl Tensor<Cpu> {
    fn other(&self, expected: Dtype) -> ! {
        panic!("expected elements of {expected:?}, found {:?}", self.dtype())
    }
}

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
    use super::{CpuMemory, *};
    use crate::runtime::Memory;
    use std::sync::Arc;

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
