//! Groups tar entries into samples.
//!
//! A *sample* is a run of consecutive entries in a shard that share a *key*: the entry path up to the first
//! dot in the file name (the WebDataset convention). Order is kept; payloads are moved, never copied. Entries
//! come from [`super::tar`]; samples go to [`crate::shard`].

use dflop_samples::{RawField, RawSample};

use super::tar::Entry;

/// Splits an entry path into key and extension; `None` if it is not a field path.
///
/// The key is the directories and the base name up to the first dot, the extension is the rest, lower-cased.
/// A base name that starts with a dot has no key: below a directory the key is then that directory with its
/// slash, at the root there is none.
///
/// # Source
/// The expression `^((?:.*/|)[^.]+)[.]([^/]*)$` of the webdataset package, matched without a regex.
#[must_use]
pub fn split_key(path: &str) -> Option<(&str, String)> {
    let base_start = path.rfind('/').map_or(0, |slash| slash + 1);
    let (directories, base) = path.split_at(base_start);
    let dot = base_start + base.find('.')?;
    if dot == base_start && !ends_with_dotless_directory(directories) {
        return None;
    }
    Some((&path[..dot], path[dot + 1..].to_lowercase()))
}

/// Returns whether the last component of `directories` (with its slash) can replace a base name.
fn ends_with_dotless_directory(directories: &str) -> bool {
    let Some(inner) = directories.strip_suffix('/') else { return false };
    let start = inner.rfind('/').map_or(0, |slash| slash + 1);
    !inner[start..].contains('.')
}

/// Returns whether webdataset treats the path as shard metadata instead of a field.
#[must_use]
pub fn is_metadata(path: &str) -> bool {
    let is_root_marker = !path.contains('/') && path.starts_with("__") && path.ends_with("__");
    let first = path.split('/').next().unwrap_or_default();
    is_root_marker || (first.len() >= 4 && first.starts_with("__") && first.ends_with("__"))
}

/// Sample, or the reason why the entries do not form a sample.
pub type SampleGroup = Result<RawSample, DuplicateField>;

/// Two entries in a sample with the same extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DuplicateField {
    /// Sample key; the whole sample is dropped.
    pub key: String,
    /// Repeated extension.
    pub field: String,
    /// Offset of the second entry header, in bytes.
    pub offset: u64,
}

/// Collects entries until the key changes.
#[derive(Debug)]
pub struct Grouper {
    shard: std::sync::Arc<str>,
    current: Option<RawSample>,
    duplicate: Option<DuplicateField>,
}

impl Grouper {
    /// Starts a shard, whose URL is stored in every sample.
    #[must_use]
    pub fn new(shard: std::sync::Arc<str>) -> Self {
        Self { shard, current: None, duplicate: None }
    }

    /// Adds the next entry; returns the completed sample, if any.
    pub fn push(&mut self, entry: &Entry, payload: RawPayload) -> Option<SampleGroup> {
        if is_metadata(&entry.name) {
            return None;
        }
        let (key, extension) = split_key(&entry.name)?;
        let is_same = self.current.as_ref().is_some_and(|sample| sample.key == key);
        let ended = if is_same { None } else { self.finish() };
        let sample = self.current.get_or_insert_with(|| RawSample {
            key: key.to_owned(),
            shard: self.shard.clone(),
            offset: entry.header_offset,
            epoch: 0,
            fields: Vec::with_capacity(4),
        });
        if sample.field(&extension).is_some() {
            let (key, field) = (sample.key.clone(), extension);
            self.duplicate.get_or_insert(DuplicateField { key, field, offset: entry.header_offset });
        } else {
            let (offset, bytes) = (entry.payload_offset, entry.bytes);
            sample.fields.push(RawField { extension: extension.into(), offset, bytes, payload, size: None });
        }
        ended
    }

    /// Ends the shard; returns the last sample, if any.
    pub fn finish(&mut self) -> Option<SampleGroup> {
        let sample = self.current.take()?;
        Some(self.duplicate.take().map_or(Ok(sample), Err))
    }

    /// Returns the key of the sample under construction.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.current.as_ref().map(|sample| sample.key.as_str())
    }

    /// Discards the sample under construction, which a fault has truncated; returns the key.
    pub fn abandon(&mut self) -> Option<String> {
        self.duplicate = None;
        Some(self.current.take()?.key)
    }
}

/// Entry payload, or `None` if it exceeds the limit.
pub type RawPayload = Option<bytes::Bytes>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_split_as_webdataset_splits_them() {
        let table = [
            ("a/b.c/d.e.f", Some(("a/b.c/d", "e.f"))),
            ("d/.h.j", Some(("d/", "h.j"))),
            ("x.", Some(("x", ""))),
            ("./a.JPG", Some(("./a", "jpg"))),
            ("x.y/z/.c.d", Some(("x.y/z/", "c.d"))),
            ("a.b/.c.d", None),
            (".a.b", None),
            ("a", None),
            ("a/b", None),
            ("a.b/c", None),
            ("./.a.b", None),
        ];
        for (path, expected) in table {
            let split = split_key(path);
            assert_eq!(split.as_ref().map(|(key, ext)| (*key, ext.as_str())), expected, "{path}");
        }
    }

    #[test]
    fn metadata_names_are_those_of_webdataset() {
        for path in ["__meta__", "__dir__/x.json", "__a.b__", "____", "__"] {
            assert!(is_metadata(path), "{path}");
        }
        for path in ["__m__.json", "__x.jpg", "d/__m__", "a__/x.jpg", "___/x.jpg"] {
            assert!(!is_metadata(path), "{path}");
        }
    }
}
