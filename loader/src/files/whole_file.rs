//! Replaces files as a whole: a reader finds the old contents or the new ones, also after a crash.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::Replacement;

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
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn write_file(path: &Path, contents: &str) -> io::Result<()> {
        replace_file(path, |file| file.write_all(contents.as_bytes()))
    }

    fn names(directory: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(directory).unwrap().map(name).collect();
        names.sort();
        names
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
