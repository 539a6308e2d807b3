//! CPU device memory, and tensor slices.
//!
//! Tensors in the same allocation never overlap ([`Tensor`]), so a shared tensor is a slice and an exclusive
//! tensor a mutable slice, although they share an allocation. Only this file relies on that.
#![expect(unsafe_code, reason = "disjoint ranges of one allocation are mutable at the same time")]

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use half::bf16;

use super::Cpu;
use super::buffer_pool::{BufferPool, SLACK};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::runtime::{Memory, Tensor};

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
