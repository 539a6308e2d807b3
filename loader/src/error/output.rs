//! Errors of writing shards.

use serde::Serialize;

/// Reason why shards cannot be made.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum OutputError {
    /// A sample would not be read back from a shard as it was; nothing of it was written.
    #[error("could not write sample `{key}`: {reason}")]
    Write { key: String, reason: String },
    /// Old shards, or files of a killed writer, occupy the place of new shards.
    #[error("`{path}` is in the way of new shards; remove it or write to another directory")]
    ShardExists { path: String },
    /// A path is not a source of samples, or holds none.
    #[error("could not pack `{path}`: {reason}")]
    Pack { path: String, reason: String },
    /// A part of a source was packed in another way than the others; parts count from 0.
    #[error("part {part} cannot be packed or joined: {reason}")]
    PackPart { part: u32, reason: String },
}

impl OutputError {
    /// Returns the name of the case, in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::ShardExists { .. } => "shard_exists",
            Self::Pack { .. } => "pack",
            Self::PackPart { .. } => "pack_part",
        }
    }
}
