//! Creates, replaces and opens files that other users could exchange, and confines names to a directory.
//!
//! Decides whether a name that was read from a file stays in that file's directory.
//!
//! Whoever may write to a directory can put a link at a name that is known beforehand, and a program that
//! opens the name then writes to the link target. A file is therefore written under a random name, which is
//! created exclusively, and renamed ([`Replacement`]). A file that has to be opened by name, such as a lock
//! file, is opened without following links, and must be a regular file ([`open_own`]). A file that the user
//! names may be a link or a device, and is opened by other means.
//!
//! Shard lists, splits, manifests and the indexes of other formats name files. Whoever wrote them chose the
//! names, so all names are checked here by the real location of the named file: links are followed, `..` goes
//! up from a link target. A snapshot in the Hugging Face cache consists of links into the repository's
//! `blobs`, which count as part of the snapshot.

use dflop_samples::file;
use rustix::fs::OFlags;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::{fs, io};
use tempfile::NamedTempFile;

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

/// Maximum number of broken links that are followed by text; a longer chain counts as outside.
const LINKS_MAX: usize = 40;

/// Returns a file's directory: `.` for a bare name, whose parent is empty and exists nowhere.
pub(crate) fn parent_directory(file: &Path) -> &Path {
    file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns whether a path is in a directory, following links. For a path that does not exist, the existing
/// part decides; a path that cannot be resolved is outside.
#[must_use]
pub fn lies_inside(directory: &Path, path: &Path) -> bool {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let (Some(directory), Some(path)) = (resolved(directory), resolved(path)) else { return false };
    path.starts_with(&directory) || blobs_directory(&directory).is_some_and(|blobs| path.starts_with(blobs))
}

/// Returns `REPOSITORY/blobs` for a directory in `REPOSITORY/snapshots/REVISION`, where `REPOSITORY` has a
/// Hugging Face cache name.
fn blobs_directory(directory: &Path) -> Option<PathBuf> {
    let snapshots =
        directory.ancestors().skip(1).find(|above| above.file_name() == Some(OsStr::new("snapshots")))?;
    let repository = snapshots.parent()?;
    let name = repository.file_name()?.to_str()?;
    ["datasets--", "models--", "spaces--"]
        .iter()
        .any(|kind| name.starts_with(kind))
        .then(|| repository.join("blobs"))
}

/// Resolves a path like the operating system: the existing part by links, the rest by text.
fn resolved(path: &Path) -> Option<PathBuf> {
    let mut known = std::path::absolute(path).ok()?;
    let mut missing: Vec<PathBuf> = Vec::new();
    let mut links = 0;
    loop {
        if let Ok(mut found) = std::fs::canonicalize(&known) {
            for part in missing.iter().rev().flat_map(|part| part.components()) {
                match part {
                    Component::ParentDir => drop(found.pop()),
                    other => found.push(other),
                }
            }
            return Some(found);
        }
        if let Ok(target) = std::fs::read_link(&known) {
            links += 1;
            if links > LINKS_MAX {
                return None;
            }
            known = known.parent()?.join(target);
            continue;
        }
        missing.push(known.components().next_back()?.as_os_str().into());
        known = known.parent()?.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use std::fs;
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

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

    #[test]
    fn a_bare_name_lies_in_the_current_directory() {
        assert_eq!(parent_directory(Path::new("list.json")), Path::new("."));
        assert_eq!(parent_directory(Path::new("d/list.json")), Path::new("d"));
        assert_eq!(parent_directory(Path::new("/list.json")), Path::new("/"));
        for directory in ["", "."] {
            assert!(lies_inside(Path::new(directory), Path::new("Cargo.toml")), "{directory}");
            for outside in ["..", "../Cargo.toml", "/etc/passwd", "src/../../x", "none/../../x"] {
                assert!(!lies_inside(Path::new(directory), Path::new(outside)), "{directory}: {outside}");
            }
        }
    }

    #[test]
    fn links_that_lead_nowhere_or_in_circles_are_judged_by_their_targets() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        fs::create_dir(&root).unwrap();
        for (link, target) in [("in", "missing.tar"), ("out", "../missing.tar"), ("a", "b"), ("b", "a")] {
            symlink(target, root.join(link)).unwrap();
        }
        let inside = ["in", "out", "a", "in/../x", "out/x"].map(|name| lies_inside(&root, &root.join(name)));
        assert_eq!(inside, [true, false, false, true, false]);
    }

    #[test]
    fn a_snapshot_of_the_hugging_face_cache_has_its_blobs() {
        let place = tempfile::tempdir().unwrap();
        let blob = |repository: &str| {
            let repository = place.path().join(repository);
            let snapshot = repository.join("snapshots/abc/data");
            fs::create_dir_all(&snapshot).unwrap();
            fs::create_dir_all(repository.join("blobs")).unwrap();
            fs::write(repository.join("blobs/1f"), "x").unwrap();
            fs::write(repository.join("refs"), "x").unwrap();
            symlink("../../../blobs/1f", snapshot.join("a.tar")).unwrap();
            symlink("../../../refs", snapshot.join("b.tar")).unwrap();
            ["a.tar", "b.tar"].map(|name| lies_inside(&snapshot, &snapshot.join(name)))
        };
        assert_eq!(blob("datasets--org--name"), [true, false]);
        assert_eq!(blob("elsewhere"), [false, false], "any other directory may be called so");
    }

    /// Directories, files and links, some of which lead out of `root`.
    fn tree() -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for directory in ["root/a/b", "root/c", "outside/d"] {
            fs::create_dir_all(place.path().join(directory)).unwrap();
        }
        for file in ["root/x", "root/a/x", "root/a/b/x", "outside/x", "outside/d/x"] {
            fs::write(place.path().join(file), file).unwrap();
        }
        let absolute = place.path().join("outside/d");
        symlink(absolute, place.path().join("root/far")).unwrap();
        for (link, target) in [
            ("root/c/up", ".."),
            ("root/near", "a/b"),
            ("root/out", "../outside"),
            ("root/a/y", "../../outside/x"),
        ] {
            symlink(target, place.path().join(link)).unwrap();
        }
        place
    }

    /// A file that can be opened is inside exactly if its canonical path is, however it is named.
    #[test]
    fn canonical_paths_decide() {
        const PARTS: [&str; 15] =
            ["a", "b", "c", "d", "x", "y", "up", "near", "far", "out", "outside", "root", "..", ".", "none"];
        let place = tree();
        let root = place.path().join("root");
        // The same directory, relative to the test's directory.
        let up: PathBuf = std::env::current_dir().unwrap().components().skip(1).map(|_| "..").collect();
        let directories = [root.clone(), up.join(root.strip_prefix("/").unwrap())];
        let canonical_root = fs::canonicalize(&root).unwrap();
        let names = (prop::collection::vec(prop::sample::select(&PARTS[..]), 0..8), 0..2_usize);
        let mut runner = TestRunner::new(ProptestConfig::with_cases(5_000));
        let check = |(parts, directory): (Vec<&str>, usize)| {
            let path = root.join(parts.join("/"));
            let is_inside = lies_inside(&directories[directory], &path);
            match fs::canonicalize(&path) {
                Ok(canonical) => prop_assert_eq!(is_inside, canonical.starts_with(&canonical_root)),
                Err(_) => prop_assert!(fs::File::open(&path).is_err()),
            }
            Ok(())
        };
        runner.run(&names, check).unwrap();
    }
}
