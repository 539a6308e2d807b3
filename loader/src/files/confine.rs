//! Decides whether a name that was read from a file stays in that file's directory.
//!
//! Shard lists, splits, manifests and the indexes of other formats name files. Whoever wrote them chose the
//! names, so all names are checked here by the real location of the named file: links are followed, `..` goes
//! up from a link target. A snapshot in the Hugging Face cache consists of links into the repository's
//! `blobs`, which count as part of the snapshot.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

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
    use std::fs;
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;

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
