//! Publishes finished shards in a local directory or an object store, and finds existing shards there.
//!
//! A shard is built in a file on a local disk and published as a whole, so that a destination never contains
//! a partial shard.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use tempfile::TempDir;

use crate::error::{Error, OutputError, Result, StorageError};
use crate::shard::{PARTIAL, Shard};
use crate::store::{Location, ReadMode, Stores, exists, file, list_directory, redact_name};

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

/// Returns the first file that a writer would add to, or that a killed writer left.
pub(super) fn find_shard(destination: &Destination) -> Result<Option<Shard>> {
    let names = shard_names(destination)?;
    names.first().map(|name| destination.shard(name)).transpose()
}

/// Finished shards in a directory, and the next free number.
#[derive(Debug, Default)]
pub(super) struct Existing {
    /// Finished shards in name order.
    pub(super) shards: Vec<Shard>,
    /// First free number.
    pub(super) next_number: usize,
}

impl Existing {
    /// Lists the finished shards and removes the remains of killed writers.
    ///
    /// # Errors
    /// [`Error::Output`] if a second writer is active in the directory, or if a shard has a name that no
    /// writer assigns; [`Error::Storage`] if the directory cannot be listed.
    pub(super) fn scan(destination: &Destination) -> Result<Self> {
        let mut existing = Self::default();
        for name in shard_names(destination)? {
            let shard = destination.shard(&name)?;
            let in_the_way = || Error::Output(OutputError::ShardExists { path: shard.url.to_string() });
            if let Some(partial) = shard.path().filter(|path| is_partial(path)) {
                remove_abandoned(partial).map_err(|_| in_the_way())?;
                continue;
            }
            let number = shard_number(Path::new(&name)).ok_or_else(in_the_way)?;
            existing.next_number = existing.next_number.max(number + 1);
            existing.shards.push(shard);
        }
        Ok(existing)
    }
}

/// Returns the names of shards and partial shards, in order.
pub(super) fn shard_names(destination: &Destination) -> Result<Vec<String>> {
    let mut names = destination.names()?;
    names.retain(|name| name.trim_start_matches('.').starts_with("shard-") && name.contains(".tar"));
    names.sort_unstable();
    Ok(names)
}

pub(super) fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == PARTIAL)
}

/// Removes a file under construction unless the writer is alive and holds the file lock.
pub(super) fn remove_abandoned(partial: &Path) -> io::Result<()> {
    let file = file::open(partial)?;
    file.try_lock()?;
    fs::remove_file(partial)
}

/// Returns the number in `shard-000017.tar` or `shard-000017.tar.zst`.
fn shard_number(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    let (digits, ending) = name.strip_prefix("shard-")?.split_once('.')?;
    let is_number = digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && matches!(ending, "tar" | "tar.zst") { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_writer_gives_have_a_number() {
        let number = |name: &str| shard_number(&Path::new("d").join(name));
        assert_eq!(number("shard-000017.tar"), Some(17));
        assert_eq!(number("shard-1000000.tar.zst"), Some(1_000_000));
        for name in ["shard-17.tar", "shard-+00017.tar", "shard-000017.tar.gz", "shard-.tar", "x-000017.tar"]
        {
            assert_eq!(number(name), None, "{name}");
        }
    }
}
