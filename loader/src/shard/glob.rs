//! Finds the files that match a shell pattern, for patterns that no shell has expanded.
//!
//! `*` matches any characters in a name, `?` one character, `[a-z]` and `[!a-z]` one character in a set, `**`
//! any number of directories. As in a shell, names that start with a dot match only a pattern that starts
//! with a dot, and matches are sorted by name.

use std::io;
use std::path::{Path, PathBuf};

/// Maximum number of directory entries that are looked at.
const ENTRIES_MAX: usize = 10_000_000;

/// Whether a name contains wildcards.
pub(super) fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

/// Returns the existing paths that match a pattern, sorted.
///
/// # Errors
/// An error of a directory that cannot be listed, or too many entries.
pub(super) fn matches(pattern: &str) -> io::Result<Vec<PathBuf>> {
    let start = if pattern.starts_with('/') { PathBuf::from("/") } else { PathBuf::new() };
    let mut search = Search { found: Vec::new(), entries: 0 };
    let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    search.descend(&start, &parts)?;
    search.found.sort_unstable();
    // `**` may reach a file in several ways.
    search.found.dedup();
    Ok(search.found)
}

struct Search {
    found: Vec<PathBuf>,
    entries: usize,
}

impl Search {
    /// Collects the paths below `directory` whose names match the parts, one after the other.
    fn descend(&mut self, directory: &Path, parts: &[&str]) -> io::Result<()> {
        let Some((part, rest)) = parts.split_first() else {
            self.found.push(directory.to_owned());
            return Ok(());
        };
        if !is_pattern(part) {
            let path = directory.join(part);
            return if path.exists() { self.descend(&path, rest) } else { Ok(()) };
        }
        if *part == "**" {
            self.descend(directory, rest)?;
        }
        for (name, path) in self.names(directory)? {
            if *part == "**" {
                // Links to directories are not followed, because they may lead back.
                let is_directory = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
                if is_directory && !name.starts_with('.') {
                    self.descend(&path, parts)?;
                }
            } else if has_form(&name, part) && (rest.is_empty() || path.is_dir()) {
                self.descend(&path, rest)?;
            }
        }
        Ok(())
    }

    /// Returns the names in a directory with their paths.
    fn names(&mut self, directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
        let listed = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(listed)? {
            self.entries += 1;
            if self.entries > ENTRIES_MAX {
                return Err(io::Error::other(format!("more than {ENTRIES_MAX} files were looked at")));
            }
            // A name that is not UTF-8 matches no pattern.
            if let Ok(name) = entry?.file_name().into_string() {
                let path = directory.join(&name);
                names.push((name, path));
            }
        }
        Ok(names)
    }
}

/// Returns whether a file name has the form of a pattern without slashes.
fn has_form(name: &str, pattern: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let (name, pattern): (Vec<char>, Vec<char>) = (name.chars().collect(), pattern.chars().collect());
    let (mut at, mut from) = (0, 0);
    // Place after the last `*`, and the place in the name from which the rest was tried last.
    let mut again: Option<(usize, usize)> = None;
    while at < name.len() {
        if pattern.get(from) == Some(&'*') {
            again = Some((from + 1, at));
            from += 1;
        } else if let Some(next) = accepted(&pattern, from, name[at]) {
            (from, at) = (next, at + 1);
        } else if let Some((rest, tried)) = again {
            (from, at) = (rest, tried + 1);
            again = Some((rest, at));
        } else {
            return false;
        }
    }
    pattern[from..].iter().all(|character| *character == '*')
}

/// Returns the place after the pattern's next element if it accepts a character.
fn accepted(pattern: &[char], from: usize, character: char) -> Option<usize> {
    match *pattern.get(from)? {
        '?' => Some(from + 1),
        '[' => match set(&pattern[from..]) {
            Some((length, set)) => is_in(set, character).then_some(from + length),
            // A bracket that nothing closes is a character.
            None => (character == '[').then_some(from + 1),
        },
        own => (own == character).then_some(from + 1),
    }
}

/// Returns the length and the content of a set, which may start with `]`.
fn set(pattern: &[char]) -> Option<(usize, &[char])> {
    let first = if matches!(pattern.get(1), Some('!' | '^')) { 2 } else { 1 };
    let end = first + 1 + pattern.get(first + 1..)?.iter().position(|character| *character == ']')?;
    Some((end + 1, &pattern[1..end]))
}

fn is_in(set: &[char], character: char) -> bool {
    let (is_inverted, mut set) = match set {
        ['!' | '^', rest @ ..] => (true, rest),
        set => (false, set),
    };
    while let [first, rest @ ..] = set {
        let (last, after) = match rest {
            ['-', last, after @ ..] => (last, after),
            _ => (first, rest),
        };
        if (*first..=*last).contains(&character) {
            return !is_inverted;
        }
        set = after;
    }
    is_inverted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_those_of_a_shell() {
        for (pattern, accepted, refused) in [
            ("*.tar", &["a.tar", "00.tar"][..], &["a.tar.gz", ".a.tar", "a.txt"][..]),
            ("a*b*c", &["abc", "aXbYbc"], &["ab", "abcd"]),
            ("0?[0-4].tar", &["010.tar", "0x4.tar"], &["015.tar", "01.tar"]),
            ("[!a]x", &["bx"], &["ax", "x"]),
            ("[]x]", &["]", "x"], &["y"]),
            ("[a", &["[a"], &["a"]),
            (".*", &[".a"], &["a"]),
            ("[a-]", &["a", "-"], &["b"]),
        ] {
            for name in accepted {
                assert!(has_form(name, pattern), "{name} has the form {pattern}");
            }
            for name in refused {
                assert!(!has_form(name, pattern), "{name} does not have the form {pattern}");
            }
        }
    }

    #[test]
    fn long_names_take_no_exponential_time() {
        assert!(!has_form(&"a".repeat(1 << 12), &"*a".repeat(64).replace("*a", "*aa*b")));
    }

    #[test]
    fn matches_are_sorted_and_reach_into_directories() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b/1.tar", "a/0.tar", "a/deep/2.tar", "a/.hidden/3.tar", "a/4.txt"] {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let found = |pattern: &str| {
            let start = format!("{}/", directory.path().display());
            let found = matches(&format!("{start}{pattern}")).unwrap();
            found.iter().map(|path| path.display().to_string().replace(&start, "")).collect::<Vec<_>>()
        };
        assert_eq!(found("*/*.tar"), ["a/0.tar", "b/1.tar"]);
        assert_eq!(found("**/*.tar"), ["a/0.tar", "a/deep/2.tar", "b/1.tar"]);
        assert_eq!(found("a/*"), ["a/0.tar", "a/4.txt", "a/deep"]);
        assert_eq!(found("c*/*.tar"), [""; 0]);
    }
}
