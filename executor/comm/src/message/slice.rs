//! Borrowed elements that a collective changes in place, and their division into a part per rank.

use std::ops::Range;

use half::bf16;

use super::payload::{Buffer, each_type};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

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
