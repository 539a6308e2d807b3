//! Publishes finished shards in a local directory or an object store.
//!
//! A shard is built in a file on a local disk and published as a whole, so that a destination never contains
//! a partial shard.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use crate::error::{Error, OutputError, Result, StorageError};
use crate::shard::Shard;
use crate::store::{Location, ReadMode, Stores, exists, list_directory, redact_name};

/// Destination for finished shards.
#[derive(Debug)]
pub(super) enum Destination {
    /// A directory on the file system on which shards are built.
    Directory(PathBuf),
    /// A directory in an object store.
    Store {
        stores: Stores,
        /// Directory URL; ends with `/`.
        url: String,
        /// Local directory in which shards are built.
        staging: TempDir,
    },
}

impl Destination {
    /// Opens the destination; creates a missing directory.
    ///
    /// # Errors
    /// [`Error::Storage`] if it cannot be created.
    pub(super) fn open(directory: &Path, stores: &Stores) -> Result<Self> {
        let error = |path: &Path, source| Error::file(path, source);
        if let Some(url) = directory.to_str().filter(|name| stores.is_remote(name)) {
            let staging = tempfile::Builder::new().prefix("dflop-shards-").tempdir();
            let staging = staging.map_err(|source| error(&std::env::temp_dir(), source))?;
            let url = format!("{}/", url.trim_end_matches('/'));
            return Ok(Self::Store { stores: stores.clone(), url, staging });
        }
        fs::create_dir_all(directory).map_err(|source| error(directory, source))?;
        Ok(Self::Directory(directory.to_owned()))
    }

    /// Returns the directory in which shards are built.
    pub(super) fn staging(&self) -> &Path {
        match self {
            Self::Directory(directory) => directory,
            Self::Store { staging, .. } => staging.path(),
        }
    }

    /// Lists the names of all files in the destination; a hidden temporary file is listed by its final name.
    ///
    /// # Errors
    /// [`Error::Storage`] for a directory or a store that cannot be listed.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        match self {
            Self::Directory(directory) => {
                file_names(directory).map_err(|source| Error::file(directory, source))
            }
            Self::Store { stores, url, .. } => {
                let object = stores.object(&Arc::from(url.as_str()))?;
                let listed = list_directory(&object);
                let urls = listed.map_err(|source| {
                    Error::Storage(StorageError::Read { shard: redact_name(url).into_owned(), source })
                })?;
                Ok(urls.iter().filter_map(|url| url.rsplit('/').next()).map(str::to_owned).collect())
            }
        }
    }

    /// Returns the shard with this name, which may not exist yet.
    ///
    /// # Errors
    /// [`Error::Selection`] if the store cannot be configured.
    pub(super) fn shard(&self, name: &str) -> Result<Shard> {
        match self {
            Self::Directory(directory) => {
                let path = directory.join(name);
                let url = path.to_string_lossy().into();
                Ok(Shard { url, location: Location::File(path), read: ReadMode::Auto })
            }
            Self::Store { stores, url, .. } => Shard::remote_at(format!("{url}{name}"), stores),
        }
    }

    /// Publishes the complete file `finished` under `name` and returns the new location. An object in a store
    /// is overwritten if `is_replaced`.
    ///
    /// # Errors
    /// [`Error::Output`] if the name is taken, in which case nothing changes; [`Error::Storage`] if the file
    /// cannot be moved; [`Error::Storage`] if the store fails permanently.
    pub(super) fn put(&self, finished: &Path, name: &str, is_replaced: bool) -> Result<PathBuf> {
        match self {
            Self::Directory(directory) => put_in_directory(directory, finished, name),
            Self::Store { stores, url, .. } => {
                let shard = self.shard(name)?;
                let is_there = match shard.remote() {
                    Some(object) if !is_replaced => {
                        exists(object).map_err(|source| shard.read_error(source))?
                    }
                    _ => false,
                };
                if is_there {
                    return Err(Error::Output(OutputError::ShardExists { path: shard.url.to_string() }));
                }
                stores.put_file(&format!("{url}{name}"), finished)?;
                // A leftover file harms nobody, and the directory is removed with the writer.
                let _ = fs::remove_file(finished);
                Ok(PathBuf::from(&*shard.url))
            }
        }
    }
}

fn put_in_directory(directory: &Path, finished: &Path, name: &str) -> Result<PathBuf> {
    let shard = directory.join(name);
    let error = |source: io::Error| Error::file(&shard, source);
    if shard.try_exists().map_err(error)? {
        return Err(Error::Output(OutputError::ShardExists { path: shard.display().to_string() }));
    }
    fs::rename(finished, &shard).map_err(error)?;
    // Syncing the directory makes the name durable. Not every file system supports it; without it a power
    // failure loses the entire shard, never a part of it.
    let _ = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(shard)
}

fn file_names(directory: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
