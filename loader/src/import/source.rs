//! Detects the kind of a source.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use super::lines::read_line;
use super::record::KNOWN_COLUMNS;
use crate::error::{Error, OutputError, Result};

/// Kind of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImportSource {
    /// A directory of files.
    Directory,
    /// JSON Lines: an object per line.
    Lines,
    /// One JSON document: an array of objects, or an object of id → object.
    Document,
    /// CSV with a header.
    Table,
}

impl ImportSource {
    /// Detects the kind from the path and the start of the file.
    pub(super) fn detect(path: &Path) -> Result<Self> {
        let unreadable = |source| Error::file(path, source);
        let metadata = fs::metadata(path).map_err(unreadable)?;
        if metadata.is_dir() {
            return match saved_by_datasets(path) {
                None => Ok(Self::Directory),
                Some(reason) => {
                    Err(Error::Output(OutputError::Pack { path: path.display().to_string(), reason }))
                }
            };
        }
        if metadata.is_file() {
            if has_extension(path, &["csv"]) {
                return Ok(Self::Table);
            }
            if let Some(source) = sniff_json(path)? {
                return Ok(source);
            }
        }
        let reason = "expected a directory, JSON, JSON Lines or a `.csv` file".to_owned();
        Err(Error::Output(OutputError::Pack { path: path.display().to_string(), reason }))
    }

    /// Describes what forms a sample in such a source, for messages.
    pub(super) fn sample_description(self) -> String {
        match self {
            Self::Directory => "regular files with an extension, not hidden".to_owned(),
            Self::Lines => format!("a JSON object per line with {KNOWN_COLUMNS}"),
            Self::Document => {
                format!("a JSON array of objects, or an object of objects, with {KNOWN_COLUMNS}")
            }
            Self::Table => format!("a header and rows with {KNOWN_COLUMNS}"),
        }
    }
}

/// Returns the reason for not packing a directory that the library `datasets` of Hugging Face has written.
fn saved_by_datasets(directory: &Path) -> Option<String> {
    let has = |name: &str| directory.join(name).is_file();
    let is_one = has("dataset_info.json") && has("state.json");
    (is_one || has("dataset_dict.json")).then(|| {
        "a dataset saved by Hugging Face `datasets`, in Arrow files; expected files of media, or a manifest: export \
         its rows to files or JSON Lines first"
            .to_owned()
    })
}

/// Distinguishes a document from JSON Lines. An array is a document. An object is the first of many lines if
/// it ends with its line, unless all of its values are objects, as in an object of id → entry.
fn sniff_json(path: &Path) -> Result<Option<ImportSource>> {
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
    Ok(Some(if is_lines { ImportSource::Lines } else { ImportSource::Document }))
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().unwrap_or_default();
    extensions.iter().any(|known| extension.eq_ignore_ascii_case(known))
}

/// Opens a text file after its byte order mark, if it has one.
pub(super) fn open_text(path: &Path) -> std::io::Result<BufReader<File>> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let mut reader = BufReader::with_capacity(1 << 18, File::open(path)?);
    if reader.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    Ok(reader)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StorageError;

    fn detect(name: &str, content: &str) -> Option<ImportSource> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        ImportSource::detect(&path).ok()
    }

    #[test]
    fn sources_are_told_by_what_they_are() {
        let table = [
            ("a.json", "[{\"id\": 1}]", Some(ImportSource::Document)),
            ("a.jsonl", "\n [\n", Some(ImportSource::Document)),
            ("a.json", "{\n\"a\": {\"wav\": \"x\"}}", Some(ImportSource::Document)),
            ("a.json", "{\"a\": {\"wav\": \"x\"}, \"b\": {}}", Some(ImportSource::Document)),
            (
                "manifest.json",
                "{\"audio_filepath\": \"x\"}\n{\"audio_filepath\": \"y\"}\n",
                Some(ImportSource::Lines),
            ),
            ("a.jsonl", "\u{feff}{\"text\": \"x\"}", Some(ImportSource::Lines)),
            ("a.jsonl", "{broken\n{\"text\": \"x\"}", Some(ImportSource::Lines)),
            ("a", "{\"text\": \"x\"}\n", Some(ImportSource::Lines)),
            ("a.CSV", "wav\n", Some(ImportSource::Table)),
            ("a.txt", "wav,text\n", None),
            ("a.jsonl", "", None),
        ];
        for (name, content, expected) in table {
            assert_eq!(detect(name, content), expected, "{name}: {content}");
        }
    }

    #[test]
    fn a_dataset_saved_by_hugging_face_is_refused_by_name() {
        for files in
            [&["dataset_info.json", "state.json", "data-00000-of-00001.arrow"][..], &["dataset_dict.json"]]
        {
            let directory = tempfile::tempdir().unwrap();
            for name in files {
                fs::write(directory.path().join(name), "{}").unwrap();
            }
            let refused = ImportSource::detect(directory.path()).unwrap_err().to_string();
            assert!(refused.contains("Hugging Face `datasets`"), "{refused}");
        }
    }

    #[test]
    fn a_missing_source_is_an_access_error() {
        assert!(matches!(
            ImportSource::detect(Path::new("/nowhere/at/all")),
            Err(Error::Storage(StorageError::File { .. }))
        ));
    }
}
