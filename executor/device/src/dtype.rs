//! Tensor element types.

/// Tensor element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "variants are named as the types")]
pub enum Dtype {
    F32,
    Bf16,
    F64,
    U32,
}

impl Dtype {
    /// Returns the element size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::F64 => 8,
        }
    }
}
