//! Keeps generated files in the cache directory of the user, where all ranks and later runs find them.
//!
//! They are in `dflop/train` below `$XDG_CACHE_HOME`, or else below `~/.cache`. Only this user may write
//! there: otherwise another user could place files under predictable names, and the run would train on them.
//! The most recently used directories are kept, [`KEPT_MAX`] per kind, so that a run that resumes finds its
//! dataset again; older directories are removed unless a running process uses them.

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// Maximum number of cached directories per kind.
const KEPT_MAX: usize = 4;
/// Age after which an incomplete directory counts as left by a killed process.
const ABANDONED: Duration = Duration::from_hours(24);
/// File that processes lock while they use the directory; the modification time is the last use.
const IN_USE: &str = "in-use";
/// Permission to write for users other than the owner, in a directory that only the owner may write to.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// The same, in a directory that may belong to a single-user group.
const WRITABLE_BY_ALL: u32 = 0o002;

/// Directory whose contents follow from its name; kept while this value exists, and at least until newer
/// directories are used.
#[derive(Debug)]
pub(super) struct CacheDirectory {
    pub(super) path: PathBuf,
    /// Locked, so that no process removes the directory.
    _in_use: File,
}

impl CacheDirectory {
    /// Opens the directory for a file kind, and creates a missing directory.
    ///
    /// - `contents`: everything that the files depend on; the name has the digest
    /// - `write`: writes the files into an empty directory
    ///
    /// # Errors
    /// [`Error::Start`] that names a directory that is not exclusive to this user; errors from `write`.
    pub(super) fn open_or_make(
        kind: &str,
        contents: &str,
        write: impl Fn(&Path) -> Result<()>,
    ) -> Result<Self> {
        let root = root()?;
        let path = root.join(format!("{kind}-{}", digest(contents.as_bytes())));
        loop {
            if !path.exists() {
                make(&root, &path, &write)?;
            }
            check(&path, WRITABLE_BY_OTHERS)?;
            // without it, another process has removed the directory meanwhile
            if let Some(kept) = Self::open(&path)? {
                remove_unused(&root, kind);
                return Ok(kept);
            }
        }
    }

    /// Locks a directory; `None` if it was removed meanwhile.
    fn open(path: &Path) -> Result<Option<Self>> {
        let name = path.join(IN_USE);
        let file = match File::options().read(true).write(true).open(&name) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.exists() => return Ok(None),
            file => file.map_err(|error| Error::from(error).in_file(&name))?,
        };
        // a file system without locks only loses the protection from removal
        let _ = file.lock_shared();
        let _ = file.set_modified(SystemTime::now());
        let is_there = match (file.metadata(), fs::metadata(&name)) {
            (Ok(open), Ok(found)) => identity(&open) == identity(&found),
            _ => false,
        };
        Ok(is_there.then(|| Self { path: path.to_owned(), _in_use: file }))
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Creates a directory under a temporary name and renames the complete directory.
fn make(root: &Path, path: &Path, write: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let partial = tempfile::Builder::new()
        .prefix(".partial-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(root)
        .map_err(|error| Error::from(error).in_file(root))?;
    write(partial.path())?;
    File::create(partial.path().join(IN_USE))?;
    match fs::rename(partial.path(), path) {
        // another process was faster; the directory has the same contents
        Err(_) if path.is_dir() => Ok(()),
        renamed => renamed.map_err(|error| Error::from(error).in_file(path)),
    }
}

/// Removes the directories of a kind that were used longest ago, and incomplete ones. A failure is left to
/// the next process.
fn remove_unused(root: &Path, kind: &str) {
    let Ok(entries) = fs::read_dir(root) else { return };
    let mut kept = Vec::new();
    for entry in entries.filter_map(Result::ok) {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let used = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        if name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-')) {
            kept.extend(used(&path.join(IN_USE)).map(|used| (used, path)));
        } else if name.starts_with(".partial-")
            && used(&path).and_then(|used| used.elapsed().ok()).is_some_and(|age| age > ABANDONED)
        {
            let _ = fs::remove_dir_all(path);
        }
    }
    kept.sort_by(|a, b| b.cmp(a));
    for (_, path) in kept.into_iter().skip(KEPT_MAX) {
        let Ok(file) = File::options().read(true).write(true).open(path.join(IN_USE)) else { continue };
        if file.try_lock().is_ok() {
            // renamed first: a directory of this name is always complete
            let removed =
                root.join(format!(".partial-removed-{}", path.file_name().unwrap_or_default().display()));
            if fs::rename(&path, &removed).is_ok() {
                let _ = fs::remove_dir_all(removed);
            }
        }
    }
}

/// Returns the directory for generated files of this user, which it creates if necessary.
fn root() -> Result<PathBuf> {
    let directory =
        |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = directory("XDG_CACHE_HOME").or_else(|| Some(directory("HOME")?.join(".cache")));
    let Some(cache) = cache else {
        return Err(Error::Start(
            "no directory for generated files: set `XDG_CACHE_HOME` or `HOME`".to_owned(),
        ));
    };
    let own = cache.join("dflop");
    let root = own.join("train");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&root)
        .map_err(|error| Error::from(error).in_file(&root))?;
    check(&own, WRITABLE_BY_ALL)?;
    check(&root, WRITABLE_BY_OTHERS)?;
    Ok(root)
}

/// Rejects a directory that belongs to another user, or that other users may write to.
fn check(directory: &Path, forbidden: u32) -> Result<()> {
    let own = rustix::process::geteuid().as_raw();
    // also the link, if there is one: the link owner could change it at any time
    for metadata in [fs::symlink_metadata(directory), fs::metadata(directory)] {
        let metadata = metadata.map_err(|error| Error::from(error).in_file(directory))?;
        let refused = if metadata.uid() != own {
            format!("belongs to user {}, not to this user, {own}", metadata.uid())
        } else if !metadata.is_symlink() && metadata.mode() & forbidden != 0 {
            format!("can be written by other users (mode {:o})", metadata.mode() & 0o7777)
        } else {
            continue;
        };
        let advice = "remove it, or set `XDG_CACHE_HOME` to a directory of this user";
        return Err(Error::Start(format!("`{}` {refused}; {advice}", directory.display())));
    }
    Ok(())
}

/// Returns the first 16 digits of the content digest.
pub(super) fn digest(contents: &[u8]) -> String {
    let digest = Sha256::digest(contents);
    let word = digest.iter().take(8).fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    format!("{word:016x}")
}
