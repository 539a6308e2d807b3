//! Owns array memory, with address and value type.

#![expect(unsafe_code, reason = "memory is shared by its address")]

use std::ffi::{CStr, c_void};

use bytes::Bytes;
use dflop_loader::decode::Tensor;
use dflop_loader::media::PixelType;

/// Memory that Rust allocated and hands over as a whole.
#[derive(Debug)]
pub(crate) enum Owner {
    /// Image batch, whose memory returns to a pool.
    Pixels(Tensor),
    /// Model inputs, PCM.
    F32(Vec<f32>),
    /// Pixels in half precision.
    Bf16(Vec<half::bf16>),
    /// Token ids, positions, masks.
    I64(Vec<i64>),
    /// Sequence boundaries.
    I32(Vec<i32>),
    /// Timestamps.
    F64(Vec<f64>),
    /// Image and video pixels.
    U8(Vec<u8>),
    /// Undecoded field, possibly a view of a mapped file.
    Stored(Bytes),
}

/// Value type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueType {
    pub(crate) name: &'static str,
    /// Format character in the `struct` module.
    pub(crate) format: &'static CStr,
    pub(crate) bytes: usize,
    /// `DLDataTypeCode`: 0 signed, 1 unsigned, 2 floating point, 4 bfloat.
    pub(crate) code: u8,
}

const F32: ValueType = ValueType { name: "float32", format: c"f", bytes: 4, code: 2 };
/// The buffer protocol has no bfloat, so buffer consumers get the bits.
const BF16: ValueType = ValueType { name: "bfloat16", format: c"H", bytes: 2, code: 4 };
const F64: ValueType = ValueType { name: "float64", format: c"d", bytes: 8, code: 2 };
const I64: ValueType = ValueType { name: "int64", format: c"q", bytes: 8, code: 0 };
const I32: ValueType = ValueType { name: "int32", format: c"i", bytes: 4, code: 0 };
const U8: ValueType = ValueType { name: "uint8", format: c"B", bytes: 1, code: 1 };

/// Memory with an address, shared by all views.
#[derive(Debug)]
pub(crate) struct Storage {
    /// Keeps the memory alive.
    _owner: Owner,
    pub(crate) start: *mut c_void,
    pub(crate) bytes: usize,
    pub(crate) value_type: ValueType,
    pub(crate) is_readonly: bool,
}

// SAFETY: the owner may be moved and shared between threads, and the memory stays in place. Races between
// writes through Python's views are up to the writers, as for every array in Python.
unsafe impl Send for Storage {}
// SAFETY: the same as for `Send`.
unsafe impl Sync for Storage {}

impl Storage {
    pub(crate) fn new(mut owner: Owner) -> Self {
        fn place<T>(values: &mut [T]) -> (*mut c_void, usize) {
            (values.as_mut_ptr().cast(), size_of_val(values))
        }
        let ((start, bytes), value_type) = match &mut owner {
            Owner::Pixels(tensor) => {
                let value_type = match tensor.pixel_type() {
                    PixelType::Float32 => F32,
                    PixelType::BFloat16 => BF16,
                    PixelType::UInt8 => U8,
                };
                (place(tensor.bytes_mut()), value_type)
            }
            Owner::F32(values) => (place(values), F32),
            Owner::Bf16(values) => (place(values), BF16),
            Owner::I64(values) => (place(values), I64),
            Owner::I32(values) => (place(values), I32),
            Owner::F64(values) => (place(values), F64),
            Owner::U8(values) => (place(values), U8),
            Owner::Stored(stored) => ((stored.as_ptr().cast_mut().cast(), stored.len()), U8),
        };
        let is_readonly = matches!(owner, Owner::Stored(_));
        Self { _owner: owner, start, bytes, value_type, is_readonly }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the owner keeps `bytes` bytes there; the values are plain numbers.
        unsafe { std::slice::from_raw_parts(self.start.cast_const().cast(), self.bytes) }
    }
}
