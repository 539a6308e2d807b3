//! Reads wids shard lists, as `widsindex create` writes them.
//!
//! `{"__kind__": "wids-shard-index-v1", "wids_version": 1, "base": …, "shardlist": [{"url", "nsamples",
//! "filesize", "md5sum"}, …], "datasets": [{"shardlist": …}, …]}`. Only the URLs are used; they are relative
//! to `base`, or to the directory of the file.

use std::path::Path;

use crate::error::{Error, Result, StorageError};
use crate::store::local::read_file;
use crate::store::redact_name;

/// Maximum size of a shard list, in bytes.
const BYTES_MAX: u64 = 1 << 30;

/// Shard in a list.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct ListedShard {
    /// Unresolved URL.
    pub url: String,
}

/// List of shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardList {
    /// Base for relative URLs, if the list declares one.
    pub base: Option<String>,
    /// Shards, in order.
    pub shards: Vec<ListedShard>,
}

#[derive(serde::Deserialize)]
struct Document {
    wids_version: Option<u64>,
    #[serde(flatten)]
    part: ListPart,
    #[serde(default)]
    datasets: Vec<ListPart>,
}

#[derive(serde::Deserialize)]
struct ListPart {
    base: Option<String>,
    source_url: Option<String>,
    #[serde(default)]
    shardlist: Vec<ListedShard>,
}

/// Reads a shard list.
///
/// # Errors
/// The reason why it is not a shard list, or has an unsupported kind.
pub fn parse_shard_list(bytes: &[u8]) -> Result<ShardList, String> {
    let document: Document = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    match document.wids_version {
        Some(1) => {}
        Some(other) => return Err(format!("expected wids_version 1, found {other}")),
        None => return Err("a shard list of wids must have a `wids_version`".to_owned()),
    }
    let mut list = ShardList { base: document.part.base, shards: document.part.shardlist };
    for part in document.datasets {
        if let Some(url) = part.source_url {
            return Err(format!(
                "it refers to another list, `{url}`; name that list as a dataset of its own"
            ));
        }
        let base = part.base.as_deref();
        list.shards.extend(part.shardlist.into_iter().map(|shard| match base {
            Some(base) => ListedShard { url: resolve(base, &shard.url) },
            None => shard,
        }));
    }
    Ok(list)
}

/// Reads the file at `path` and returns the resolved shard URLs, in order.
///
/// # Errors
/// [`Error::Storage`] if the file is not a shard list, is empty, names a stream or cannot be read.
pub(crate) fn listed_shards(path: &Path) -> Result<Vec<String>> {
    let shown = || path.display().to_string();
    let invalid = |reason: String| Error::Storage(StorageError::Index { path: shown(), reason });
    let bytes = read_file(path, BYTES_MAX)?.ok_or_else(|| invalid("no such file".to_owned()))?;
    let list = parse_shard_list(&bytes).map_err(invalid)?;
    if list.shards.is_empty() {
        return Err(invalid("it must list at least one shard".to_owned()));
    }
    if let Some(stream) = list.shards.iter().find(|shard| shard.url == "-" || shard.url.starts_with("pipe:"))
    {
        let named = redact_name(&stream.url);
        return Err(invalid(format!("it names `{named}`, but a shard list may name only files and URLs")));
    }
    Ok(list.shards.iter().map(|shard| list.resolve(path, &shard.url)).collect())
}

impl ShardList {
    /// Resolves a URL from the list at `path` to an absolute name.
    #[must_use]
    pub fn resolve(&self, path: &Path, url: &str) -> String {
        let directory = path.parent().unwrap_or(Path::new("")).to_string_lossy();
        match &self.base {
            Some(base) => resolve(&resolve(&directory, base), url),
            None => resolve(&directory, url),
        }
    }
}

fn resolve(base: &str, url: &str) -> String {
    if url.starts_with('/') || url.starts_with("file:/") || url.contains("://") {
        return url.to_owned();
    }
    if base.is_empty() {
        // A file in the current directory may be called `file:a.tar`, as in any other directory.
        return if url.starts_with("file:") { format!("./{url}") } else { url.to_owned() };
    }
    format!("{}/{url}", base.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_relative_to_the_base_or_to_the_list() {
        let list = |base: &str| {
            let text =
                format!(r#"{{"wids_version": 1{base}, "shardlist": [{{"url": "a.tar", "nsamples": 3}}]}}"#);
            let list = parse_shard_list(text.as_bytes()).unwrap();
            list.resolve(Path::new("d/list.json"), &list.shards[0].url)
        };
        assert_eq!(list(""), "d/a.tar");
        assert_eq!(list(r#", "base": "e/""#), "d/e/a.tar");
        assert_eq!(list(r#", "base": "/abs""#), "/abs/a.tar");
        assert_eq!(list(r#", "base": "s3://bucket/x""#), "s3://bucket/x/a.tar");
        let absolute = ShardList { base: None, shards: Vec::new() };
        for list in ["d/list.json", "list.json"] {
            for url in ["/x/a.tar", "file:/x/a.tar", "file:///x/a.tar", "FILE:///x/a.tar"] {
                assert_eq!(absolute.resolve(Path::new(list), url), url);
            }
        }
        assert_eq!(absolute.resolve(Path::new("d/list.json"), "file:a.tar"), "d/file:a.tar");
        assert_eq!(absolute.resolve(Path::new("list.json"), "file:a.tar"), "./file:a.tar");
    }

    #[test]
    fn parts_are_joined_and_foreign_lists_refused() {
        let text = br#"{"wids_version": 1, "datasets": [{"base": "p", "shardlist": [{"url": "a.tar"}]}]}"#;
        assert_eq!(parse_shard_list(text).unwrap().shards[0].url, "p/a.tar");
        for (text, reason) in [
            (r#"{"wids_version": 2, "shardlist": []}"#, "expected wids_version 1, found 2"),
            (r#"{"shardlist": []}"#, "must have a `wids_version`"),
            (r#"{"wids_version": 1, "datasets": [{"source_url": "x.json"}]}"#, "another list"),
            (r#"{"wids_version": 1, "shardlist": [{"url": 3}]}"#, "invalid type"),
            (r#"{"wids_version": 1, "sha"#, "EOF"),
        ] {
            let error = parse_shard_list(text.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
