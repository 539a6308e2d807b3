//! Typed elements with a shape: the content of a message.

use super::dtype::Dtype;
use super::error::{Error, Result};
use half::bf16;
use std::fmt;

/// Type, rows and columns of a message. The receiver states it, as both sides know the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadShape {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Rows; tokens, for activations.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl PayloadShape {
    /// Shape of an f32 matrix.
    #[must_use]
    pub fn f32(rows: usize, cols: usize) -> Self {
        Self { dtype: Dtype::F32, rows, cols }
    }

    /// Shape of one row of elements.
    #[must_use]
    pub fn flat(dtype: Dtype, elements: usize) -> Self {
        Self { dtype, rows: 1, cols: elements }
    }

    /// Number of elements, or `None` if `rows * cols` overflows.
    #[must_use]
    pub fn elements(&self) -> Option<usize> {
        self.rows.checked_mul(self.cols)
    }

    /// Size of all elements in bytes, or `None` on overflow.
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
/// variant with a handle of its device; a transport refuses variants that it does not know.
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

/// Evaluates an expression on the elements of a [`Buffer`] or [`Slice`](super::Slice) of any type.
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
pub(super) use each_type;

impl Buffer {
    /// Makes elements of value zero.
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

    /// Appends zeros up to a length; fails without memory for them.
    pub(super) fn grow(
        &mut self,
        length: usize,
    ) -> std::result::Result<(), std::collections::TryReserveError> {
        each_type!(Self, self, elements => {
            elements.try_reserve(length.saturating_sub(elements.len()))?;
            elements.resize(length, bytemuck::Zeroable::zeroed());
            Ok(())
        })
    }

    /// Type of the elements.
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

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        each_type!(Self, self, elements => elements.len())
    }

    /// Bytes of the elements, little-endian.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice(elements))
    }

    /// Mutable bytes of the elements.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        each_type!(Self, self, elements => bytemuck::cast_slice_mut(elements))
    }
}

/// Owned elements with a shape: one message.
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

    /// Makes one row of elements.
    #[must_use]
    pub fn flat(buffer: Buffer) -> Self {
        Self { shape: PayloadShape::flat(buffer.dtype(), buffer.elements()), buffer }
    }

    /// Type, rows and columns.
    #[must_use]
    pub fn shape(&self) -> PayloadShape {
        self.shape
    }

    /// Elements of the message.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Takes the elements out.
    #[must_use]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// Takes f32 elements out, or returns `None` for another type.
    #[must_use]
    pub fn into_f32(self) -> Option<Vec<f32>> {
        match self.buffer {
            Buffer::F32(elements) => Some(elements),
            _ => None,
        }
    }

    /// Takes bf16 elements out, or returns `None` for another type.
    #[must_use]
    pub fn into_bf16(self) -> Option<Vec<bf16>> {
        match self.buffer {
            Buffer::Bf16(elements) => Some(elements),
            _ => None,
        }
    }

    /// Takes plain bytes out, or returns `None` for another type.
    #[must_use]
    pub fn into_bytes(self) -> Option<Vec<u8>> {
        match self.buffer {
            Buffer::U8(elements) => Some(elements),
            _ => None,
        }
    }
}
