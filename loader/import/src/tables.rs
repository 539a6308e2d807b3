//! Finds the tables in a directory: Hugging Face `datasets`, saved or downloaded, or plain Parquet files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::columnar::TableFile;
use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::store::file;

/// Table file extensions in a directory.
const TABLE_EXTENSIONS: [&str; 3] = ["parquet", "arrow", "feather"];
/// Maximum directory depth that is searched.
const DEPTH_MAX: usize = 8;
/// Splits, and words for them in file and directory names, as in Hugging Face.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Returns whether a directory holds a dataset that `datasets` saved with `save_to_disk`.
pub(super) fn is_saved(directory: &Path) -> bool {
    let has = |name: &str| directory.join(name).is_file();
    (has("dataset_info.json") && has("state.json")) || has("dataset_dict.json")
}

/// Returns whether a directory holds tables.
pub(super) fn has_tables(directory: &Path) -> bool {
    is_saved(directory) || !tables_below(directory).is_empty()
}

/// Lists the tables for a split of a directory, in order.
///
/// # Errors
/// [`Error::Output`] if there is more than one split and none is chosen, if the chosen split is missing, or
/// if a file that lists tables cannot be read.
pub(super) fn list_tables(directory: &Path, split: Option<&str>) -> Result<Vec<TableFile>> {
    if directory.join("dataset_dict.json").is_file() {
        let splits = read_json(&directory.join("dataset_dict.json"))?;
        let names = splits.get("splits").and_then(Value::as_array).into_iter().flatten();
        let names: Vec<String> = names.filter_map(Value::as_str).map(str::to_owned).collect();
        let name = choose(directory, &names, split)?;
        return saved_tables(&directory.join(&name), &format!("{name}/"));
    }
    if is_saved(directory) {
        return saved_tables(directory, "");
    }
    let mut by_split: BTreeMap<String, Vec<TableFile>> = BTreeMap::new();
    for path in tables_below(directory) {
        let name = path.strip_prefix(directory).unwrap_or(&path).to_string_lossy().into_owned();
        by_split.entry(named_split(&name)).or_default().push(TableFile { path, name });
    }
    if by_split.is_empty() {
        return Err(fail(directory, "no Parquet or Arrow file lies in it"));
    }
    let names: Vec<String> = by_split.keys().cloned().collect();
    let name = choose(directory, &names, split)?;
    Ok(by_split.remove(&name).unwrap_or_default())
}

/// Returns the tables that `state.json` lists.
fn saved_tables(directory: &Path, prefix: &str) -> Result<Vec<TableFile>> {
    let path = directory.join("state.json");
    let state = read_json(&path)?;
    if state.get("_indices_data_files").is_some_and(|files| files.as_array().is_some_and(|f| !f.is_empty())) {
        return Err(fail(&path, "it selects rows by indices; save it after `flatten_indices()`"));
    }
    let files = state.get("_data_files").and_then(Value::as_array).into_iter().flatten();
    let names = files.filter_map(|file| file.get("filename").and_then(Value::as_str));
    let table = |name: &str| {
        // A name that leads elsewhere could read any file.
        let is_plain = !name.contains(['/', '\\']) && name != "..";
        is_plain.then(|| TableFile { path: directory.join(name), name: format!("{prefix}{name}") })
    };
    names.map(|name| table(name).ok_or_else(|| fail(&path, "it names a file of another directory"))).collect()
}

fn read_json(path: &Path) -> Result<Value> {
    let text = file::read(path).map_err(|source| Error::file(path, source))?;
    serde_json::from_slice(&text).map_err(|error| fail(path, &format!("expected JSON: {error}")))
}

/// Returns the split to pack.
fn choose(directory: &Path, splits: &[String], wanted: Option<&str>) -> Result<String> {
    let listed = || splits.join(", ");
    match (wanted, splits) {
        (Some(wanted), _) if splits.iter().any(|split| split == wanted) => Ok(wanted.to_owned()),
        (Some(wanted), _) => Err(fail(directory, &format!("no split `{wanted}`; it has {}", listed()))),
        (None, [only]) => Ok(only.clone()),
        (None, _) => Err(fail(
            directory,
            &format!("it has the splits {}; choose one with `split` (`--split`)", listed()),
        )),
    }
}

/// Returns all table paths below a directory, in order; links to directories are not followed.
fn tables_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![(directory.to_owned(), 0)];
    while let Some((directory, depth)) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let is_hidden = name.to_string_lossy().starts_with('.');
            if is_hidden {
                continue;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) && depth < DEPTH_MAX {
                directories.push((path, depth + 1));
            } else if path.extension().is_some_and(|of| TABLE_EXTENSIONS.iter().any(|known| of == *known))
                && path.is_file()
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns whether a directory with this name holds a split.
pub(super) fn is_split(name: &str) -> bool {
    SPLITS.iter().any(|(_, words)| words.contains(&name))
}

/// Returns the split in a table path, `train` if the path names none.
fn named_split(name: &str) -> String {
    let parts: Vec<&str> = name.rsplit('/').collect();
    for part in parts {
        let words = part.split(|letter: char| !letter.is_alphanumeric());
        for word in words {
            let split = SPLITS.iter().find(|(_, words)| words.contains(&word));
            if let Some((split, _)) = split {
                return (*split).to_owned();
            }
        }
        // `NAME-00000-of-00012.parquet` is the form for any other split.
        if let Some(split) = numbered(part) {
            return split.to_owned();
        }
    }
    SPLITS[0].0.to_owned()
}

/// Returns the name before the number in `NAME-00003-of-00012.parquet`.
fn numbered(name: &str) -> Option<&str> {
    let (head, _) = name.split_once("-of-")?;
    let (split, number) = head.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(split)
}

fn fail(path: &Path, reason: &str) -> Error {
    Error::Output(OutputError::Pack { path: path.display().to_string(), reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_named_by_files_and_directories() {
        let table = [
            ("data/train-00000-of-00002.parquet", "train"),
            ("default/validation/0000.parquet", "validation"),
            ("data/dev.parquet", "validation"),
            ("test.arrow", "test"),
            ("data/bonus-00003-of-00012.parquet", "bonus"),
            ("data/part.0.parquet", "train"),
            ("train/test-00000-of-00001.parquet", "test"),
        ];
        for (name, split) in table {
            assert_eq!(named_split(name), split, "{name}");
        }
    }
}
