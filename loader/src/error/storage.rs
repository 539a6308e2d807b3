//! File and store errors.

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
