//! Lists the shards in a directory, local or in a bucket, and explains files that are no shards.

use super::access::invalid;
use super::list::Shard;
use super::table::is_table_name;
use crate::error::{Error, Result, StorageError};
use crate::store::{RemoteObject, list_directory, redact_name};
use std::collections::BTreeSet;
use std::path::Path;

/// File name endings that count as shards in a directory.
const DIRECTORY_ENDINGS: [&str; 6] = [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.zstd"];

/// Extensions of other formats, with format names and the Python package functions that convert them.
const OTHER_FORMATS: [(&str, &str, &str); 6] = [
    ("parquet", "Parquet", "from_parquet"),
    ("arrow", "an Arrow file", "from_parquet"),
    ("feather", "an Arrow file", "from_parquet"),
    ("jsonl", "JSON Lines", "from_jsonl"),
    ("ndjson", "JSON Lines", "from_jsonl"),
    ("mds", "a shard of MosaicML Streaming", "from_mds"),
];

/// Returns why a file is not read if the extension belongs to a different format.
pub(super) fn other_format(path: &Path) -> Option<String> {
    let extension = path.extension()?.to_string_lossy().to_lowercase();
    if is_table_name(&path.to_string_lossy()) {
        return None;
    }
    let (_, format, function) = OTHER_FORMATS.iter().find(|(known, ..)| **known == *extension)?;
    let path = path.display();
    Some(format!(
        "it is {format}, not a shard; `dflop pack {path} DIRECTORY` converts it (`dflop.{function}` in Python)"
    ))
}

pub(super) fn remote_shards_in(directory: &RemoteObject, shard: &Shard) -> Result<Vec<String>> {
    let urls = list_directory(directory)
        .map_err(|source| Error::Storage(StorageError::Read { shard: shard.url.to_string(), source }))?
        .into_iter()
        .filter(|url| is_shard_name(url) && !is_hidden(url))
        .collect::<Vec<_>>();
    if urls.is_empty() {
        return Err(invalid(&shard.url, "no .tar, .tar.gz, .tgz or .tar.zst object lies below it"));
    }
    check_splits(&shard.url, &urls)?;
    Ok(urls)
}

/// File name ending for a shard under construction.
pub(crate) const PARTIAL: &str = "partial";

fn is_shard_name(name: &str) -> bool {
    let lower = name.to_lowercase();
    DIRECTORY_ENDINGS.iter().any(|ending| lower.ends_with(ending)) || is_table_name(name)
}

/// Checks that the tables in a directory belong to one split, by names such as
/// `train-00000-of-00002.parquet`.
fn check_splits(directory: &str, names: &[String]) -> Result<()> {
    let bases = names.iter().filter(|name| is_table_name(name)).filter_map(|name| name.rsplit('/').next());
    let splits: BTreeSet<&str> = bases.filter_map(split_name).collect();
    let Some((first, last)) = splits.first().zip(splits.last()).filter(|(first, last)| first != last) else {
        return Ok(());
    };
    let separator = if directory.ends_with('/') { "" } else { "/" };
    let reason = format!(
        "it holds the splits `{first}` and `{last}`; name the files of one split, as in \
         `{directory}{separator}{last}-{{00000..00001}}-of-00002.parquet`"
    );
    Err(invalid(directory, reason))
}

/// Returns the split in a name such as `train-00000-of-00002.parquet`.
fn split_name(base: &str) -> Option<&str> {
    let (name, _) = base.rsplit_once('.')?;
    let (start, total) = name.rsplit_once("-of-")?;
    let (split, number) = start.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(total) && is_number(number)).then_some(split)
}

/// Returns whether a name is hidden, such as the `._a.tar` that macOS puts next to `a.tar`, or is a cache,
/// such as the `cache-0123.arrow` that `datasets` puts next to saved tables. Directory listings skip and log
/// such names.
fn is_hidden(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name);
    let is_hidden = base.starts_with('.')
        || (base.starts_with("cache-") && Path::new(base).extension().is_some_and(|end| end == "arrow"));
    if is_hidden {
        tracing::debug!(file = %redact_name(name), "a hidden file or a cache in the directory is no shard");
    }
    is_hidden
}

pub(super) fn shards_in(directory: &Path) -> Result<Vec<String>> {
    let shown = directory.display().to_string();
    let read_error = |source| Error::Storage(StorageError::Read { shard: shown.clone(), source });
    let mut paths = Vec::new();
    let (mut other, mut partial) = (None, None);
    for entry in std::fs::read_dir(directory).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if is_shard_name(&path.to_string_lossy()) {
            if is_hidden(&path.to_string_lossy()) {
                continue;
            }
            let shown = path.display().to_string();
            let path = path.into_os_string().into_string();
            paths.push(path.map_err(|_| invalid(&shown, "the name is not UTF-8; rename the shard"))?);
        } else if path.extension().is_some_and(|extension| extension == PARTIAL) {
            partial = Some(path);
        } else if let Some(extension) = path.extension().filter(|_| other.is_none()) {
            let is_known = |(known, ..): &&(&str, &str, &'static str)| extension == *known;
            other = OTHER_FORMATS.iter().find(is_known).map(|(_, format, function)| (*format, *function));
        }
    }
    paths.sort_unstable();
    if let Some(partial) = partial.filter(|_| !paths.is_empty()) {
        // Without this warning, nothing would show that shards after the finished shards are missing.
        tracing::warn!(
            partial = %partial.display(),
            "a writer of these shards is at work or was killed: the directory has the shards that it finished"
        );
    }
    if paths.is_empty() {
        let reason = other.map_or_else(
            || {
                "the directory holds no .tar, .tar.gz, .tgz or .tar.zst file; `dflop pack` makes shards of files, \
                 tables and datasets of other loaders"
                    .to_owned()
            },
            |(format, function)| {
                format!(
                    "the directory holds {format}, no shards; `dflop pack {shown} DIRECTORY` converts it \
                     (`dflop.{function}` in Python)"
                )
            },
        );
        return Err(invalid(&shown, reason));
    }
    check_splits(&shown, &paths)?;
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::expand_shards;

    #[test]
    fn files_of_other_formats_are_named_with_what_converts_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("train.parquet");
        std::fs::write(&path, "PAR1").unwrap();
        for given in [path.as_path(), directory.path()] {
            let error = expand_shards(&[given.to_str().unwrap()]).unwrap_err().to_string();
            assert!(error.contains("Parquet") && error.contains("dflop.from_parquet"), "{error}");
            assert!(error.contains(&format!("dflop pack {}", given.display())), "{error}");
        }
    }

    #[test]
    fn the_split_of_a_table_is_in_the_name() {
        for (base, split) in [
            ("train-00000-of-00002.parquet", Some("train")),
            ("a-b-00001-of-00002.parquet", Some("a-b")),
            ("0000.parquet", None),
            ("train-x-of-2.parquet", None),
            ("part-of-2.parquet", None),
        ] {
            assert_eq!(split_name(base), split, "{base}");
        }
    }

    #[test]
    fn hidden_files_of_a_directory_are_no_shards() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a.tar", "._a.tar", ".b.tar.gz", "c.TAR"] {
            std::fs::write(directory.path().join(name), b"").unwrap();
        }
        let path = directory.path().to_str().unwrap();
        let urls = |pattern: &str| -> Vec<String> {
            expand_shards(&[pattern]).unwrap().iter().map(|shard| shard.url.to_string()).collect()
        };
        assert_eq!(urls(path), [format!("{path}/a.tar"), format!("{path}/c.TAR")]);
        // A hidden file is read if it is named explicitly.
        assert_eq!(urls(&format!("{path}/._a.tar")).len(), 1);
    }
}
