//! Reads the files that Megatron-Energon's `energon prepare` writes next to shards.
//!
//! | file | content |
//! | --- | --- |
//! | `SHARD.tar.idx` | little-endian u64: the offset of each sample's first header, then the end of the last sample |
//! | `.nv-meta/.info.json` | `shard_counts`: samples of every shard, by its path below the directory |
//! | `.nv-meta/split.yaml`, or `split.json` | `split_parts`: patterns of shards by name; `exclude`: shards, or `SHARD/SAMPLE` |
//!
//! `.nv-meta/index.sqlite` holds the same offsets once more, by key; it is not read.

use std::path::Path;

use serde_json::Value;

use super::yaml::parse_yaml;
use crate::error::{Error, Result, StorageError};
use crate::shard::Expansion;
use crate::store::local::read_file;

/// Directory of the metadata.
pub(super) const DIRECTORY: &str = ".nv-meta";
/// Files with splits, in order of preference.
const SPLIT_FILES: [&str; 2] = ["split.yaml", "split.json"];
/// Longest file with splits that is read.
const SPLIT_BYTES_MAX: u64 = 64 << 20;

/// Named part of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnergonSplit {
    /// Its name, such as `train`.
    pub name: String,
    /// Shards as paths below the directory of the dataset, in order, without excluded ones.
    pub shards: Vec<String>,
    /// Single samples that the file excludes, as `SHARD/SAMPLE`.
    pub excluded_samples: Vec<String>,
}

/// Reads the splits of the dataset in `directory`, in alphabetical order; `None` if it defines none.
///
/// # Errors
/// [`Error::Storage`] if the file does not have Energon's format or if it cannot be read.
pub fn splits(directory: &Path) -> Result<Option<Vec<EnergonSplit>>> {
    for name in SPLIT_FILES {
        let path = directory.join(DIRECTORY).join(name);
        let Some(text) = read_file(&path, SPLIT_BYTES_MAX)? else { continue };
        let shown = path.display().to_string();
        let parsed = parse_splits(&text, name.ends_with("yaml"));
        return parsed
            .map(Some)
            .map_err(|reason| Error::Storage(StorageError::Index { path: shown, reason }));
    }
    Ok(None)
}

fn parse_splits(text: &[u8], is_yaml: bool) -> Result<Vec<EnergonSplit>, String> {
    let document: Value = if is_yaml {
        parse_yaml(std::str::from_utf8(text).map_err(|error| error.to_string())?)?
    } else {
        serde_json::from_slice(text).map_err(|error| error.to_string())?
    };
    let parts = document.get("split_parts").and_then(Value::as_object);
    let parts = parts.ok_or("a mapping `split_parts` is required")?;
    let excluded = match document.get("exclude") {
        None | Some(Value::Null) => Vec::new(),
        Some(patterns) => names(patterns, "exclude")?,
    };
    let split = |(name, patterns): (&String, &Value)| {
        let mut shards = names(patterns, name)?;
        shards.retain(|shard| !excluded.contains(shard));
        let samples = excluded.iter().filter(|excluded| {
            let shard = excluded.rsplit_once('/').map(|(shard, _)| shard);
            shard.is_some_and(|shard| shards.iter().any(|listed| listed == shard))
        });
        Ok(EnergonSplit { name: name.clone(), excluded_samples: samples.cloned().collect(), shards })
    };
    parts.iter().map(split).collect()
}

/// Expands a list of patterns.
fn names(patterns: &Value, of: &str) -> Result<Vec<String>, String> {
    let patterns = patterns.as_array().ok_or_else(|| format!("`{of}` must be a list"))?;
    let mut expansion = Expansion::default();
    for pattern in patterns {
        let pattern = pattern.as_str().ok_or_else(|| format!("`{of}` must list names"))?;
        expansion.add(pattern).map_err(|error| error.to_string())?;
    }
    Ok(expansion.into_names())
}

/// Reads `SHARD.tar.idx`: the offsets of all samples' first headers, then the end of the last sample.
///
/// # Errors
/// The reason why it does not match a shard of `shard_bytes`.
pub fn parse_tar_index(bytes: &[u8], shard_bytes: u64) -> Result<Vec<u64>, String> {
    let (values, rest) = bytes.as_chunks::<8>();
    if values.is_empty() || !rest.is_empty() {
        return Err(format!("expected 64-bit offsets, found {} bytes", bytes.len()));
    }
    let offsets: Vec<u64> = values.iter().map(|value| u64::from_le_bytes(*value)).collect();
    if let Some(outside) = offsets.iter().find(|offset| **offset > shard_bytes) {
        return Err(format!("offset {outside} lies outside a shard of {shard_bytes} bytes"));
    }
    if !offsets.is_sorted_by(|earlier, later| earlier < later) {
        return Err("the offsets must ascend".to_owned());
    }
    Ok(offsets)
}

/// Reads `.info.json`: samples by shard path.
///
/// # Errors
/// The reason why it is not such a file.
pub fn parse_info(bytes: &[u8]) -> Result<Vec<(String, u64)>, String> {
    #[derive(serde::Deserialize)]
    struct Info {
        shard_counts: std::collections::BTreeMap<String, u64>,
    }
    let info: Info = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(info.shard_counts.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_expanded_and_excluded_shards_left_out() {
        let text = b"split_parts:\n  train: ['s-{0..3}.tar']\n  val: [t.tar]\n\
            exclude: ['s-{1..2}.tar', s-0.tar/7, t.tar/3]\n";
        let parts = parse_splits(text, true).unwrap();
        let train = EnergonSplit {
            name: "train".into(),
            shards: vec!["s-0.tar".into(), "s-3.tar".into()],
            excluded_samples: vec!["s-0.tar/7".into()],
        };
        assert_eq!(parts[0], train);
        assert_eq!(
            (parts[1].name.as_str(), parts[1].excluded_samples.as_slice()),
            ("val", ["t.tar/3".into()].as_slice())
        );
        let json = br#"{"split_parts": {"train": ["a.tar"]}}"#;
        assert_eq!(parse_splits(json, false).unwrap()[0].shards, ["a.tar"]);
    }

    #[test]
    fn what_is_no_split_file_says_why() {
        for (text, reason) in [
            ("a: 1", "a mapping `split_parts` is required"),
            ("split_parts: [a]", "a mapping"),
            ("split_parts: {train: a.tar}", "`train` must be a list"),
            ("split_parts: {train: [[a]]}", "must list names"),
            ("split_parts: {train: ['{0..99999999}']}", "too many"),
            ("split_parts: {train: [a]}\nexclude: a", "`exclude` must be a list"),
            ("split_parts: {train: [a", "line"),
        ] {
            let error = parse_splits(text.as_bytes(), true).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn tar_indexes_that_cannot_fit_are_refused() {
        let index =
            |offsets: &[u64]| offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(parse_tar_index(&index(&[0, 1024, 2048]), 4096).unwrap(), [0, 1024, 2048]);
        let swapped: Vec<u8> = [0_u64, 1024].iter().flat_map(|offset| offset.to_be_bytes()).collect();
        for (bytes, reason) in [
            (index(&[]), "expected 64-bit offsets"),
            (index(&[0, 512])[..12].to_vec(), "expected 64-bit offsets"),
            (index(&[0, 8192]), "outside"),
            (swapped, "outside"),
            (index(&[0, 1024, 1024]), "ascend"),
        ] {
            let error = parse_tar_index(&bytes, 4096).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
