//! Creates, replaces and opens files that other users could exchange, and confines names to a directory.
//!
//! Whoever may write to a directory can put a link at a name that is known beforehand, and a program that
//! opens the name then writes to the link target. A file is therefore written under a random name, which is
//! created exclusively, and renamed ([`Replacement`]). A file that has to be opened by name, such as a lock
//! file, is opened without following links, and must be a regular file ([`open_own`]). A file that the user
//! names may be a link or a device, and is opened by other means.

mod confine;

use std::fs::{File, Permissions};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use dflop_samples::file;
use rustix::fs::OFlags;
use tempfile::NamedTempFile;

pub use self::confine::lies_inside;
pub(crate) use self::confine::parent_directory;

/// Permissions of a new file, before the process mask (umask) applies.
const MODE: u32 = 0o666;
/// Name ending for a file under construction.
pub(crate) const REPLACEMENT: &str = ".partial";

/// File under construction that replaces a file or creates a new file as a whole; removed if it is dropped.
#[derive(Debug)]
pub struct Replacement {
    file: NamedTempFile,
    path: PathBuf,
}

impl Replacement {
    /// Creates `.NAME-RANDOM.partial` next to `path`, exclusively, so that several processes may write the
    /// same file.
    ///
    /// # Errors
    /// The operating system error; [`ErrorKind::IsADirectory`] if `path` has no file name.
    pub fn begin(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
        let (start, directory) = (format!(".{}-", name.to_string_lossy()), parent_directory(path));
        file::remove_abandoned(directory, &start, REPLACEMENT);
        let file = tempfile::Builder::new()
            .prefix(&start)
            .suffix(REPLACEMENT)
            .permissions(Permissions::from_mode(MODE))
            .tempfile_in(directory)?;
        // On a file system without locks, a later process does not remove files from killed processes.
        let _ = file.as_file().try_lock();
        Ok(Self { file, path: path.to_owned() })
    }

    /// Returns the file to write to.
    #[must_use]
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Syncs the file and renames it. A link at `path` is replaced; the link target stays as it is.
    ///
    /// # Errors
    /// The operating system error; the file is then removed.
    pub fn publish(self) -> io::Result<()> {
        let Self { file, path } = self;
        // Before the rename, so that a crash leaves the old file or the complete new one.
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|failed| failed.error)?;
        // Syncing the directory makes the name durable; not every file system can do it.
        let _ = File::open(parent_directory(&path)).and_then(|directory| directory.sync_all());
        Ok(())
    }
}

/// Replaces the file at `path` by a file with these contents, see [`Replacement`].
///
/// # Errors
/// The operating system error.
pub fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    let replacement = Replacement::begin(path)?;
    io::Write::write_all(&mut replacement.file(), contents)?;
    replacement.publish()
}

/// Opens the program's private file for reading and writing, at the start, and creates it if it is missing.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if the name belongs to a link, a directory, a pipe or a device; the operating
/// system error.
pub fn open_own(path: &Path) -> io::Result<File> {
    let refused =
        |what: &str| io::Error::new(ErrorKind::InvalidInput, format!("it is {what}, not a regular file"));
    // On regular files, opening without waiting changes nothing.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).custom_flags(flags.bits().cast_signed());
    let file = options.open(path).map_err(|error| match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::LOOP) => refused("a symbolic link"),
        Some(rustix::io::Errno::NXIO) => refused("a pipe or a device"),
        _ => error,
    })?;
    if file.metadata()?.file_type().is_file() { Ok(file) } else { Err(refused("a pipe or a device")) }
}

/// Writes a file that the user named under a temporary name in its directory, syncs it, and renames it; the
/// file is removed if anything fails. The temporary name is unique, so that several processes may write the
/// same file.
///
/// A symbolic link stays: the file that it leads to is replaced. Pipes and devices are written to directly.
/// A file whose name the program chose is written by [`place_file`].
///
/// # Errors
/// Errors of `write` and of the file system.
pub fn replace_file<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, E>,
) -> Result<T, E> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let existing = fs::metadata(&path).ok();
    if existing.as_ref().is_some_and(|existing| !existing.is_file()) {
        return write_to(&File::options().write(true).open(&path)?, write);
    }
    let replacement = Replacement::begin(&path)?;
    if let Some(existing) = existing {
        replacement.file().set_permissions(existing.permissions())?;
    }
    let value = write_to(replacement.file(), write)?;
    replacement.publish()?;
    Ok(value)
}

/// Writes a file whose name the program chose, in a directory that the user named, as [`replace_file`] does;
/// a link that somebody put there is replaced, not followed.
///
/// # Errors
/// Errors of `write` and of the file system.
pub fn place_file<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, E>,
) -> Result<T, E> {
    let replacement = Replacement::begin(path)?;
    let value = write_to(replacement.file(), write)?;
    replacement.publish()?;
    Ok(value)
}

fn write_to<T, E: From<io::Error>>(
    file: &File,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, E>,
) -> Result<T, E> {
    let mut buffered = BufWriter::new(file);
    let value = write(&mut buffered)?;
    buffered.flush()?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(directory).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_when_it_is_complete_and_a_link_is_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let (path, victim) = (place.path().join("a.json"), place.path().join("victim"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &path).unwrap();
        let replacement = Replacement::begin(&path).unwrap();
        replacement.file().write_all(b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious", "nothing changes before the end");
        let random = names(place.path()).remove(0);
        assert!(random.starts_with(".a.json-") && random.ends_with(REPLACEMENT), "{random}");
        replacement.publish().unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        drop(Replacement::begin(&path).unwrap());
        assert_eq!(names(place.path()), ["a.json", "victim"], "a file that is given up is removed");
        assert!(Replacement::begin(Path::new("/")).is_err());
    }

    #[test]
    fn only_regular_files_are_opened() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink(at("file"), at("link")).unwrap();
        symlink(at("none"), at("dangling")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
        assert!(pipe.success());
        open_own(&at("file")).unwrap().write_all(b"TE").unwrap();
        assert_eq!(fs::read(at("file")).unwrap(), b"TExt");
        assert_eq!(open_own(&at("new")).unwrap().metadata().unwrap().len(), 0);
        for (name, what) in
            [("link", "a symbolic link"), ("dangling", "a symbolic link"), ("pipe", "a pipe or a device")]
        {
            let error = open_own(&at(name)).unwrap_err();
            assert_eq!(error.to_string(), format!("it is {what}, not a regular file"), "{name}");
        }
        assert!(open_own(&at("directory")).is_err() && !at("none").exists());
    }

    fn write_file(path: &Path, contents: &str) -> io::Result<()> {
        replace_file(path, |file| file.write_all(contents.as_bytes()))
    }

    #[test]
    fn a_file_is_replaced_when_it_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_file(&path, "old").unwrap();
        let seen = replace_file(&path, |file| {
            file.write_all(b"new")?;
            file.flush()?;
            let partial: Vec<_> = names(directory.path());
            assert!(partial.len() == 2 && partial[0].starts_with(".state.json-"), "{partial:?}");
            fs::read_to_string(&path)
        });
        assert_eq!(seen.unwrap(), "old");
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(directory.path()), ["state.json"]);
    }

    #[test]
    fn a_failure_keeps_the_old_file_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_file(&path, "old").unwrap();
        let failed = replace_file(&path, |file| -> io::Result<()> {
            file.write_all(b"half")?;
            Err(io::Error::other("no space left"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no space left");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(directory.path()), ["state.json"]);
        assert!(write_file(&directory.path().join("none/state.json"), "x").is_err());
    }

    #[test]
    fn writers_of_one_file_do_not_disturb_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        let contents: Vec<String> = (0..8).map(|writer| format!("{writer}").repeat(10_000)).collect();
        std::thread::scope(|scope| {
            let path = &path;
            for text in &contents {
                scope.spawn(move || (0..20).for_each(|_| write_file(path, text).unwrap()));
            }
            for _ in 0..100 {
                if let Ok(found) = fs::read_to_string(path) {
                    assert!(contents.contains(&found));
                }
            }
        });
        assert!(contents.contains(&fs::read_to_string(&path).unwrap()));
        assert_eq!(names(directory.path()), ["state.json"]);
    }

    #[test]
    fn links_and_permissions_stay_and_devices_are_written_directly() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("state.json"), directory.path().join("link.json"));
        write_file(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_file(&link, "new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        place_file(&link, |file| file.write_all(b"placed")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        write_file(Path::new("/dev/null"), "gone").unwrap();
    }
}
