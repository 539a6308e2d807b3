//! Message element types.

/// Message element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// Plain bytes.
    U8,
    /// 16-bit brain floating point.
    Bf16,
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point, for norms and losses.
    F64,
    /// 64-bit unsigned integers, for counts and digests.
    U64,
}

impl Dtype {
    /// Returns the element size in bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 | Self::U64 => 8,
        }
    }

    /// Returns the number of this type in a message header.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 3,
            Self::F64 => 4,
            Self::U64 => 5,
        }
    }

    /// Inverse of [`code`](Self::code).
    pub(super) fn from_code(code: u8) -> Option<Self> {
        [Self::U8, Self::Bf16, Self::F32, Self::F64, Self::U64].into_iter().find(|dtype| dtype.code() == code)
    }
}
