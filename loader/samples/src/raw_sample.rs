//! Describes an undecoded sample and the sample's fields.

use std::sync::Arc;

use bytes::Bytes;
use dflop_costmodel::ImageSize;

/// Field in an undecoded sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawField {
    /// Part of the entry name after the key's dot, lower-cased, such as `jpg` or `seg.png`.
    pub extension: Arc<str>,
    /// Offset of the payload in the shard, after decompression.
    pub offset: u64,
    /// Length of the payload in bytes.
    pub bytes: u64,
    /// Payload; `None` if the payload exceeds the limit or was not read.
    pub payload: Option<Bytes>,
    /// Image size, if the payload was not read, because only the size is needed.
    pub size: Option<ImageSize>,
}

/// Undecoded sample with fields in shard order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawSample {
    /// Entry path up to the first dot in the file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample epoch, from 0.
    pub epoch: u64,
    /// The fields, in shard order; extensions are unique.
    pub fields: Vec<RawField>,
}

/// Sample identity within a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleId<'a> {
    /// URL of the shard; only the base name counts.
    pub shard: &'a str,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample key.
    pub key: &'a str,
}

impl RawSample {
    /// Returns the sample identity within the dataset.
    #[must_use]
    pub fn id(&self) -> SampleId<'_> {
        SampleId { shard: &self.shard, offset: self.offset, key: &self.key }
    }

    /// Returns the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&RawField> {
        self.fields.iter().find(|field| &*field.extension == extension)
    }

    /// Returns the number of payload bytes in all fields.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|field| field.bytes).fold(0, u64::saturating_add)
    }
}
