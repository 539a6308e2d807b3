//! Detects the source format, and passes the entries to a packer.

use std::fs;
use std::io::{BufReader, Read};
use std::path::Path;

use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::store::file;
use serde_json::{Map, Value};

use super::columnar::{Columnar, TableFile, pack_files};
use super::directory::pack_directory;
use super::document::{open_text, pack_document, pack_lines, pack_table, read_line};
use super::options::{CONVERTED, PackOptions, SourceFormat, conversion};
use super::packer::Packer;
use super::record::outside;
use super::tables::{has_tables, list_tables};

/// Maximum length of an `index.json` that is read.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// Source with format and files, if files have to be found first.
pub(super) struct Source {
    pub(super) format: SourceFormat,
    pub(super) tables: Vec<TableFile>,
}

impl Source {
    /// Detects the source format and finds tables.
    pub(super) fn open(path: &Path, options: &PackOptions) -> Result<Self> {
        let format = options.format.map_or_else(|| detect(path), Ok)?;
        let mut tables = Vec::new();
        if format == SourceFormat::Table {
            if path.is_dir() {
                tables = list_tables(path, options.split.as_deref())?;
                let is_checked = |_: &&TableFile| !options.is_outside_allowed;
                if let Some(reason) =
                    tables.iter().filter(is_checked).find_map(|table| outside(path, &table.path))
                {
                    return Err(Error::Output(OutputError::Pack {
                        path: path.display().to_string(),
                        reason,
                    }));
                }
            } else {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                tables.push(TableFile { path: path.to_owned(), name });
            }
        } else if options.split.is_some() {
            let reason = format!("a source of the format {format} has no splits; leave it out");
            return Err(Error::Config { setting: "split", reason });
        }
        Ok(Self { format, tables })
    }

    /// Passes all entries to a packer.
    pub(super) fn pack(&self, path: &Path, options: &PackOptions, packer: &mut Packer<'_>) -> Result<()> {
        packer.enter(path, options);
        match self.format {
            SourceFormat::Files => pack_directory(path, packer),
            SourceFormat::Jsonl => pack_lines(path, packer),
            SourceFormat::Json => pack_document(path, packer),
            SourceFormat::Csv => pack_table(path, packer),
            SourceFormat::Table => pack_files(&self.tables, packer),
        }
    }
}

/// Detects the format from the path and the first bytes.
///
/// # Errors
/// [`Error::Storage`] if the source cannot be read, [`Error::Output`] if the format is not known.
fn detect(path: &Path) -> Result<SourceFormat> {
    let unreadable = |source| Error::file(path, source);
    let fail = |reason: &str| {
        Err(Error::Output(OutputError::Pack { path: path.display().to_string(), reason: reason.to_owned() }))
    };
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if metadata.is_dir() {
        if let Some((format, function)) = converted_format(path) {
            return fail(&conversion(format, function));
        }
        return Ok(if has_tables(path) { SourceFormat::Table } else { SourceFormat::Files });
    }
    if metadata.is_file() {
        if Columnar::of(path).map_err(unreadable)?.is_some() {
            return Ok(SourceFormat::Table);
        }
        if has_extension(path, &["csv"]) {
            return Ok(SourceFormat::Csv);
        }
        if let Some(source) = sniff_json(path)? {
            return Ok(source);
        }
        if has_extension(path, &["tar", "tgz"]) || path.to_string_lossy().contains(".tar.") {
            return fail("it is a shard already; pass it to the other commands as it is");
        }
    }
    fail("expected a directory, JSON, JSON Lines, Parquet, Arrow or a `.csv` file")
}

/// Recognizes a directory that the Python package converts by its `index.json`; returns format and function.
fn converted_format(directory: &Path) -> Option<(&'static str, &'static str)> {
    let index = file::open(&directory.join("index.json")).ok()?.take(INDEX_BYTES_MAX);
    let index: Value = serde_json::from_reader(BufReader::new(index)).ok()?;
    let [mds, litdata] = CONVERTED;
    if index.get("chunks").is_some_and(Value::is_array) && index.get("config").is_some() {
        return Some(litdata);
    }
    let shard = index.get("shards")?.get(0)?;
    (shard.get("format").and_then(Value::as_str) == Some("mds")).then_some(mds)
}

/// Distinguishes a document from JSON Lines. An array is a document. An object is the first of many lines if
/// it ends with the line, unless all values are objects, as in an object of id → entry.
fn sniff_json(path: &Path) -> Result<Option<SourceFormat>> {
    let unreadable = |source| Error::file(path, source);
    let mut reader = open_text(path).map_err(unreadable)?;
    let mut line = Vec::new();
    let is_whole = loop {
        let read = read_line(&mut reader, &mut line).map_err(unreadable)?;
        if !line.trim_ascii().is_empty() || read.is_none() {
            break read == Some(true);
        }
    };
    let is_lines = match line.trim_ascii().first() {
        Some(b'{') if is_whole => match serde_json::from_slice::<Map<String, Value>>(&line) {
            Ok(object) => object.is_empty() || !object.values().all(Value::is_object),
            // A damaged first line decides nothing, so the extension does.
            Err(_) => has_extension(path, &["jsonl", "ndjson"]),
        },
        Some(b'[' | b'{') => false,
        _ => return Ok(None),
    };
    Ok(Some(if is_lines { SourceFormat::Jsonl } else { SourceFormat::Json }))
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().unwrap_or_default();
    extensions.iter().any(|known| extension.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::error::StorageError;

    fn detected(name: &str, content: &str) -> Option<SourceFormat> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        detect(&path).ok()
    }

    #[test]
    fn sources_are_told_by_what_they_are() {
        let table = [
            ("a.json", "[{\"id\": 1}]", Some(SourceFormat::Json)),
            ("a.jsonl", "\n [\n", Some(SourceFormat::Json)),
            ("a.json", "{\n\"a\": {\"wav\": \"x\"}}", Some(SourceFormat::Json)),
            ("a.json", "{\"a\": {\"wav\": \"x\"}, \"b\": {}}", Some(SourceFormat::Json)),
            (
                "manifest.json",
                "{\"audio_filepath\": \"x\"}\n{\"audio_filepath\": \"y\"}\n",
                Some(SourceFormat::Jsonl),
            ),
            ("a.jsonl", "\u{feff}{\"text\": \"x\"}", Some(SourceFormat::Jsonl)),
            ("a.jsonl", "{broken\n{\"text\": \"x\"}", Some(SourceFormat::Jsonl)),
            ("a", "{\"text\": \"x\"}\n", Some(SourceFormat::Jsonl)),
            ("a.CSV", "wav\n", Some(SourceFormat::Csv)),
            ("a.txt", "wav,text\n", None),
            ("a.jsonl", "", None),
        ];
        for (name, content, expected) in table {
            assert_eq!(detected(name, content), expected, "{name}: {content}");
        }
    }

    #[test]
    fn directories_are_known_by_their_lists_and_tables() {
        for (files, expected) in [
            (&[("dataset_info.json", "{}"), ("state.json", "{}")][..], SourceFormat::Table),
            (&[("dataset_dict.json", "{}")], SourceFormat::Table),
            (&[("README.md", "# Data"), ("data/train-00000-of-00001.parquet", "PAR1")], SourceFormat::Table),
            (&[("index.json", "{}"), ("a.jpg", "")], SourceFormat::Files),
        ] {
            let directory = tempfile::tempdir().unwrap();
            for (name, content) in files {
                let path = directory.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            assert_eq!(detect(directory.path()).unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn formats_that_python_converts_are_refused_with_the_function() {
        for (name, function, index) in [
            ("mds", "`dflop.from_mds(source, out)`", r#"{"shards": [{"format": "mds"}], "version": 2}"#),
            ("litdata", "`dflop.from_litdata(source, out)`", r#"{"chunks": [], "config": {}}"#),
        ] {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("index.json"), index).unwrap();
            let by_content = detect(directory.path()).unwrap_err().to_string();
            let by_name = name.parse::<SourceFormat>().unwrap_err().to_string();
            assert!(by_content.contains(function) && by_name.contains(function), "{by_content} {by_name}");
        }
    }

    #[test]
    fn a_missing_source_is_an_access_error() {
        assert!(matches!(
            detect(Path::new("/nowhere/at/all")),
            Err(Error::Storage(StorageError::File { .. }))
        ));
    }
}
