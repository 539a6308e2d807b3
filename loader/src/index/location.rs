//! Chooses the location of an index file and writes it atomically, under a lock file.
//!
//! The file is written under a random name and then renamed, in the first directory that accepts it. The lock
//! lets one process on a machine build while other processes wait.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checksum::WriteFault;
use super::encode::IndexFile;
use super::spill::Spill;
use crate::error::{Error, Result, StorageError};
use crate::files::{REPLACEMENT, Replacement, open_own, parent_directory};
use crate::store::{Patience, lock_patiently};

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
