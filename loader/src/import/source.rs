//! Detects the source format.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::str::FromStr;

use serde_json::{Map, Value};

use super::columnar::Columnar;
use super::lines::read_line;
use super::record::{KNOWN_COLUMNS, SHOWN_MAX};
use super::tables::has_tables;
use crate::error::{Error, OutputError, Result, excerpt};
use crate::store::file;

/// Formats that the Python package converts with their own readers, and the functions that do.
const CONVERTED: [(&str, &str); 2] = [("mds", "from_mds"), ("litdata", "from_litdata")];
/// Maximum length of an `index.json` that is read.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// Source format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceFormat {
    /// A directory with files.
    Files,
    /// JSON Lines: an object per line.
    Jsonl,
    /// A JSON document: an array of objects, or an object of id → object.
    Json,
    /// CSV with a header.
    Csv,
    /// Parquet and Arrow files, a single file or a directory, also as stored by Hugging Face `datasets`.
    Table,
}

impl fmt::Display for SourceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Files => "files",
            Self::Jsonl => "jsonl",
            Self::Json => "json",
            Self::Csv => "csv",
            Self::Table => "table",
        })
    }
}

impl FromStr for SourceFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "files" => Self::Files,
            "jsonl" => Self::Jsonl,
            "json" => Self::Json,
            "csv" => Self::Csv,
            "table" | "parquet" | "arrow" | "huggingface" => Self::Table,
            _ => {
                let converted = CONVERTED.iter().find(|(format, _)| *format == name);
                let reason = if let Some((format, function)) = converted {
                    conversion(format, function)
                } else {
                    let known = "files, jsonl, json, csv, table (parquet, arrow, huggingface)";
                    format!("expected {known}, found `{}`", excerpt(name, SHOWN_MAX))
                };
                return Err(Error::Config { setting: "format", reason });
            }
        })
    }
}

impl SourceFormat {
    /// Detects the format from the path and the first bytes.
    ///
    /// # Errors
    /// [`Error::Storage`] if the source cannot be read, [`Error::Output`] if the format is not known.
    pub(super) fn detect(path: &Path) -> Result<Self> {
        let unreadable = |source| Error::file(path, source);
        let fail = |reason: &str| {
            Err(Error::Output(OutputError::Pack {
                path: path.display().to_string(),
                reason: reason.to_owned(),
            }))
        };
        let metadata = fs::metadata(path).map_err(unreadable)?;
        if metadata.is_dir() {
            if let Some((format, function)) = converted_format(path) {
                return fail(&conversion(format, function));
            }
            return Ok(if has_tables(path) { Self::Table } else { Self::Files });
        }
        if metadata.is_file() {
            if Columnar::of(path).map_err(unreadable)?.is_some() {
                return Ok(Self::Table);
            }
            if has_extension(path, &["csv"]) {
                return Ok(Self::Csv);
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

    /// Describes a sample in this source format, for messages.
    pub(super) fn sample_description(self) -> String {
        match self {
            Self::Files => "regular files with an extension, not hidden".to_owned(),
            Self::Jsonl => format!("a JSON object per line with {KNOWN_COLUMNS}"),
            Self::Json => {
                format!("a JSON array of objects, or an object of objects, with {KNOWN_COLUMNS}")
            }
            Self::Csv => format!("a header and rows with {KNOWN_COLUMNS}"),
            Self::Table => format!("rows with {KNOWN_COLUMNS}"),
        }
    }
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

fn conversion(format: &str, function: &str) -> String {
    format!("the Python function `dflop.{function}(source, out)` converts the format {format}")
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

/// Opens a text file after the byte order mark, if there is one.
pub(super) fn open_text(path: &Path) -> std::io::Result<BufReader<File>> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let mut reader = BufReader::with_capacity(1 << 18, file::open(path)?);
    if reader.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    Ok(reader)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StorageError;

    fn detect(name: &str, content: &str) -> Option<SourceFormat> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        SourceFormat::detect(&path).ok()
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
            assert_eq!(detect(name, content), expected, "{name}: {content}");
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
            assert_eq!(SourceFormat::detect(directory.path()).unwrap(), expected, "{files:?}");
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
            let by_content = SourceFormat::detect(directory.path()).unwrap_err().to_string();
            let by_name = name.parse::<SourceFormat>().unwrap_err().to_string();
            assert!(by_content.contains(function) && by_name.contains(function), "{by_content} {by_name}");
        }
    }

    #[test]
    fn names_of_formats_come_back_and_others_are_refused() {
        for name in ["files", "jsonl", "json", "csv", "table"] {
            assert_eq!(name.parse::<SourceFormat>().unwrap().to_string(), name);
        }
        assert!("xml".parse::<SourceFormat>().unwrap_err().to_string().contains("expected files, jsonl"));
    }

    #[test]
    fn a_missing_source_is_an_access_error() {
        assert!(matches!(
            SourceFormat::detect(Path::new("/nowhere/at/all")),
            Err(Error::Storage(StorageError::File { .. }))
        ));
    }
}
