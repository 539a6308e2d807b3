//! Where finished shards go.
//!
//! A shard is built in a file on a local disk and handed over whole, so that a destination never sees a part of
//! one. The folder on the local disk is the destination that there is; one in an object store would upload the
//! file here.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Takes over finished shards.
pub(super) trait Destination {
    /// Takes over the file `finished`, complete and on disk, under `name`; returns where it is now.
    ///
    /// # Errors
    /// [`Error::ShardExists`] if the name is taken, which is left as it is; [`Error::File`] if the file cannot be
    /// moved.
    fn put(&self, finished: &Path, name: &str) -> Result<PathBuf>;
}

/// A folder on the file system on which shards are built.
#[derive(Debug)]
pub(super) struct LocalFolder<'a>(pub(super) &'a Path);

impl Destination for LocalFolder<'_> {
    fn put(&self, finished: &Path, name: &str) -> Result<PathBuf> {
        let shard = self.0.join(name);
        let error = |source: io::Error| Error::File { path: shard.display().to_string(), source };
        if shard.try_exists().map_err(error)? {
            return Err(Error::ShardExists { path: shard.display().to_string() });
        }
        fs::rename(finished, &shard).map_err(error)?;
        // The name itself reaches the disk with its folder. Not every file system can do that on demand, and
        // without it a power cut loses the whole shard, never a part of it.
        let _ = File::open(self.0).and_then(|folder| folder.sync_all());
        Ok(shard)
    }
}
