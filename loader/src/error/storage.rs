//! File and store errors, also while shards are written.

use serde::Serialize;

/// Reason why a file or a store cannot be read or written.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum StorageError {
    /// A shard cannot be opened or read; ends the stream.
    #[error("could not read shard `{shard}`")]
    Read {
        shard: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// A file next to the shards cannot be written or read.
    #[error("could not access `{path}`")]
    File {
        path: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// A remote store permanently rejects an upload.
    #[error("could not upload `{url}`")]
    Upload {
        url: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// An index file cannot be read or written.
    #[error("index `{path}`: {reason}")]
    Index { path: String, reason: String },
}

impl StorageError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::File { .. } => "file",
            Self::Upload { .. } => "upload",
            Self::Index { .. } => "index",
        }
    }
}

/// Reason why shards cannot be created.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum OutputError {
    /// A sample would read back differently from a shard; nothing was written for it.
    #[error("could not write sample `{key}`: {reason}")]
    Write { key: String, reason: String },
    /// Old shards, or files from a killed writer, occupy the place of new shards.
    #[error("`{path}` is in the way of new shards; remove it or write to another directory")]
    ShardExists { path: String },
    /// A path is not a sample source, or contains no samples.
    #[error("could not pack `{path}`: {reason}")]
    Pack { path: String, reason: String },
    /// A source part was packed differently from the remaining parts; parts are numbered from 0.
    #[error("part {part} cannot be packed or joined: {reason}")]
    PackPart { part: u32, reason: String },
}

impl OutputError {
    /// Returns the variant name in snake case.
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
