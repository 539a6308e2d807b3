//! Index options, and the files that they select: directories, name, and an owner who is trusted.
//!
//! The file name is derived from shard names and sizes, so different shard lists have different files. Names
//! are base names for local shards, whose directory may move, and URLs for remote shards, whose lengths and
//! versions may agree. The index is in `.dflop/` next to the first shard; in the user's cache directory if
//! that directory is not writable or the shard is remote; or in the directory that the user sets.
//!
//! An index determines which shard bytes belong to which sample. Whoever can write it can therefore exchange
//! the samples for every reader, so the index must belong to the reader, to root, or to the owner of all
//! shards, who could exchange the samples anyway. A directory that the user set is not checked.
//!
//! The file is written under a random name and then renamed, in the first directory that accepts it. The lock
//! lets one process on a machine build while other processes wait.

use super::encode::IndexFile;
use super::file::{WriteFault, hex};
use super::spill::Spill;
use super::text_counts::TokenCounts;
use crate::error::{Error, Result, StorageError};
use crate::files::{REPLACEMENT, Replacement, open_own, parent_directory};
use crate::flow::{NoProgress, Progress, cores};
use crate::shard::Shard;
use crate::store::local::read_private;
use crate::store::{Identity, Patience, file, lock_patiently};
use bytes::Bytes;
use dflop_samples::media::VideoSampling;
use sha2::{Digest, Sha256};
use std::fs::{File, Metadata};
use std::io;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Maximum wait for a process that builds the same index, which may read many shards.
const PATIENCE: Patience = Patience {
    until_report: Duration::from_secs(10),
    for_stopped: Duration::from_secs(20),
    for_any: Duration::from_hours(6),
};
/// Minimum age of a temporary file that counts as abandoned.
const LEFTOVER_AGE: Duration = Duration::from_mins(10);

/// Acquires the lock in the first writable directory. Waits while a different process builds there, but not
/// for a stopped process.
pub(super) fn lock_first_writable(directories: &[PathBuf], name: &str) -> std::io::Result<(PathBuf, File)> {
    let mut refused =
        std::io::Error::new(std::io::ErrorKind::NotFound, "no directory for the index is writable");
    for directory in directories {
        let lock = std::fs::create_dir_all(directory).and_then(|()| {
            let path = lock_path(directory, name);
            let file = open_own(&path)?;
            lock_patiently(&file, &path, PATIENCE).map(|()| file)
        });
        match lock {
            Ok(file) => {
                remove_leftovers(directory, name);
                return Ok((directory.clone(), file));
            }
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn lock_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(name.replace(".arrow", ".lock"))
}

/// Removes files that killed builders left; a younger file may belong to a builder on a different machine.
fn remove_leftovers(directory: &Path, name: &str) {
    let start = format!(".{name}-");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_temporary = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(&start) && name.ends_with(REPLACEMENT));
        let age = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if is_temporary && age.is_some_and(|age| age > LEFTOVER_AGE) {
            // A leftover file does no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Writes the index to the first directory that accepts it, so that a full disk is skipped.
///
/// # Errors
/// [`Error::Storage`] if no directory accepts the index, if the rows cannot be read back, or if it cannot be
/// encoded.
pub(super) fn write_to_first(
    directories: &[PathBuf],
    name: &str,
    index: &IndexFile,
    spill: &mut Spill,
) -> Result<PathBuf> {
    let written = try_each(directories, name, index, spill);
    if matches!(written, Err(Error::Storage(StorageError::File { .. }))) && spill.has_files() {
        // The rows, which need as much room as the index, may be what fills the disk.
        spill
            .hold_all()
            .map_err(|source| Error::Storage(StorageError::File { path: name.to_owned(), source }))?;
        return try_each(directories, name, index, spill);
    }
    written
}

fn try_each(directories: &[PathBuf], name: &str, index: &IndexFile, spill: &Spill) -> Result<PathBuf> {
    let mut refused = None;
    for directory in directories {
        let path = directory.join(name);
        match write_atomically(&path, index, spill) {
            Ok(()) => return Ok(path),
            Err(WriteFault::Write(source)) => {
                refused = refused.or(Some(Error::file(&path, source)));
            }
            Err(fault) => return Err(fault_in(&path.display().to_string(), fault)),
        }
    }
    let source = std::io::Error::new(std::io::ErrorKind::NotFound, "no directory for the index is writable");
    Err(refused.unwrap_or(Error::Storage(StorageError::File { path: name.to_owned(), source })))
}

/// Path in errors about an index in memory.
pub(super) const IN_MEMORY: &str = "in memory";

/// Returns the error for an index that cannot be encoded or decoded; `None` means an index in memory.
pub(super) fn index_error(path: Option<&Path>, error: &arrow_schema::ArrowError) -> Error {
    let path = path.map_or_else(|| IN_MEMORY.to_owned(), |path| path.display().to_string());
    Error::Storage(StorageError::Index { path, reason: error.to_string() })
}

/// Returns the error for an index file that cannot be written.
pub(super) fn fault_in(path: &str, fault: WriteFault) -> Error {
    match fault {
        WriteFault::Encode(error) => {
            Error::Storage(StorageError::Index { path: path.to_owned(), reason: error.to_string() })
        }
        WriteFault::Rows(source) | WriteFault::Write(source) => {
            Error::Storage(StorageError::File { path: path.to_owned(), source })
        }
    }
}

fn write_atomically(path: &Path, index: &IndexFile, spill: &Spill) -> Result<(), WriteFault> {
    let begin = || {
        std::fs::create_dir_all(parent_directory(path))?;
        Replacement::begin(path)
    };
    let replacement = begin().map_err(WriteFault::Write)?;
    index.write(spill, replacement.file())?;
    replacement.publish().map_err(WriteFault::Write)
}

/// Directory next to the shards.
const DIRECTORY: &str = ".dflop";

/// Index location and build options.
#[derive(Debug, Clone)]
pub struct IndexOptions {
    /// Index directory; `None` means next to the shards, or the user's cache directory.
    pub directory: Option<PathBuf>,
    /// Rebuilds the index even if it is up to date.
    pub is_rebuilt: bool,
    /// Decodes every field, so that bad samples are found before the first epoch. Implies `is_rebuilt`.
    pub is_verified: bool,
    /// Sampling of video frames, with the feature `video`; a video index with different sampling is rebuilt.
    pub video_sampling: VideoSampling,
    /// Token counts that the index returns.
    pub token_counts: TokenCounts,
    /// Number of shards that are read in parallel.
    pub threads: usize,
    /// Listener that is notified of every shard.
    pub progress: Arc<dyn Progress>,
}

impl Default for IndexOptions {
    /// Next to the shards, built if needed, with one thread per core.
    fn default() -> Self {
        Self {
            directory: None,
            is_rebuilt: false,
            is_verified: false,
            video_sampling: VideoSampling::default(),
            token_counts: TokenCounts::default(),
            threads: cores(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// Rejects invalid options and an empty dataset.
pub(super) fn check_options(shards: &[Shard], options: &IndexOptions) -> Result<()> {
    if let Some(fault) = options.video_sampling.fault() {
        return Err(Error::Config { setting: "video_sampling", reason: fault.into() });
    }
    if shards.is_empty() {
        return Err(Error::Config {
            setting: "dataset",
            reason: "a dataset needs at least one shard".into(),
        });
    }
    Ok(())
}

/// Returns the index file name for shards, derived from shard names and sizes.
pub(super) fn file_name(shards: &[Shard], stats: &[Identity]) -> String {
    let mut hasher = Sha256::new();
    for (shard, Identity { bytes, .. }) in shards.iter().zip(stats) {
        let name = shard.unique_name();
        hasher.update((name.len() as u64).to_le_bytes());
        hasher.update(&*name);
        hasher.update(bytes.to_le_bytes());
    }
    format!("{}.arrow", hex(&hasher.finalize()[..8]))
}

/// Returns the directories for reading and writing, best first.
pub(super) fn directories(shards: &[Shard], options: &IndexOptions) -> Vec<PathBuf> {
    if let Some(directory) = &options.directory {
        return vec![directory.clone()];
    }
    let place = match shards[0].path().map(parent_directory) {
        Some(parent) => std::path::absolute(parent).unwrap_or_else(|_| parent.to_path_buf()),
        None => shards[0].url.rsplit_once('/').map_or("", |(parent, _)| parent).into(),
    };
    let place = hex(&Sha256::digest(place.as_os_str().as_encoded_bytes())[..8]);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let beside = beside(shards).filter(|directory| refusal(directory, shards).is_none());
    [beside, cache.map(|cache| cache.join("dflop").join(place))].into_iter().flatten().collect()
}

/// Returns the index directory next to the first shard; `None` for a remote shard.
pub(super) fn beside(shards: &[Shard]) -> Option<PathBuf> {
    Some(shards[0].path()?.parent().unwrap_or(Path::new("")).join(DIRECTORY))
}

/// Reads an index file, if the owner is trusted or the user set the directory.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`] with the owner; the operating system error.
pub(super) fn read_trusted(path: &Path, shards: &[Shard], options: &IndexOptions) -> io::Result<Bytes> {
    let file = file::open(path)?;
    if options.directory.is_none() {
        check_owner(&file.metadata()?, shards)?;
    }
    read_private(file)
}

/// Returns why an index file, or its directory, is not used; `None` if the file is missing.
pub(super) fn refusal(path: &Path, shards: &[Shard]) -> Option<String> {
    // Also checks the owner of a link, if there is one: the owner decides where the link points, at any time.
    let found = [std::fs::symlink_metadata(path), std::fs::metadata(path)];
    let check =
        |metadata: io::Result<Metadata>| metadata.and_then(|metadata| check_owner(&metadata, shards)).err();
    let refused = found.into_iter().find_map(check)?;
    let is_owner = refused.kind() == ErrorKind::PermissionDenied && refused.get_ref().is_some();
    is_owner.then(|| format!("`{}` is not used: {refused}", path.display()))
}

fn check_owner(metadata: &Metadata, shards: &[Shard]) -> io::Result<()> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    let other = |shard: &&Shard| shard_owner(shard) != Some(owner);
    if owner == user || owner == 0 {
        return Ok(());
    }
    let Some(shard) = shards.iter().find(other) else { return Ok(()) };
    let reason = format!(
        "it belongs to user {owner}, who is neither this user, {user}, nor root, nor the owner of shard `{}`",
        shard.url
    );
    Err(io::Error::new(ErrorKind::PermissionDenied, reason))
}

fn shard_owner(shard: &Shard) -> Option<u32> {
    Some(std::fs::metadata(shard.path()?).ok()?.uid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Index;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    /// Only root can change a file's owner, so other users check nothing here.
    #[test]
    fn an_index_of_another_owner_is_replaced_and_named_unless_the_shards_are_his() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let temporary = tempfile::tempdir().unwrap();
        let data = temporary.path().join("shards");
        let mut writer = ShardWriter::builder(&data).build().unwrap();
        writer.write("kite", &[("txt", b"a red kite")]).unwrap();
        writer.finish().unwrap();
        let shards = expand_shards(&[data.to_str().unwrap()]).unwrap();
        let options = IndexOptions::default();
        let open = || Index::open_or_build(shards.clone(), &options).unwrap();
        let give = |path: &Path| std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        let give_back = |path: &Path| std::os::unix::fs::chown(path, Some(0), None).unwrap();
        let index = open().path().unwrap().to_owned();

        give(&index);
        assert!(refusal(&index, &shards).unwrap().contains("belongs to user 65534"));
        let again = open();
        assert_eq!(again.path().unwrap(), index, "the directory is trusted: the file was replaced");
        assert!(again.warnings()[0].contains(&*shards[0].url), "{:?}", again.warnings());
        assert!(refusal(&index, &shards).is_none() && open().warnings().is_empty());

        give(index.parent().unwrap());
        let elsewhere = open();
        assert!(elsewhere.path().is_none_or(|path| path.parent() != index.parent()));
        assert!(elsewhere.warnings()[0].contains("belongs to user 65534"));

        // A link from the other owner is no better, wherever it points.
        let beside = index.parent().unwrap();
        std::fs::rename(beside, temporary.path().join("mine")).unwrap();
        give_back(&temporary.path().join("mine"));
        std::os::unix::fs::symlink(temporary.path().join("mine"), beside).unwrap();
        assert!(refusal(beside, &shards).is_none());
        std::os::unix::fs::lchown(beside, Some(65_534), None).unwrap();
        assert!(refusal(beside, &shards).unwrap().contains("belongs to user 65534"));
        std::fs::remove_file(beside).unwrap();
        std::fs::rename(temporary.path().join("mine"), beside).unwrap();
        give(beside);

        let directory = temporary.path().join("indexes");
        let chosen = IndexOptions { directory: Some(directory.clone()), ..IndexOptions::default() };
        let chosen_index = Index::open_or_build(shards.clone(), &chosen).unwrap().path().unwrap().to_owned();
        give(&chosen_index);
        let again = Index::open_or_build(shards.clone(), &chosen).unwrap();
        let owner = std::fs::metadata(again.path().unwrap()).unwrap().uid();
        assert_eq!((owner, again.warnings().len()), (65_534, 0), "the user set the directory");

        give(shards[0].path().unwrap());
        give(&index);
        assert_eq!(
            (open().path().unwrap(), open().warnings().len()),
            (&*index, 0),
            "his are the shards, too"
        );
    }
}
