//! Defines errors that occur while decoding and probing a field.

use crate::error::BoxError;

/// Reason why the bytes of a field are not a valid medium.
///
/// The field's sample is bad, except for [`PrefixTooShort`](Self::PrefixTooShort), which asks for more bytes.
/// Offsets count from the first byte of the field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum DecodeError {
    /// The file may be valid, but no decoder in this crate reads it.
    #[error("unsupported {format}: {reason}")]
    Unsupported { format: &'static str, reason: String },
    /// The bytes violate the format specification.
    #[error("malformed {format} at byte {offset}: {reason}")]
    Malformed { format: &'static str, offset: u64, reason: String },
    /// The bytes, or their coded content, end before the medium is complete.
    #[error("truncated {format}: it ends too early, at byte {offset}")]
    Truncated { format: &'static str, offset: u64 },
    /// The decoder rejected the bytes without reporting an offset.
    #[error("could not decode {format}")]
    Codec { format: &'static str, source: BoxError },
    /// The medium exceeds a size limit; no memory of that size was allocated.
    #[error("{format} of {actual} {unit} exceeds `{limit}` = {limit_value}")]
    TooLarge { format: &'static str, actual: u64, unit: &'static str, limit: &'static str, limit_value: u64 },
    /// Probing only: the header continues after the available bytes; retry with the whole field.
    #[error("the header is longer than the {prefix_bytes} available bytes; retry with the whole field")]
    PrefixTooShort { prefix_bytes: u64 },
}

impl DecodeError {
    pub(crate) fn malformed(format: &'static str, offset: usize, reason: impl Into<String>) -> Self {
        Self::Malformed { format, offset: offset as u64, reason: reason.into() }
    }

    pub(crate) fn truncated(format: &'static str, offset: usize) -> Self {
        Self::Truncated { format, offset: offset as u64 }
    }

    pub(crate) fn unsupported(format: &'static str, reason: impl Into<String>) -> Self {
        Self::Unsupported { format, reason: reason.into() }
    }

    /// Creates the error for a decoder that reports no offset.
    pub fn codec(format: &'static str, source: impl Into<BoxError>) -> Self {
        Self::Codec { format, source: source.into() }
    }
}
