//! Checks that a sample will be read back from a shard exactly as it was written.

use crate::error::{Error, OutputError, Result};
use crate::shard::{is_metadata, split_key};

/// Longest entry name, equal to the longest path in Linux.
const NAME_BYTES_MAX: usize = 4096;

/// Returns the entry name for a field.
pub(super) fn entry_name(key: &str, extension: &str) -> String {
    format!("{key}.{extension}")
}

/// Checks a sample that follows the sample with the key `last`, before anything is written.
pub(super) fn check_sample(key: &str, fields: &[(&str, &[u8])], last: Option<&str>) -> Result<()> {
    let refuse = |reason: String| Err(Error::Output(OutputError::Write { key: key.to_owned(), reason }));
    if let Some(reason) = key_fault(key) {
        return refuse(reason.to_owned());
    }
    if last == Some(key) {
        return refuse("the previous sample has the same key, and both would be read as one".to_owned());
    }
    if fields.is_empty() {
        return refuse("a sample must have at least one field".to_owned());
    }
    for (at, (extension, _)) in fields.iter().enumerate() {
        if fields[..at].iter().any(|(earlier, _)| earlier == extension) {
            return refuse(format!("two fields have the extension `{extension}`"));
        }
        if let Some(reason) = name_fault(key, extension) {
            return refuse(format!("field `{extension}` {reason}"));
        }
    }
    Ok(())
}

/// Returns why a key would change: tar writers and extractors normalize paths, so only normalized keys are
/// stable.
fn key_fault(key: &str) -> Option<&'static str> {
    let base = key.rsplit('/').next().unwrap_or_default();
    if base.is_empty() {
        return Some("the key must have a base name");
    }
    if base.contains('.') {
        return Some("the base name of the key has a dot, and would be read as key and extension");
    }
    if key.contains('\0') {
        return Some("the key must not contain NUL");
    }
    if key.starts_with('/') {
        return Some("the key must not be an absolute path");
    }
    let is_odd = |part: &str| matches!(part, "" | "." | "..");
    key.split('/').any(is_odd).then_some("the key must not have empty, `.` or `..` parts")
}

/// Returns why shard readers would not return `key` and `extension` unchanged.
fn name_fault(key: &str, extension: &str) -> Option<String> {
    let name = entry_name(key, extension);
    if name.len() > NAME_BYTES_MAX {
        return Some(format!("has an entry name of {} bytes, expected at most {NAME_BYTES_MAX}", name.len()));
    }
    if is_metadata(&name) {
        return Some("would be skipped as metadata: its path starts and ends with `__`".to_owned());
    }
    if extension.contains('\0') {
        return Some("must not contain NUL in its extension".to_owned());
    }
    match split_key(&name) {
        Some((read_key, read_extension)) if read_key == key && read_extension == extension => None,
        Some((read_key, read_extension)) => {
            Some(format!("would be read as key `{read_key}`, extension `{read_extension}`"))
        }
        None => Some("would not be read at all".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(key: &str, extensions: &[&str]) -> Option<String> {
        let fields: Vec<(&str, &[u8])> = extensions.iter().map(|&ext| (ext, b"x".as_slice())).collect();
        match check_sample(key, &fields, Some("before")) {
            Err(Error::Output(OutputError::Write { reason, .. })) => Some(reason),
            _ => None,
        }
    }

    #[test]
    fn keys_that_do_not_come_back_are_refused() {
        let long = "k".repeat(5000);
        let refused = [
            "",
            "a.b",
            "d/a.b",
            "d/",
            "/a",
            "../a",
            "a/../b",
            "./a",
            "a//b",
            "a\0b",
            "__meta__/a",
            "before",
            ".hidden",
            &long,
        ];
        for key in refused {
            assert!(reason(key, &["txt"]).is_some(), "{key:?} was accepted");
        }
    }

    #[test]
    fn keys_of_real_datasets_are_taken() {
        for key in ["a", "d.1/e.v2/a", "a bé", "日本", "__x", "d/__m__", "__m__", "a\\b", "-", "a\nb"] {
            assert_eq!(reason(key, &["jpg", "seg.png", "0.jpg", ""]), None, "{key:?}");
        }
    }

    #[test]
    fn extensions_that_do_not_come_back_are_refused() {
        for extensions in [&["JPG"] as &[&str], &["a/b"], &["a\0"], &["txt", "jpg", "txt"], &[]] {
            assert!(reason("a", extensions).is_some(), "{extensions:?} were accepted");
        }
        assert!(reason("__a", &["b__"]).is_some());
    }
}
