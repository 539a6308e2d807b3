//! Errors in data that was read.

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
    /// A shard is damaged from an offset on; everything before the offset was delivered.
    #[error("shard `{shard}` is damaged: {fault}")]
    Shard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ArchiveFault,
    },
    /// Bytes are not a complete index part; parts are numbered from 0 in input order.
    #[error("part {part} of the index cannot be merged: {reason}")]
    IndexPart { part: usize, reason: String },
    /// The index parts do not fit a dataset shard.
    #[error("the index cannot be merged at shard `{shard}`: {fault}")]
    IndexShard {
        shard: String,
        #[serde(serialize_with = "as_text")]
        fault: ShardFault,
    },
    /// A model cannot process a medium. The sample is bad for this model; the next sample may be good.
    #[error("the model cannot take the {medium}")]
    Medium {
        medium: &'static str,
        #[serde(skip)]
        source: BoxError,
    },
}

impl DataError {
    /// Returns the variant name in snake case.
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
