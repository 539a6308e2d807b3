//! Pixel value types: normalized in single or half precision, or bytes for a device to normalize; and the
//! memory order.

use bytemuck::Pod;
use half::bf16;

/// Pixel value type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelType {
    /// Normalized, in single precision, as from the Hugging Face processors.
    #[default]
    Float32,
    /// Normalized, rounded to the nearest bfloat16: half the memory.
    BFloat16,
    /// Resized bytes, not normalized: a quarter of the memory.
    UInt8,
}

impl PixelType {
    /// Returns the bytes per value.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 => 2,
            Self::UInt8 => 1,
        }
    }
}

/// Axis order of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `[3, height, width]`, as PyTorch models accept images.
    #[default]
    ChannelsFirst,
    /// `[height, width, 3]`, the memory order in JAX, TensorFlow, and PyTorch's `channels_last`.
    ChannelsLast,
}

/// Value type and memory order for images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PixelFormat {
    /// Value type.
    pub pixels: PixelType,
    /// Axis order.
    pub layout: PixelLayout,
}

/// Pixel values with any type, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum PixelBuffer {
    /// Normalized, in single precision.
    F32(Vec<f32>),
    /// Normalized, rounded to half the bits.
    Bf16(Vec<bf16>),
    /// Bytes.
    U8(Vec<u8>),
}

impl Default for PixelBuffer {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

impl PixelBuffer {
    /// Returns the number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
        }
    }

    /// Returns whether there are no values, as for images that were only counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates zeros with the same type.
    #[must_use]
    pub fn zeros(&self, len: usize) -> Self {
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::Bf16(_) => Self::Bf16(vec![bf16::ZERO; len]),
            Self::U8(_) => Self::U8(vec![0; len]),
        }
    }

    /// Returns the values in single precision; empty for any other type.
    #[must_use]
    pub fn f32(&self) -> &[f32] {
        match self {
            Self::F32(values) => values,
            Self::Bf16(_) | Self::U8(_) => &[],
        }
    }
}

/// A pixel value; the default is the tile padding value.
pub trait Pixel: Pod + Default + Send {
    /// Converts a byte with a known normalized value.
    fn of(byte: u8, normalized: f32) -> Self;

    /// Wraps values of this type in a buffer.
    fn buffer(values: Vec<Self>) -> PixelBuffer;

    /// Returns the values from a buffer with this type.
    fn values(buffer: PixelBuffer) -> Option<Vec<Self>>;
}

impl Pixel for f32 {
    #[inline]
    fn of(_: u8, normalized: f32) -> Self {
        normalized
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::F32(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::F32(values) => Some(values),
            _ => None,
        }
    }
}

impl Pixel for bf16 {
    #[inline]
    fn of(_: u8, normalized: f32) -> Self {
        Self::from_f32(normalized)
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::Bf16(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::Bf16(values) => Some(values),
            _ => None,
        }
    }
}

impl Pixel for u8 {
    #[inline]
    fn of(byte: u8, _: f32) -> Self {
        byte
    }

    fn buffer(values: Vec<Self>) -> PixelBuffer {
        PixelBuffer::U8(values)
    }

    fn values(buffer: PixelBuffer) -> Option<Vec<Self>> {
        match buffer {
            PixelBuffer::U8(values) => Some(values),
            _ => None,
        }
    }
}
