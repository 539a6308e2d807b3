//! Message content and headers, and the buffers and parts that content is kept in.

use crate::dtype::Dtype;
use crate::error::{Error, Result, StepContext};
use crate::sync::Mutex;
use half::bf16;
use std::fmt;
use std::ops::Range;
use std::sync::PoisonError;

/// Message type, rows and columns. The receiver states it, as both sides know the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadShape {
    /// Element type.
    pub dtype: Dtype,
    /// Number of rows; tokens, for activations.
    pub rows: usize,
    /// Number of elements in a row.
    pub cols: usize,
}

impl PayloadShape {
    /// Returns the shape for an f32 matrix.
    #[must_use]
    pub fn f32(rows: usize, cols: usize) -> Self {
        Self { dtype: Dtype::F32, rows, cols }
    }

    /// Returns the shape for a single row.
    #[must_use]
    pub fn flat(dtype: Dtype, elements: usize) -> Self {
        Self { dtype, rows: 1, cols: elements }
    }

    /// Returns the number of elements, or `None` if `rows * cols` overflows.
    #[must_use]
    pub fn elements(&self) -> Option<usize> {
        self.rows.checked_mul(self.cols)
    }

    /// Returns the size in bytes, or `None` on overflow.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        self.elements()?.checked_mul(self.dtype.bytes())
    }
}

impl fmt::Display for PayloadShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} [{} x {}]", self.dtype, self.rows, self.cols)
    }
}

/// Owned, typed elements.
///
/// Owned, so that a message can be in flight while the caller computes. A transport between devices adds a
/// variant with a device handle; a transport rejects unknown variants.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "variants are named as the types of `Dtype`")]
pub enum Buffer {
    U8(Vec<u8>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    U64(Vec<u64>),
}

/// Evaluates an expression on the elements in a [`Buffer`] or [`Slice`](crate::Slice) with any type.
macro_rules! each_type {
    ($kind:ident, $value:expr, $elements:ident => $then:expr) => {
        match $value {
            $kind::U8($elements) => $then,
            $kind::Bf16($elements) => $then,
            $kind::F32($elements) => $then,
            $kind::F64($elements) => $then,
            $kind::U64($elements) => $then,
        }
    };
}

impl Buffer {
    /// Creates zero elements.
    #[must_use]
    pub fn zeros(dtype: Dtype, elements: usize) -> Self {
        match dtype {
            Dtype::U8 => Self::U8(vec![0; elements]),
            Dtype::Bf16 => Self::Bf16(vec![bf16::ZERO; elements]),
            Dtype::F32 => Self::F32(vec![0.0; elements]),
            Dtype::F64 => Self::F64(vec![0.0; elements]),
            Dtype::U64 => Self::U64(vec![0; elements]),
        }
    }

    /// Appends zeros up to a length; fails if memory is exhausted.
    pub(crate) fn grow(
        &mut self,
        length: usize,
    ) -> std::result::Result<(), std::collections::TryReserveError> {
        each_type!(Self, self, elements => {
            elements.try_reserve(length.saturating_sub(elements.len()))?;
            elements.resize(length, bytemuck::Zeroable::zeroed());
            Ok(())
        })
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::U8(_) => Dtype::U8,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
            Self::U64(_) => Dtype::U64,
        }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        each_type!(Self, self, elements => elements.len())
    }

    /// Returns the element bytes, little-endian.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice(elements))
    }

    /// Returns the mutable element bytes.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice_mut(elements))
    }
}

/// Owned elements with a shape: the content of a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Payload {
    shape: PayloadShape,
    buffer: Buffer,
}

impl Payload {
    /// Joins elements and a shape.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not `rows * cols` elements.
    pub fn new(rows: usize, cols: usize, buffer: Buffer) -> Result<Self> {
        let shape = PayloadShape { dtype: buffer.dtype(), rows, cols };
        if shape.elements() != Some(buffer.elements()) {
            return Err(Error::Length { found: buffer.elements(), expected: shape.to_string() });
        }
        Ok(Self { shape, buffer })
    }

    /// Joins f32 elements with rows and columns.
    ///
    /// # Errors
    /// [`Error::Length`] if there are not `rows * cols` elements.
    pub fn f32(rows: usize, cols: usize, elements: Vec<f32>) -> Result<Self> {
        Self::new(rows, cols, Buffer::F32(elements))
    }

    /// Creates a single row of elements.
    #[must_use]
    pub fn flat(buffer: Buffer) -> Self {
        Self { shape: PayloadShape::flat(buffer.dtype(), buffer.elements()), buffer }
    }

    /// Returns type, rows and columns.
    #[must_use]
    pub fn shape(&self) -> PayloadShape {
        self.shape
    }

    /// Returns the message elements.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the elements.
    #[must_use]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// Returns the f32 elements, or `None` for a different type.
    #[must_use]
    pub fn into_f32(self) -> Option<Vec<f32>> {
        match self.buffer {
            Buffer::F32(elements) => Some(elements),
            _ => None,
        }
    }

    /// Returns the bf16 elements, or `None` for a different type.
    #[must_use]
    pub fn into_bf16(self) -> Option<Vec<bf16>> {
        match self.buffer {
            Buffer::Bf16(elements) => Some(elements),
            _ => None,
        }
    }

    /// Returns the plain bytes, or `None` for a different type.
    #[must_use]
    pub fn into_bytes(self) -> Option<Vec<u8>> {
        match self.buffer {
            Buffer::U8(elements) => Some(elements),
            _ => None,
        }
    }
}

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

/// Elements that a collective reads and writes in place.
///
/// Converted from a mutable slice by `into()`. A transport between devices adds a variant with a device
/// handle and a range.
#[derive(Debug)]
#[non_exhaustive]
#[expect(missing_docs, reason = "variants are named as the types of `Dtype`")]
pub enum Slice<'a> {
    U8(&'a mut [u8]),
    Bf16(&'a mut [bf16]),
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    U64(&'a mut [u64]),
}

impl Slice<'_> {
    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::U8(_) => Dtype::U8,
            Self::Bf16(_) => Dtype::Bf16,
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
            Self::U64(_) => Dtype::U64,
        }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        each_type!(Self, self, elements => elements.len())
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice(&elements[range]))
    }

    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice_mut(&mut elements[range]))
    }

    /// Copies a range into a buffer with the same type and length.
    pub(crate) fn copy_out(&self, range: Range<usize>, into: &mut Buffer) {
        into.as_bytes_mut().copy_from_slice(self.bytes(range));
    }

    /// Copies a buffer over a range with the same type and length.
    pub(crate) fn copy_in(&mut self, range: Range<usize>, from: &Buffer) {
        self.bytes_mut(range).copy_from_slice(from.as_bytes());
    }

    /// Adds a range to a buffer with the same type and length: `into += range`.
    ///
    /// # Errors
    /// [`Error::NotSummable`] for bytes and bf16, and if the types differ.
    pub(crate) fn add_to(&self, range: Range<usize>, into: &mut Buffer) -> Result<()> {
        match (self, into) {
            (Self::F32(from), Buffer::F32(into)) => add(into, &from[range], |a, b| a + b),
            (Self::F64(from), Buffer::F64(into)) => add(into, &from[range], |a, b| a + b),
            // wrapping, so that debug and release builds compute the same sums
            (Self::U64(from), Buffer::U64(into)) => add(into, &from[range], u64::wrapping_add),
            _ => return Err(Error::NotSummable { dtype: self.dtype() }),
        }
        Ok(())
    }
}

fn add<T: Copy>(into: &mut [T], from: &[T], sum: impl Fn(T, T) -> T) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = sum(*into, *from);
    }
}

macro_rules! from_slices {
    ($($kind:ident, $type:ty;)*) => {$(
        impl<'a> From<&'a mut [$type]> for Slice<'a> {
            fn from(elements: &'a mut [$type]) -> Self {
                Self::$kind(elements)
            }
        }
        impl From<Vec<$type>> for Buffer {
            fn from(elements: Vec<$type>) -> Self {
                Self::$kind(elements)
            }
        }
    )*};
}
from_slices! { U8, u8; Bf16, bf16; F32, f32; F64, f64; U64, u64; }

impl<'a> From<&'a mut Buffer> for Slice<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        match buffer {
            Buffer::U8(elements) => Self::U8(elements),
            Buffer::Bf16(elements) => Self::Bf16(elements),
            Buffer::F32(elements) => Self::F32(elements),
            Buffer::F64(elements) => Self::F64(elements),
            Buffer::U64(elements) => Self::U64(elements),
        }
    }
}

/// Divides `elements` into a part per rank; the first parts are longer by one if the division has a
/// remainder.
///
/// # Panics
/// If there are no ranks.
///
/// # Examples
/// ```
/// assert_eq!(dflop_comm::even_parts(7, 3), [3, 2, 2]);
/// ```
#[must_use]
pub fn even_parts(elements: usize, ranks: usize) -> Vec<usize> {
    assert!(ranks > 0, "no ranks");
    (0..ranks).map(|rank| elements / ranks + usize::from(rank < elements % ranks)).collect()
}

/// Returns the range for every part.
pub(crate) fn ranges(parts: &[usize], ranks: usize, elements: usize) -> Result<Vec<Range<usize>>> {
    // parts come from the caller: an overflow must not pass as a valid sum
    let sum = parts.iter().try_fold(0_usize, |sum, &part| sum.checked_add(part)).unwrap_or(usize::MAX);
    if parts.len() != ranks || sum != elements {
        return Err(Error::Parts { parts: parts.len(), sum, size: ranks, elements });
    }
    let mut begin = 0;
    let range = |&part: &usize| {
        begin += part;
        begin - part..begin
    };
    Ok(parts.iter().map(range).collect())
}

/// Operation that a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Point,
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Barrier,
    Split,
    Digest,
    Gather,
}

impl Op {
    const ALL: [Self; 9] = [
        Self::Point,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::Split,
        Self::Digest,
        Self::Gather,
    ];

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Point => "message",
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Digest => "comparison of digests",
            Self::Gather => "gather",
        }
    }
}

/// Properties on which sender and receiver must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Communicator.
    pub(crate) comm: u64,
    /// Operation.
    pub(crate) op: Op,
    /// Caller tag; for collectives, the collective number.
    pub(crate) tag: u64,
    /// Action of the sender.
    pub(crate) at: StepContext,
    /// Type, rows and columns.
    pub(crate) shape: PayloadShape,
}

impl Header {
    /// Returns whether a receiver that expects `self` may accept a message with the header `found`.
    pub(crate) fn admits(&self, found: &Self) -> bool {
        let place = |header: &Self| (header.op, header.at.step, header.at.microbatch, header.shape);
        place(self) == place(found)
    }

    /// Returns the queue key for messages with this header. Collectives are separate from caller tags.
    pub(crate) fn key(&self, from: usize) -> Key {
        Key { comm: self.comm, from, is_collective: self.op != Op::Point, tag: self.tag }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {} at {}", self.op.name(), self.tag, self.shape, self.at)
    }
}

/// Identifies a first-in, first-out message queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    comm: u64,
    from: usize,
    is_collective: bool,
    tag: u64,
}

/// Message that has arrived or is about to be sent.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) buffer: Buffer,
}
