//! Types of pixel values: normalized in single or half precision, or bytes for a device to normalize; and
//! their order in memory.

use bytemuck::Pod;
use half::bf16;

/// Type of pixel values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelType {
    /// Normalized, in single precision, as the Hugging Face processors make them.
    #[default]
    Float32,
    /// Normalized, rounded to the nearest bfloat16: half the memory.
    BFloat16,
    /// Resized bytes, not normalized: a quarter of the memory.
    UInt8,
}

impl PixelType {
    /// Returns the bytes of a value.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::BFloat16 => 2,
            Self::UInt8 => 1,
        }
    }
}

/// Order of the axes of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `[3, height, width]`, as PyTorch's models take images.
    #[default]
    ChannelsFirst,
    /// `[height, width, 3]`, as JAX and TensorFlow, and PyTorch's `channels_last`, have them in memory.
    ChannelsLast,
}

/// Type and order of the values of images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PixelFormat {
    /// Type of a value.
    pub pixels: PixelType,
    /// Order of the axes.
    pub layout: PixelLayout,
}

/// Pixel values of some type, row-major.
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

    /// Returns whether there are no values, as where an image was only counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes zeros of the same type.
    #[must_use]
    pub fn zeros(&self, len: usize) -> Self {
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::Bf16(_) => Self::Bf16(vec![bf16::ZERO; len]),
            Self::U8(_) => Self::U8(vec![0; len]),
        }
    }

    /// Returns the values in single precision; none if they are of another type.
    #[must_use]
    pub fn f32(&self) -> &[f32] {
        match self {
            Self::F32(values) => values,
            Self::Bf16(_) | Self::U8(_) => &[],
        }
    }
}

/// A pixel value; its default is the padding of tiles.
pub trait Pixel: Pod + Default + Send {
    /// Converts a byte, of which the normalized value is known.
    fn of(byte: u8, normalized: f32) -> Self;

    /// Wraps values of this type.
    fn buffer(values: Vec<Self>) -> PixelBuffer;

    /// Returns the values of a buffer of this type.
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
