//! Defines named tensors, which are keyword arguments for a model, and the tensors of a microbatch.

use half::bf16;

use crate::media::PixelBuffer;

/// Tensor values, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorValues {
    /// Ids, positions, masks and counts.
    I64(Vec<i64>),
    /// Pixels and mel values.
    F32(Vec<f32>),
    /// Pixels in half precision.
    Bf16(Vec<bf16>),
    /// Unnormalized pixels.
    U8(Vec<u8>),
}

impl TensorValues {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
        }
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the name of the value type: `int64`, `float32`, `bfloat16` or `uint8`.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::I64(_) => "int64",
            Self::F32(_) => "float32",
            Self::Bf16(_) => "bfloat16",
            Self::U8(_) => "uint8",
        }
    }
}

impl From<PixelBuffer> for TensorValues {
    fn from(pixels: PixelBuffer) -> Self {
        match pixels {
            PixelBuffer::F32(values) => Self::F32(values),
            PixelBuffer::Bf16(values) => Self::Bf16(values),
            PixelBuffer::U8(values) => Self::U8(values),
        }
    }
}

/// Tensor with a keyword argument name.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Keyword argument of the model's forward pass.
    pub name: &'static str,
    /// Axis lengths.
    pub shape: Vec<usize>,
    /// Values, as many as the product of `shape`.
    pub values: TensorValues,
}

impl NamedTensor {
    /// Creates a tensor from values and a shape.
    ///
    /// # Panics
    /// If the number of values does not match the shape, which is a bug in the caller.
    #[must_use]
    pub fn new(name: &'static str, shape: Vec<usize>, values: TensorValues) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "`{name}` of shape {shape:?}");
        Self { name, shape, values }
    }

    /// Creates an integer tensor.
    ///
    /// # Panics
    /// If the number of values does not match the shape.
    #[must_use]
    pub fn ints(name: &'static str, shape: Vec<usize>, values: Vec<i64>) -> Self {
        Self::new(name, shape, TensorValues::I64(values))
    }
}

/// Microbatch tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInputs {
    /// Keyword arguments for the model: `input_ids`, `labels`, `position_ids` or `attention_mask`, and media.
    pub tensors: Vec<NamedTensor>,
    /// First token of every sample in packed order, then the number of tokens: `[samples + 1]`. Padded
    /// tensors have the same cumulative lengths. Blank media, and padding to a fixed row length, are
    /// additional sequences after the samples.
    pub cu_seqlens: Vec<i32>,
    /// Number of tokens in the longest sequence in `cu_seqlens`.
    pub max_seqlen: u32,
    /// Number of tokens in all samples, without padding.
    pub tokens: u64,
    /// Number of tokens in the loss: labels that are not -100.
    pub target_tokens: u64,
}

impl ModelInputs {
    /// Returns a tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&NamedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
