//! Expands `~` and wildcards in local names: `*` and `?` inside a name, `**` over directories.
//!
//! The name of an existing file is never expanded, and URLs are not: in an address `?` begins the query.

use std::io;
use std::path::{Path, PathBuf};

/// Returns a name with the home directory in place of `~`, where the name starts with it.
pub(super) fn with_home(name: String) -> String {
    let rest = match name.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
        _ => return name,
    };
    match std::env::home_dir() {
        Some(home) if !Path::new(&name).exists() => format!("{}{rest}", home.display()),
        _ => name,
    }
}

/// Returns whether a name has wildcards.
pub(super) fn has_wildcards(name: &str) -> bool {
    name.contains(['*', '?'])
}

/// Lists the files that match a pattern, sorted; hidden files and directories match only where the pattern
/// names the dot.
///
/// # Errors
/// The operating system error for a directory that cannot be listed; a missing directory has no files.
pub(super) fn matching_files(pattern: &str) -> io::Result<Vec<PathBuf>> {
    let (root, pattern) = match pattern.strip_prefix('/') {
        Some(rest) => (PathBuf::from("/"), rest),
        None => (PathBuf::new(), pattern),
    };
    let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    let mut found = Vec::new();
    collect(&root, &parts, &mut found)?;
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn collect(directory: &Path, parts: &[&str], found: &mut Vec<PathBuf>) -> io::Result<()> {
    let Some((part, rest)) = parts.split_first() else {
        if directory.is_file() {
            found.push(directory.to_owned());
        }
        return Ok(());
    };
    if !has_wildcards(part) {
        return collect(&directory.join(part), rest, found);
    }
    if *part == "**" {
        collect(directory, rest, found)?;
    }
    for name in names_in(directory)? {
        let path = directory.join(&name);
        let is_hidden = name.starts_with('.') && !part.starts_with('.');
        if is_hidden || !matches(part.as_bytes(), name.as_bytes()) {
            continue;
        }
        if *part != "**" {
            collect(&path, rest, found)?;
        } else if path.is_dir() && !path.is_symlink() {
            // A link to a directory above would never end.
            collect(&path, parts, found)?;
        }
    }
    Ok(())
}

/// Returns whether a path matches a pattern, part by part; hidden parts match as in [`matching_files`].
pub(super) fn matches_path(pattern: &str, path: &str) -> bool {
    fn all_match(pattern: &[&str], path: &[&str]) -> bool {
        match (pattern.split_first(), path.split_first()) {
            (None, _) => path.is_empty(),
            (Some((&"**", rest)), None) => all_match(rest, path),
            (Some((&"**", rest)), Some((_, behind))) => all_match(rest, path) || all_match(pattern, behind),
            (Some(_), None) => false,
            (Some((part, rest)), Some((name, behind))) => {
                let is_hidden = name.starts_with('.') && !part.starts_with('.');
                !is_hidden && matches(part.as_bytes(), name.as_bytes()) && all_match(rest, behind)
            }
        }
    }
    let (pattern, path): (Vec<&str>, Vec<&str>) = (pattern.split('/').collect(), path.split('/').collect());
    all_match(&pattern, &path)
}

/// Returns the UTF-8 names in a directory; none if it is missing or a file.
fn names_in(directory: &Path) -> io::Result<Vec<String>> {
    let listed = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let entries = match std::fs::read_dir(listed) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    entries.filter_map(|entry| entry.map(|entry| entry.file_name().into_string().ok()).transpose()).collect()
}

/// Returns whether a name matches a pattern in which `*` stands for any characters and `?` for one.
#[must_use]
pub fn matches_name(pattern: &str, name: &str) -> bool {
    matches(pattern.as_bytes(), name.as_bytes())
}

/// Returns whether a name matches a pattern in which `*` stands for any bytes and `?` for one character.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name, mut star) = (0, 0, None);
    while in_name < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, in_name));
                at += 1;
            }
            Some(b'?') => {
                at += 1;
                in_name += 1;
                while name.get(in_name).is_some_and(|byte| byte & 0xc0 == 0x80) {
                    in_name += 1;
                }
            }
            Some(byte) if *byte == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => match &mut star {
                Some((star_at, tried)) => {
                    *tried += 1;
                    (at, in_name) = (*star_at + 1, *tried);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_match_any_bytes_and_question_marks_one_character() {
        for (pattern, name, is_match) in [
            ("*.tar", "a.tar", true),
            ("*.tar", "a.tar.gz", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("?.tar", "ü.tar", true),
            ("?.tar", "ab.tar", false),
            ("**", "anything", true),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn paths_match_part_by_part() {
        for (pattern, path, is_match) in [
            ("d/*.parquet", "d/a.parquet", true),
            ("d/*.parquet", "d/e/a.parquet", false),
            ("**/*.parquet", "d/e/a.parquet", true),
            ("d/**/a.parquet", "d/a.parquet", true),
            ("**", "d/.e", true),
            ("*/*", "d/.e", false),
        ] {
            assert_eq!(matches_path(pattern, path), is_match, "{pattern} {path}");
        }
    }

    #[test]
    fn files_match_in_order_and_hidden_ones_do_not() {
        let place = tempfile::tempdir().unwrap();
        for name in ["b/1.tar", "a/2.tar", "a/1.tar", "a/.3.tar", ".c/1.tar", "a/deep/1.tar", "1.tar"] {
            let path = place.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let found = |pattern: &str| {
            let files = matching_files(&format!("{}/{pattern}", place.path().display())).unwrap();
            let relative = |path: &PathBuf| path.strip_prefix(place.path()).unwrap().display().to_string();
            files.iter().map(relative).collect::<Vec<_>>()
        };
        assert_eq!(found("*/*.tar"), ["a/1.tar", "a/2.tar", "b/1.tar"]);
        assert_eq!(found("**/1.tar"), ["1.tar", "a/1.tar", "a/deep/1.tar", "b/1.tar"]);
        assert_eq!(found("a/.*.tar"), ["a/.3.tar"]);
        assert_eq!(found("none/*.tar"), [""; 0]);
    }

    #[test]
    fn a_tilde_is_the_home_directory() {
        let home = std::env::home_dir().unwrap().display().to_string();
        assert_eq!(with_home("~/a.tar".to_owned()), format!("{home}/a.tar"));
        for name in ["~user/a.tar", "a~/b.tar", "x"] {
            assert_eq!(with_home(name.to_owned()), name);
        }
    }
}
