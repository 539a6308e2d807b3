//! Describes samples: decoded fields, shapes from headers, texts, and documents that order media and texts.

pub mod document;
mod measure;
pub mod text;

use std::sync::Arc;

use crate::media::Media;
use crate::raw_sample::{RawSample, SampleId};

pub use self::measure::{FieldFault, MeasuredSample, Unused, decoded_bytes, measure_sample, measure_within};

/// A field of a delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Field {
    /// Part of the entry name after the key's dot, lower-cased.
    pub extension: Arc<str>,
    /// Field content; [`Media::Opaque`] if the field was not decoded.
    pub media: Media,
}

/// A delivered sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Entry path up to the first dot in the file name.
    pub key: String,
    /// URL of the shard.
    pub shard: Arc<str>,
    /// Offset of the sample's first header in the shard, after decompression.
    pub offset: u64,
    /// Sample epoch, from 0.
    pub epoch: u64,
    /// Number of encoded payload bytes read for the sample.
    pub bytes: u64,
    /// The fields, in shard order; without images that went into a tensor, and without images and clips if
    /// the sample was prepared for a model.
    pub fields: Vec<Field>,
}

impl Sample {
    /// Creates a sample from a raw sample and decoded fields; `bytes` payload bytes were read.
    #[must_use]
    pub fn from_raw(raw: RawSample, bytes: u64, fields: Vec<Field>) -> Self {
        Self { key: raw.key, shard: raw.shard, offset: raw.offset, epoch: raw.epoch, bytes, fields }
    }

    /// Returns the sample identity within the dataset.
    #[must_use]
    pub fn id(&self) -> SampleId<'_> {
        SampleId { shard: &self.shard, offset: self.offset, key: &self.key }
    }

    /// Creates a sample from decoded fields, as a loader delivers it.
    #[must_use]
    pub fn new(key: impl Into<String>, fields: Vec<Field>) -> Self {
        Self { key: key.into(), shard: "".into(), offset: 0, epoch: 0, bytes: 0, fields }
    }

    /// Returns the content of the field with this extension.
    #[must_use]
    pub fn field(&self, extension: &str) -> Option<&Media> {
        self.fields.iter().find(|field| &*field.extension == extension).map(|field| &field.media)
    }
}

/// Arrangement of microbatch samples in tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchLayout {
    /// A single row with all samples in sequence.
    Packed,
    /// A row for each sample, padded to the longest sample.
    Padded {
        /// Padding side.
        side: PaddingSide,
    },
}

impl BatchLayout {
    /// Returns whether all samples share a single row.
    #[must_use]
    pub fn is_packed(self) -> bool {
        self == Self::Packed
    }
}

/// Side on which a row is padded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PaddingSide {
    /// Before the sample.
    Left,
    /// After the sample, as is usual in training.
    #[default]
    Right,
}
