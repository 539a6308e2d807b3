//! Names the place that the bytes of a shard come from.

use std::path::PathBuf;

use super::RemoteObject;

/// Source of the bytes of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A local file.
    File(PathBuf),
    /// Standard input, named `-`.
    StandardInput,
    /// The output of a shell command, named `pipe:COMMAND`.
    Pipe(String),
    /// An object on a remote store.
    Remote(RemoteObject),
}
