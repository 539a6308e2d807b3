//! Reads Energon's dataset configuration, in YAML.
//!
//! `split_parts` lists patterns of shards by the name of their split, `exclude` shards, or single samples as
//! `SHARD/SAMPLE`.
//!
//! Supports sequences, mappings with text keys, and scalars; scalars stay texts, as names of shards are.
//! Features that those files never use are rejected: anchors, aliases (which let a small file expand without
//! bounds), tags, a second document.

use super::{CheckedSplit, Splits, invalid};
use crate::error::{Error, Result, StorageError};
use crate::shard::Expansion;
use crate::store::local::read_file;
use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};
use std::path::Path;

/// Directory of the metadata.
const DIRECTORY: &str = ".nv-meta";
/// Files with splits, in order of preference.
const SPLIT_FILES: [&str; 2] = ["split.yaml", "split.json"];
/// Longest file with splits that is read.
const SPLIT_BYTES_MAX: u64 = 64 << 20;
/// Number of directories searched for `.nv-meta`: that of the shards and those above it.
const DIRECTORIES_UP_MAX: usize = 4;

/// Named part of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EnergonSplit {
    /// Its name, such as `train`.
    name: String,
    /// Shards as paths below the directory of the dataset, in order, without excluded ones.
    shards: Vec<String>,
    /// Single samples that the file excludes, as `SHARD/SAMPLE`.
    excluded_samples: Vec<String>,
}

/// Finds the splits of the dataset to which the shards in `directory` belong; `None` if Energon left none.
pub(super) fn find(directory: &Path) -> Result<Option<Splits>> {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    for root in directory.ancestors().take(DIRECTORIES_UP_MAX) {
        if let Some(named) = splits(root)? {
            return of(root, named).map(Some);
        }
    }
    Ok(None)
}

fn of(root: &Path, named: Vec<EnergonSplit>) -> Result<Splits> {
    let checked = named.into_iter().map(|split| Ok((split.name.clone(), checked(root, split)?)));
    let splits = Splits {
        origin: root.join(DIRECTORY).display().to_string(),
        by_name: checked.collect::<Result<_>>()?,
        overlap_hint: "Energon has no word for that; state them in a `splits.json` if that is meant",
    };
    splits.check_overlaps()?;
    Ok(splits)
}

fn checked(root: &Path, split: EnergonSplit) -> Result<CheckedSplit> {
    let excluded = split.excluded_samples.iter().map(|sample| {
        let parts = sample.rsplit_once('/').map(|(shard, key)| (shard.to_owned(), key.to_owned()));
        parts
            .ok_or_else(|| invalid(format!("split `{}` excludes `{sample}`, which is no sample", split.name)))
    });
    Ok(CheckedSplit {
        excluded: excluded.collect::<Result<_>>()?,
        shards: Some(split.shards.into_iter().collect()),
        directory: Some(root.to_owned()),
        ..CheckedSplit::default()
    })
}

/// Reads the splits of the dataset in `directory`, in alphabetical order; `None` if it defines none.
///
/// # Errors
/// [`Error::Storage`] if the file does not have Energon's format or if it cannot be read.
fn splits(directory: &Path) -> Result<Option<Vec<EnergonSplit>>> {
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

/// Deepest nesting that is accepted.
const DEPTH_MAX: usize = 16;

/// Parses one document; an empty one is `Null`.
///
/// # Errors
/// The reason, with its line.
pub(super) fn parse_yaml(text: &str) -> Result<Value, String> {
    let mut open: Vec<Open> = Vec::new();
    let mut root = None;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let at_line = |what: &str| format!("line {}: {what}", span.start.line());
        let value = match event {
            Event::Scalar(_, _, 1.., _) | Event::SequenceStart(1.., _) | Event::MappingStart(1.., _) => {
                return Err(at_line("anchors are not supported"));
            }
            Event::Alias(_) => return Err(at_line("aliases are not supported")),
            Event::Scalar(.., Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err(at_line("tags are not supported"));
            }
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() == DEPTH_MAX => {
                return Err(at_line("nested too deeply"));
            }
            Event::SequenceStart(..) => {
                open.push(Open::Sequence(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Mapping(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(ended) => ended.into_value(),
                None => return Err(at_line("unexpected end of a collection")),
            },
            _ => continue,
        };
        match open.last_mut() {
            Some(parent) => parent.push(value).map_err(|what| at_line(&what))?,
            None if root.is_some() => return Err(at_line("only one document is supported")),
            None => root = Some(value),
        }
    }
    Ok(root.unwrap_or(Value::Null))
}

/// Collection that has not ended; a mapping with the key whose value follows.
enum Open {
    Sequence(Vec<Value>),
    Mapping(Map<String, Value>, Option<String>),
}

impl Open {
    fn push(&mut self, value: Value) -> Result<(), String> {
        match (self, value) {
            (Self::Sequence(items), value) => items.push(value),
            (Self::Mapping(_, key @ None), Value::String(name)) => *key = Some(name),
            (Self::Mapping(_, None), _) => return Err("a key must be a text".to_owned()),
            (Self::Mapping(entries, key), value) => {
                let name = key.take().unwrap_or_default();
                if entries.contains_key(&name) {
                    return Err(format!("key `{name}` comes twice"));
                }
                entries.insert(name, value);
            }
        }
        Ok(())
    }

    fn into_value(self) -> Value {
        match self {
            Self::Sequence(items) => Value::Array(items),
            Self::Mapping(entries, _) => Value::Object(entries),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
    fn splits_are_read_from_the_directory_of_the_metadata() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(splits(place.path()).unwrap(), None);
        std::fs::create_dir(place.path().join(DIRECTORY)).unwrap();
        let file = place.path().join(DIRECTORY).join("split.yaml");
        let text = "split_parts:\n  train:\n  - s-{0..1}.tar\n  val: []\nexclude: [s-1.tar]\n";
        std::fs::write(&file, text).unwrap();
        let splits_read = splits(place.path()).unwrap().unwrap();
        let named: Vec<_> =
            splits_read.iter().map(|split| (split.name.as_str(), split.shards.as_slice())).collect();
        assert_eq!(named, [("train", ["s-0.tar".to_owned()].as_slice()), ("val", &[])]);
        std::fs::write(&file, "split_parts: *x").unwrap();
        let error = splits(place.path()).unwrap_err().to_string();
        assert!(error.contains("split.yaml"), "{error}");
    }

    #[test]
    fn a_split_file_is_read() {
        let text =
            "split_parts:\n  train:\n  - shard-{0..1}.tar\n  - 'b: c.tar'\n  val: []\nexclude: []\n# end\n";
        let expected =
            json!({"split_parts": {"train": ["shard-{0..1}.tar", "b: c.tar"], "val": []}, "exclude": []});
        assert_eq!(parse_yaml(text).unwrap(), expected);
        assert_eq!(parse_yaml("").unwrap(), Value::Null);
    }

    #[test]
    fn what_could_be_misread_is_refused() {
        let refused = [
            ("a: &x [1]\nb: *x", "anchors"),
            ("a: !!binary aGk=", "tags"),
            ("a: 1\n---\nb: 2", "only one document"),
            ("a: 1\na: 2", "twice"),
            ("[1]: 2", "must be a text"),
            (&"[".repeat(40), "nested too deeply"),
            ("a: [1", "line"),
            ("a: b: c", "line"),
        ];
        for (text, reason) in refused {
            let error = parse_yaml(text).unwrap_err();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }
}
