//! Opens local files without waiting, and rejects pipes, devices and sockets by name.
//!
//! Opening a pipe blocks until the other end is opened, and reading a pipe blocks until data arrive, so a
//! pipe in a dataset, a checkpoint or a model directory would block the reader forever. [`open`] and [`read`]
//! are for everything that a file, a directory or a list names, and for shards, indexes and models.
//! [`read_named`] is for texts that the command line names: there, `/dev/stdin` and pipes from process
//! substitutions, as in `dflop balance <(zcat instance.json.gz)`, are valid files, and the user waits as for
//! every pipe.

use std::fs::{File, FileType};
use std::io::{Error, ErrorKind, IsTerminal, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens a regular file for reading.
///
/// # Errors
/// [`ErrorKind::IsADirectory`] or [`ErrorKind::InvalidInput`] with the type that was found instead of a file,
/// or the operating system error.
pub fn open(path: &Path) -> Result<File> {
    // Checked before the file is opened, because opening a device may already have an effect.
    check(std::fs::metadata(path)?.file_type())?;
    // Opened without waiting and checked again, because the path may name a different file by now.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        // Another process holds a lease, and releases it for an open call that waits.
        Err(error) if error.kind() == ErrorKind::WouldBlock => File::open(path)?,
        opened => opened?,
    };
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a regular file.
///
/// # Errors
/// See [`open`].
pub fn read(path: &Path) -> Result<Vec<u8>> {
    to_end(open(path)?)
}

/// Reads a regular file as text.
///
/// # Errors
/// See [`open`]; [`ErrorKind::InvalidData`] if the file is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    text(read(path)?)
}

/// Reads a file, a pipe or a terminal that the command line names, up to the end.
///
/// # Errors
/// [`ErrorKind::IsADirectory`] or [`ErrorKind::InvalidInput`] with the type that was found instead, or the
/// operating system error.
pub fn read_named(path: &Path) -> Result<Vec<u8>> {
    let found = std::fs::metadata(path)?.file_type();
    if found.is_fifo() {
        return to_end(File::open(path)?);
    }
    if found.is_char_device() {
        let device = File::open(path)?;
        // Most other devices never end.
        if device.is_terminal() || path.canonicalize()? == Path::new("/dev/null") {
            return to_end(device);
        }
    }
    read(path)
}

/// Reads the input of [`read_named`] as text.
///
/// # Errors
/// See [`read_named`]; [`ErrorKind::InvalidData`] if the input is not UTF-8.
pub fn read_named_text(path: &Path) -> Result<String> {
    text(read_named(path)?)
}

/// Returns whether an error means that the machine lacks descriptors or memory, which implies nothing about
/// the file.
#[must_use]
pub fn is_shortage(error: &Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS))
}

/// Age after which a file that is being written is locked by the writer.
const LOCKED_WITHIN: Duration = Duration::from_mins(1);

/// Removes unlocked files in a directory whose names have this start and end: files that killed writers left
/// behind. A writer locks a file right after creating it.
///
/// Files that cannot be removed stay: a leftover file does no harm.
pub fn remove_abandoned(directory: &Path, start: &str, end: &str) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_named = name.to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(end));
        if is_named && let Ok(file) = open(&entry.path()) {
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|modified| modified.elapsed().ok()).unwrap_or_default();
            if age > LOCKED_WITHIN && file.try_lock().is_ok() {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn to_end(mut file: File) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}

fn check(found: FileType) -> Result<()> {
    let (kind, found) = if found.is_file() {
        return Ok(());
    } else if found.is_dir() {
        (ErrorKind::IsADirectory, "a directory")
    } else if found.is_fifo() {
        (ErrorKind::InvalidInput, "a pipe")
    } else if found.is_socket() {
        (ErrorKind::InvalidInput, "a socket")
    } else {
        (ErrorKind::InvalidInput, "a device")
    };
    Err(Error::new(kind, format!("expected a file, found {found}")))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::time::SystemTime;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("dflop-file-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    fn pipe(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }

    #[test]
    fn nothing_but_a_file_is_opened() {
        let directory = directory("kinds");
        let at = |name: &str| directory.join(name);
        pipe(&at("pipe"));
        let _listener = UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("pipe"), at("link")).unwrap();
        std::fs::write(at("file"), "text").unwrap();
        assert_eq!(read_text(&at("file")).unwrap(), "text");
        let zero = PathBuf::from("/dev/zero");
        for (path, found) in [
            (directory.clone(), "a directory"),
            (at("pipe"), "a pipe"),
            (at("link"), "a pipe"),
            (at("socket"), "a socket"),
            (zero.clone(), "a device"),
        ] {
            let error = open(&path).unwrap_err().to_string();
            assert_eq!(error, format!("expected a file, found {found}"));
        }
        for path in [&directory, &at("socket"), &zero] {
            assert!(read_named(path).unwrap_err().to_string().starts_with("expected a file"));
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn only_files_of_writers_that_were_killed_are_removed() {
        let directory = directory("abandoned");
        let make = |name: &str, age_seconds: u64| {
            let file = File::create(directory.join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age_seconds)).unwrap();
            file
        };
        for (name, age) in [(".a.json-1.partial", 100), (".a.json-2.partial", 1), (".b.json-1.partial", 100)]
        {
            make(name, age);
        }
        make(".a.json-3.other", 100);
        let written = make(".a.json-4.partial", 100);
        written.lock().unwrap();
        remove_abandoned(&directory, ".a.json-", ".partial");
        let name = |entry: Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut kept: Vec<String> = std::fs::read_dir(&directory).unwrap().map(name).collect();
        kept.sort();
        let expected = [".a.json-2.partial", ".a.json-3.other", ".a.json-4.partial", ".b.json-1.partial"];
        assert_eq!(kept, expected);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_pipe_that_the_command_line_names_is_read_to_its_end() {
        let directory = directory("named");
        let path = directory.join("pipe");
        pipe(&path);
        let writer = std::thread::spawn({
            let path = path.clone();
            move || File::options().write(true).open(path).unwrap().write_all(b"text").unwrap()
        });
        assert_eq!(read_named_text(&path).unwrap(), "text");
        writer.join().unwrap();
        assert_eq!(read_named(Path::new("/dev/null")).unwrap(), b"");
        std::fs::remove_dir_all(directory).unwrap();
    }
}
