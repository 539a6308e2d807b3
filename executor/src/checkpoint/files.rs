//! Flushes directories to disk, and names files in errors.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::error::Error;

/// Flushes directory entries to disk.
pub(super) fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Adds action and path to an I/O error.
pub(super) fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}
