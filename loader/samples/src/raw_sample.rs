//! Describes an undecoded sample and its fields.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::ImageSize;

/// Field of an undecoded sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawField {
    /// Part of the entry name after the key's dot, lower-cased, such as `jpg` or `seg.png`.
    pub extension: Arc<str>,
    /// Offset of the payload in the shard, after decompression.
    pub offset: u64,
    /// Length of the payload.
    pub bytes: u64,
    /// Payload; `None` if it exceeds the limit or was not read.
    pub payload: Option<Bytes>,
    /// Size of an image whose payload was not read, because only its size is needed.
    pub size: Option<ImageSize>,
}

/// Undecoded sample with its fields in shard order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawSample {
    /// Entry path up to the first dot of its file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Epoch of the sample, from 0.
    pub epoch: u64,
    /// The fields, in shard order; extensions are unique.
    pub fields: Vec<RawField>,
}

/// Identity of a sample within a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleId<'a> {
    /// URL of the shard; only its base name counts.
    pub shard: &'a str,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Key of the sample.
    pub key: &'a str,
}

impl RawSample {
    /// Returns the identity of the sample within its dataset.
    #[must_use]
    pub fn id(&self) -> SampleId<'_> {
        SampleId { shard: &self.shard, offset: self.offset, key: &self.key }
    }

    /// Returns the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&RawField> {
        self.fields.iter().find(|field| &*field.extension == extension)
    }

    /// Returns the payload bytes of all fields.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|field| field.bytes).fold(0, u64::saturating_add)
    }
}
