//! Finds and reads sample files.

use std::fs;
use std::path::{Path, PathBuf};

use dflop_loader::error::{Error, Result};
use dflop_loader::files::lies_inside;
use dflop_loader::shard::FIELD_BYTES_MAX;
use dflop_loader::store::file;

/// Reads a file that becomes a field; or returns the reason for skipping it, if it is not a regular file (a
/// pipe would block), cannot be read, or is longer than readers accept by default.
///
/// # Errors
/// [`Error::Storage`] if the machine has no descriptor or memory for it: the file is not at fault.
pub(super) fn read_medium(path: &Path) -> Result<Result<Vec<u8>, String>> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if !metadata.is_file() {
        return Ok(Err("not a regular file".to_owned()));
    }
    if metadata.len() > FIELD_BYTES_MAX {
        return Ok(Err(format!("{} bytes exceed the {FIELD_BYTES_MAX} of one field", metadata.len())));
    }
    match file::read(path) {
        Err(error) if file::is_shortage(&error) => Err(Error::file(path, error)),
        read => Ok(read.map_err(|error| error.to_string())),
    }
}

/// Returns the reason for not packing a file that is outside `root`, after links; `None` if it is inside.
pub(super) fn outside(root: &Path, path: &Path) -> Option<String> {
    let reason = || {
        let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
        let shown =
            |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()).display().to_string();
        let (path, root) = (shown(path), shown(root));
        format!("`{path}` lies outside of `{root}`; `allow_outside` (`--allow-outside`) packs it")
    };
    (!lies_inside(root, path)).then(reason)
}

/// Returns the path of a file named in a manifest: below `root`, also if a leading placeholder represents it,
/// unless the path is absolute.
pub(super) fn resolve_medium(root: &Path, named: &str) -> PathBuf {
    root.join(strip_placeholder(named))
}

/// Removes a leading `{name}/`, `${name}/` or `$name/` from a path.
fn strip_placeholder(named: &str) -> &str {
    let Some((first, rest)) = named.split_once('/') else { return named };
    let is_braced = first.trim_start_matches('$').starts_with('{') && first.ends_with('}');
    let is_placeholder = first.len() > 1 && (is_braced || first.starts_with('$'));
    if is_placeholder { rest.trim_start_matches('/') } else { named }
}

/// Splits a file name at the dot that starts the extension: the last dot, or the last but one if the file is
/// compressed, as in `a.txt.gz`. The extension is lower-cased; `None` if the name has none.
pub(super) fn split_extension(name: &str) -> Option<(&str, String)> {
    let (stem, extension) = name.rsplit_once('.').filter(|(stem, extension)| {
        !stem.is_empty() && !stem.ends_with('/') && !extension.is_empty() && !extension.contains('/')
    })?;
    let is_compressed = ["gz", "zst", "bz2", "xz"].iter().any(|known| extension.eq_ignore_ascii_case(known));
    let inner = if is_compressed { split_extension(stem) } else { None };
    Some(match inner {
        Some((outer_stem, inner)) if !inner.contains('.') => {
            (outer_stem, format!("{inner}.{}", extension.to_lowercase()))
        }
        _ => (stem, extension.to_lowercase()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs this test again in a separate process, which then has no descriptor left.
    #[test]
    fn a_machine_without_descriptors_is_an_error_and_no_reason_to_skip_a_file() {
        const CHILD: &str = "DFLOP_TEST_NO_DESCRIPTORS";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.txt");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_medium(&path).unwrap().unwrap(), b"text");
        assert!(read_medium(directory.path()).unwrap().is_err(), "a directory is skipped");
        if std::env::var_os(CHILD).is_none() {
            let name = "a_machine_without_descriptors_is_an_error_and_no_reason_to_skip_a_file";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let run = child.args([name, "--nocapture"]).env(CHILD, "1").output().unwrap();
            assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
            return;
        }
        let resource = rustix::process::Resource::Nofile;
        let all = rustix::process::getrlimit(resource);
        rustix::process::setrlimit(resource, rustix::process::Rlimit { current: Some(0), ..all }).unwrap();
        let (read, hashed) =
            (read_medium(&path), crate::directory::hash_names(directory.path(), false, |_| {}));
        rustix::process::setrlimit(resource, all).unwrap();
        for error in [read.unwrap_err(), hashed.unwrap_err()] {
            let text = dflop_samples::error_reason(&error);
            assert!(text.contains("open files"), "{text}");
        }
    }

    #[test]
    fn placeholders_stand_for_the_root() {
        let root = Path::new("/data");
        let table = [
            ("{data_root}/a.wav", "/data/a.wav"),
            ("$data_root/../b/a.wav", "/data/../b/a.wav"),
            ("${root}//a.wav", "/data/a.wav"),
            ("a/{b}.wav", "/data/a/{b}.wav"),
            ("$/a.wav", "/data/$/a.wav"),
            ("/abs/a.wav", "/abs/a.wav"),
        ];
        for (named, expected) in table {
            assert_eq!(resolve_medium(root, named), Path::new(expected), "{named}");
        }
    }

    #[test]
    fn the_extension_follows_the_last_dot_or_the_last_two() {
        let table = [
            ("a.JPG", Some(("a", "jpg"))),
            ("a.b.seg.png", Some(("a.b.seg", "png"))),
            ("a.b.Json.gz", Some(("a.b", "json.gz"))),
            ("a.gz", Some(("a", "gz"))),
            ("a.gz.gz", Some(("a", "gz.gz"))),
            ("a.x.gz.xz", Some(("a.x.gz", "xz"))),
            ("README", None),
            ("a.", None),
            (".gz", None),
            ("d.x/a", None),
            ("d/.gz", None),
            ("d.x/a.b", Some(("d.x/a", "b"))),
        ];
        for (name, expected) in table {
            let split = split_extension(name);
            assert_eq!(split.as_ref().map(|(stem, ext)| (*stem, ext.as_str())), expected, "{name}");
        }
    }
}
