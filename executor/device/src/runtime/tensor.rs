//! Tensors: exclusive ranges in device memory, and buckets with several tensors in the same allocation.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::device_runtime::{Memory, Runtime};
use crate::dtype::Dtype;

/// Range in a device allocation.
///
/// The caller knows the shape. No two tensors overlap: [`split`](Self::split) and [`join`](Self::join)
/// consume the inputs, so `&mut Tensor` is exclusive access to the elements.
pub struct Tensor<D: Runtime> {
    memory: Arc<D::Memory>,
    first: usize,
    len: usize,
}

impl<D: Runtime> Tensor<D> {
    /// Creates a tensor from the first `len` elements in an allocation.
    ///
    /// # Panics
    /// If the allocation is shorter.
    #[must_use]
    pub fn new(memory: D::Memory, len: usize) -> Self {
        assert!(len <= memory.len(), "a tensor lies in its allocation");
        Self { memory: Arc::new(memory), first: 0, len }
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the tensor has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.memory.dtype()
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.len * self.dtype().bytes()) as u64
    }

    /// Returns the allocation that contains the elements, for device implementations.
    #[must_use]
    pub fn memory(&self) -> &Arc<D::Memory> {
        &self.memory
    }

    /// Returns the element range in the allocation, for device implementations.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.first..self.first + self.len
    }

    /// Returns the allocation if no other tensor is in it.
    ///
    /// # Errors
    /// The tensor itself, if there is another tensor.
    pub fn into_memory(self) -> Result<D::Memory, Self> {
        let Self { memory, first, len } = self;
        Arc::try_unwrap(memory).map_err(|memory| Self { memory, first, len })
    }

    /// Splits the tensor into consecutive ranges with these lengths.
    ///
    /// # Panics
    /// If the lengths do not add up to the tensor length.
    #[must_use]
    pub fn split(self, lens: &[usize]) -> Vec<Self> {
        assert_eq!(lens.iter().sum::<usize>(), self.len, "the ranges cover the tensor");
        let mut first = self.first;
        let mut next = |&len: &usize| {
            first += len;
            Self { memory: Arc::clone(&self.memory), first: first - len, len }
        };
        lens.iter().map(&mut next).collect()
    }

    /// Joins consecutive ranges in the same allocation: the inverse of [`split`](Self::split).
    ///
    /// # Panics
    /// If there are no ranges, or they are not consecutive in the same allocation.
    #[must_use]
    pub fn join(parts: Vec<Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().expect("at least one tensor is united");
        for part in parts {
            let follows = Arc::ptr_eq(&whole.memory, &part.memory) && part.first == whole.range().end;
            assert!(follows, "united tensors follow each other in one allocation");
            whole.len += part.len;
        }
        whole
    }
}

impl<D: Runtime> fmt::Debug for Tensor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {:?})", self.dtype(), self.range())
    }
}

/// Consecutive tensors in the same allocation, so that a single operation or message covers all of them.
pub struct Bucket<D: Runtime> {
    parts: Vec<Tensor<D>>,
}

impl<D: Runtime> Bucket<D> {
    /// Splits an allocation into tensors with these lengths.
    ///
    /// # Panics
    /// If the lengths do not add up to the tensor length.
    #[must_use]
    pub fn new(whole: Tensor<D>, lens: &[usize]) -> Self {
        Self { parts: whole.split(lens) }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.iter().map(Tensor::len).sum()
    }

    /// Returns whether the bucket has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the tensors in range order.
    #[must_use]
    pub fn parts(&self) -> &[Tensor<D>] {
        &self.parts
    }

    /// Returns the mutable tensors in range order.
    pub fn parts_mut(&mut self) -> &mut [Tensor<D>] {
        &mut self.parts
    }

    /// Takes the complete allocation out, and leaves a bucket without elements; [`close`](Self::close)
    /// restores it.
    ///
    /// # Panics
    /// If a tensor was replaced by a tensor in a different allocation.
    pub fn open(&mut self) -> (Tensor<D>, Vec<usize>) {
        let lens = self.parts.iter().map(Tensor::len).collect();
        (Tensor::join(std::mem::take(&mut self.parts)), lens)
    }

    /// Restores the allocation that [`open`](Self::open) took out.
    pub fn close(&mut self, whole: Tensor<D>, lens: &[usize]) {
        self.parts = whole.split(lens);
    }

    /// Calls an operation on all elements as a single tensor.
    ///
    /// # Errors
    /// Errors from the operation.
    pub fn with_whole<R, E>(&mut self, run: impl FnOnce(&mut Tensor<D>) -> Result<R, E>) -> Result<R, E> {
        let (mut whole, lens) = self.open();
        let result = run(&mut whole);
        self.close(whole, &lens);
        result
    }
}
