//! Typed elements with a shape, which are message content, and the pool of buffers to receive them in.

use std::fmt;
use std::sync::PoisonError;

use half::bf16;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::sync::Mutex;

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

pub(crate) use each_type;

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
