//! Names the source of shard bytes.

use std::path::PathBuf;

use super::RemoteObject;

/// Source of shard bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// Local file.
    File(PathBuf),
    /// Standard input, named `-`.
    StandardInput,
    /// Shell command output, named `pipe:COMMAND`.
    Pipe(String),
    /// Object on a remote store.
    Remote(RemoteObject),
}
