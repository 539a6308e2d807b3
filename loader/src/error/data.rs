//! Errors of data that was read.

use serde::Serialize;

use super::{ArchiveFault, BoxError, ShardFault, as_text};

/// Reason why data that was read cannot be used.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum DataError {
    /// A shard has an unsupported compression.
    #[error("shard `{shard}` is compressed with {format}; recompress it with gzip or zstd")]
    UnsupportedCompression { shard: String, format: &'static str },
    /// A shard is damaged from an offset on; everything before it was delivered.
    #[error("shard `{shard}` is damaged: {fault}")]
    Shard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ArchiveFault,
    },
    /// Bytes are not a whole part of an index; parts count from 0 in the order given.
    #[error("part {part} of the index cannot be merged: {reason}")]
    IndexPart { part: usize, reason: String },
    /// The parts of an index do not fit a shard of the dataset.
    #[error("the index cannot be merged at shard `{shard}`: {fault}")]
    IndexShard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ShardFault,
    },
    /// A model cannot take a medium; the sample is bad for this model, the next one may be good.
    #[error("the model cannot take the {medium}")]
    Medium {
        medium: &'static str,
        #[serde(skip)]
        source: BoxError,
    },
}

impl DataError {
    /// Returns the name of the case, in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnsupportedCompression { .. } => "unsupported_compression",
            Self::Shard { .. } => "shard",
            Self::IndexPart { .. } => "index_part",
            Self::IndexShard { .. } => "index_shard",
            Self::Medium { .. } => "medium",
        }
    }
}
