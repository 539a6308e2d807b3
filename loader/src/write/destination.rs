//! Moves finished shards to their destination: a local directory, or one of an object store.
//!
//! A shard is built in a file on a local disk and handed over whole, so that no destination ever shows a part
//! of one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use crate::error::{Error, Result};
use crate::shard::Shard;
use crate::store::{Location, Stores, exists, is_remote, list_directory};

/// Takes over finished shards.
#[derive(Debug)]
pub(super) enum Destination {
    /// A directory on the file system on which shards are built.
    Directory(PathBuf),
    /// A directory of an object store.
    Store {
        stores: Stores,
        /// Its URL; ends with `/`.
        url: String,
        /// Where shards are built.
        staging: TempDir,
    },
}

impl Destination {
    /// Makes the directory, where it is missing.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be made.
    pub(super) fn open(directory: &Path, stores: &Stores) -> Result<Self> {
        let error = |path: &Path, source| Error::File { path: path.display().to_string(), source };
        if let Some(url) = directory.to_str().filter(|name| is_remote(name)) {
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

    /// Lists the names of all files there, or of those that hidden files are to be.
    ///
    /// # Errors
    /// [`Error::File`] for a directory, [`Error::Read`] for a store that cannot be listed.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        match self {
            Self::Directory(directory) => file_names(directory)
                .map_err(|source| Error::File { path: directory.display().to_string(), source }),
            Self::Store { stores, url, .. } => {
                let object = stores.object(&Arc::from(url.as_str()))?;
                let listed = list_directory(&object);
                let urls = listed.map_err(|source| Error::Read { shard: url.clone(), source })?;
                Ok(urls.iter().filter_map(|url| url.rsplit('/').next()).map(str::to_owned).collect())
            }
        }
    }

    /// Returns the shard that has, or is to have, this name.
    ///
    /// # Errors
    /// [`Error::ShardList`] if the store cannot be configured.
    pub(super) fn shard(&self, name: &str) -> Result<Shard> {
        match self {
            Self::Directory(directory) => {
                let path = directory.join(name);
                Ok(Shard { url: path.to_string_lossy().into(), location: Location::File(path) })
            }
            Self::Store { stores, url, .. } => {
                let url: Arc<str> = format!("{url}{name}").into();
                Ok(Shard { location: Location::Remote(stores.object(&url)?), url })
            }
        }
    }

    /// Takes over the file `finished`, complete and on disk, under `name`; returns where it is now. On a
    /// store an object is written over if `is_replaced`.
    ///
    /// # Errors
    /// [`Error::ShardExists`] if the name is taken, which is left as it is; [`Error::File`] if the file
    /// cannot be moved; [`Error::Read`] or [`Error::Upload`] if the store fails for good.
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
                    return Err(Error::ShardExists { path: shard.url.to_string() });
                }
                stores.put_file(&format!("{url}{name}"), finished)?;
                // The rest of the file is in the way of nobody, and the directory goes with the writer.
                let _ = fs::remove_file(finished);
                Ok(PathBuf::from(&*shard.url))
            }
        }
    }
}

fn put_in_directory(directory: &Path, finished: &Path, name: &str) -> Result<PathBuf> {
    let shard = directory.join(name);
    let error = |source: io::Error| Error::File { path: shard.display().to_string(), source };
    if shard.try_exists().map_err(error)? {
        return Err(Error::ShardExists { path: shard.display().to_string() });
    }
    fs::rename(finished, &shard).map_err(error)?;
    // The name itself reaches the disk with its directory. Not every file system can do that on demand, and
    // without it a power cut loses the whole shard, never a part of it.
    let _ = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(shard)
}

fn file_names(directory: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
