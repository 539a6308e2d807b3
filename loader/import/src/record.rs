//! Packed records, the files that they name, and the account of shards, fields, columns, classes and skipped
//! rows.
//!
//! Columns are recognized by the names that LLaVA, `NeMo`, `SpeechBrain` and similar datasets use. For each
//! modality the first known column that is not empty counts; `path` and similar columns count only if no
//! media column does, so a file that is named twice is packed once. The entry itself is kept verbatim, in
//! addition to the media.

use dflop_loader::error::{Error, Result, excerpt};
use dflop_loader::files::lies_inside;
use dflop_loader::shard::FIELD_BYTES_MAX;
use dflop_loader::store::file;
use dflop_samples::media::{DecodeLimits, Modality, decode_json, extension_modality};
use dflop_samples::sample::document::{MEDIA_COLUMNS, has_text, has_turns, is_text_column, named_path};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of value characters in a message.
pub(super) const SHOWN_MAX: usize = 80;
/// Row of [`MEDIA_COLUMNS`] for audio.
const AUDIO: usize = 1;

/// Columns that name a medium of any modality.
pub(super) const FILE_COLUMNS: &[&str] = &["path", "file", "file_path", "file_name", "filename"];

/// Columns with the transcript of a recording, in order of precedence.
pub(super) const TRANSCRIPT_COLUMNS: [&str; 7] =
    ["text", "transcript", "transcription", "wrd", "words", "sentence", "caption"];

/// Columns for a request without an answer, which form a sample all the same.
pub(super) const REQUEST_COLUMNS: [&str; 3] = ["instruction", "question", "prompt"];

/// Columns whose value becomes the key.
pub(super) const ID_COLUMNS: [&str; 6] = ["__key__", "id", "ID", "utt_id", "uttid", "key"];

/// Columns for a class label, where no schema declares a label.
pub(super) const LABEL_COLUMNS: [&str; 2] = ["label", "cls"];

/// Known columns, for messages.
pub(super) const KNOWN_COLUMNS: &str = "a medium (`image`, `audio`, `audio_filepath`, `wav`, `video`, `path`, \
     `file`, …) or text (`conversations`, `messages`, `text`, `caption`, `instruction` and `output`, `question` \
     and `answer`, `prompt` and `completion`, `query` and `response`, …)";

/// Returns whether a column can form a sample.
pub(super) fn is_known_column(column: &str) -> bool {
    let mut media = MEDIA_COLUMNS.iter().copied().chain([FILE_COLUMNS]);
    media.any(|columns| columns.contains(&column)) || is_text_column(column)
}

/// Sample description from an entry.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Identifier in the entry.
    pub(super) id: Option<String>,
    /// Extension and path as named, for each medium: `jpg` if it is the only medium of the modality, else
    /// `0.jpg`, `1.jpg`.
    pub(super) media: Vec<(String, String)>,
    /// Transcript, if the entry is a recording and has no turns.
    pub(super) transcript: Option<String>,
    /// Class label: an integer next to media.
    pub(super) label: Option<u64>,
}

impl Record {
    /// Reads an entry; fails with the reason if it does not describe a sample.
    pub(super) fn parse(entry: &[u8]) -> Result<Self, String> {
        let limits = DecodeLimits::default();
        let document =
            decode_json(entry, limits.text_bytes_max).map_err(|error| format!("not JSON: {error}"))?;
        let Value::Object(entry) = &document else { return Err("expected a JSON object".to_owned()) };
        let mut media = Vec::new();
        for columns in MEDIA_COLUMNS {
            add_media(entry, columns, &mut media)?;
        }
        // Columns for any modality come last, because they often repeat a medium path.
        if media.is_empty() {
            add_media(entry, FILE_COLUMNS, &mut media)?;
        }
        let is_request = || REQUEST_COLUMNS.iter().any(|column| is_filled(entry, column));
        if media.is_empty() && !has_text(&document) && !is_request() {
            return Err(format!("expected a column for {KNOWN_COLUMNS}"));
        }
        let id = ID_COLUMNS.iter().find_map(|column| id_text(entry.get(*column)?));
        let label = LABEL_COLUMNS.iter().find_map(|column| entry.get(*column));
        // A number that is written as text may be an answer.
        let label = label.filter(|label| !label.is_string() || !has_turns(&document)).and_then(label_number);
        let label = label.filter(|_| !media.is_empty());
        let transcript = if has_turns(&document) { None } else { transcript(entry, &media) };
        Ok(Self { id, media, transcript, label })
    }
}

fn is_filled(entry: &Map<String, Value>, column: &str) -> bool {
    match entry.get(column) {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.trim().is_empty(),
        Some(Value::Array(values)) => !values.is_empty(),
        Some(_) => true,
    }
}

fn id_text(id: &Value) -> Option<String> {
    match id {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Returns a class label, which CSV holds as text.
fn label_number(label: &Value) -> Option<u64> {
    label.as_u64().or_else(|| label.as_str()?.trim().parse().ok())
}

fn add_media(
    entry: &Map<String, Value>,
    columns: &[&str],
    media: &mut Vec<(String, String)>,
) -> Result<(), String> {
    let Some(column) = columns.iter().find(|column| is_filled(entry, column)) else { return Ok(()) };
    let paths =
        named_paths(&entry[*column]).ok_or_else(|| format!("column `{column}` must contain a path"))?;
    for (at, path) in paths.iter().enumerate() {
        let (_, extension) = split_extension(path).ok_or_else(|| {
            format!("`{}` in column `{column}` needs an extension", excerpt(path, SHOWN_MAX))
        })?;
        let numbered = if paths.len() > 1 { format!("{at}.{extension}") } else { extension };
        media.push((numbered, (*path).to_owned()));
    }
    Ok(())
}

/// Returns a path, a list of paths, or the paths of objects with `file` or `path` next to a segment.
fn named_paths(value: &Value) -> Option<Vec<&str>> {
    match value {
        Value::Array(values) => values.iter().map(named_path).collect(),
        value => Some(vec![named_path(value)?]),
    }
}

/// Returns the transcript of a recording.
fn transcript(entry: &Map<String, Value>, media: &[(String, String)]) -> Option<String> {
    let is_recording = MEDIA_COLUMNS[AUDIO].iter().any(|column| is_filled(entry, column))
        || media.iter().any(|(extension, _)| extension_modality(extension) == Some(Modality::Audio));
    if !is_recording {
        return None;
    }
    let mut filled = TRANSCRIPT_COLUMNS.iter().filter(|column| is_filled(entry, column));
    filled.find_map(|column| entry[*column].as_str()).map(str::to_owned)
}

/// Summary of the shards that [`pack`](crate::pack) wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Shard paths, in order; URLs for shards in a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes in all fields, before compression.
    pub bytes: u64,
    /// Index file, unless disabled.
    pub index: Option<PathBuf>,
    /// Files and entries that were not packed, in source order.
    pub skipped: Vec<SkippedSource>,
    /// Fields, columns and classes that were packed.
    pub taken: ImportReport,
}

/// File, directory or source entry that was not packed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSource {
    /// Path of a file or directory, or `FILE:NUMBER` for an entry: the line in JSON Lines or CSV, the
    /// position in JSON, both from 1, the table row from 0.
    pub path: String,
    /// Reason why it was not packed.
    pub reason: String,
}

/// Packing summary.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportReport {
    /// Number of fields by extension; `0.jpg` and `1.jpg` count as `jpg`.
    pub fields: BTreeMap<String, u64>,
    /// Fields that each table column is in: `jpg`, `json`, `key`.
    pub columns: BTreeMap<String, BTreeSet<String>>,
    /// Class names for the labels in `cls`, in label order.
    pub classes: Vec<String>,
}

impl ImportReport {
    pub(super) fn count_field(&mut self, extension: &str) {
        let name = unnumbered(extension);
        match self.fields.get_mut(name) {
            Some(fields) => *fields += 1,
            None => drop(self.fields.insert(name.to_owned(), 1)),
        }
    }

    pub(super) fn note_column(&mut self, column: &str, field: &str) {
        let name = unnumbered(field);
        if let Some(fields) = self.columns.get_mut(column) {
            if !fields.contains(name) {
                fields.insert(name.to_owned());
            }
        } else {
            self.columns.insert(column.to_owned(), BTreeSet::from([name.to_owned()]));
        }
    }

    /// Adds the account for a different part of the source.
    pub(super) fn add(&mut self, other: Self) {
        for (extension, fields) in other.fields {
            *self.fields.entry(extension).or_default() += fields;
        }
        for (column, fields) in other.columns {
            self.columns.entry(column).or_default().extend(fields);
        }
        if self.classes.is_empty() {
            self.classes = other.classes;
        }
    }
}

/// Removes the medium number: `0.jpg` becomes `jpg`.
fn unnumbered(extension: &str) -> &str {
    match extension.split_once('.') {
        Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => extension,
    }
}

/// Reads a file that becomes a field; or returns the reason for skipping it, if it is not a regular file (a
/// pipe would block), cannot be read, or is longer than readers accept by default.
///
/// # Errors
/// [`Error::Storage`] if the machine has no descriptor or memory for it: the file is not at fault.
pub(super) fn read_medium(path: &Path) -> Result<Result<Vec<u8>, String>> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if !metadata.is_file() {
        return Ok(Err("not a regular file".to_owned()));
    }
    if metadata.len() > FIELD_BYTES_MAX {
        return Ok(Err(format!("{} bytes exceed the {FIELD_BYTES_MAX} of one field", metadata.len())));
    }
    match file::read(path) {
        Err(error) if file::is_shortage(&error) => Err(Error::file(path, error)),
        read => Ok(read.map_err(|error| error.to_string())),
    }
}

/// Returns the reason for not packing a file that is outside `root`, after links; `None` if it is inside.
pub(super) fn outside(root: &Path, path: &Path) -> Option<String> {
    let reason = || {
        let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
        let shown =
            |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()).display().to_string();
        let (path, root) = (shown(path), shown(root));
        format!("`{path}` lies outside of `{root}`; `allow_outside` (`--allow-outside`) packs it")
    };
    (!lies_inside(root, path)).then(reason)
}

/// Returns the path of a file named in a manifest: below `root`, also if a leading placeholder represents it,
/// unless the path is absolute.
pub(super) fn resolve_medium(root: &Path, named: &str) -> PathBuf {
    root.join(strip_placeholder(named))
}

/// Removes a leading `{name}/`, `${name}/` or `$name/` from a path.
fn strip_placeholder(named: &str) -> &str {
    let Some((first, rest)) = named.split_once('/') else { return named };
    let is_braced = first.trim_start_matches('$').starts_with('{') && first.ends_with('}');
    let is_placeholder = first.len() > 1 && (is_braced || first.starts_with('$'));
    if is_placeholder { rest.trim_start_matches('/') } else { named }
}

/// Splits a file name at the dot that starts the extension: the last dot, or the last but one if the file is
/// compressed, as in `a.txt.gz`. The extension is lower-cased; `None` if the name has none.
pub(super) fn split_extension(name: &str) -> Option<(&str, String)> {
    let (stem, extension) = name.rsplit_once('.').filter(|(stem, extension)| {
        !stem.is_empty() && !stem.ends_with('/') && !extension.is_empty() && !extension.contains('/')
    })?;
    let is_compressed = ["gz", "zst", "bz2", "xz"].iter().any(|known| extension.eq_ignore_ascii_case(known));
    let inner = if is_compressed { split_extension(stem) } else { None };
    Some(match inner {
        Some((outer_stem, inner)) if !inner.contains('.') => {
            (outer_stem, format!("{inner}.{}", extension.to_lowercase()))
        }
        _ => (stem, extension.to_lowercase()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(entry: &str) -> Record {
        Record::parse(entry.as_bytes()).unwrap()
    }

    fn media(record: &Record) -> Vec<(&str, &str)> {
        record.media.iter().map(|(extension, path)| (extension.as_str(), path.as_str())).collect()
    }

    #[test]
    fn media_are_numbered_where_there_are_several_of_a_kind() {
        let record = parse(r#"{"id": 7, "image": ["x/a.JPG", "b.png"], "wav": "c.flac", "text": "t"}"#);
        assert_eq!(media(&record), [("0.jpg", "x/a.JPG"), ("1.png", "b.png"), ("flac", "c.flac")]);
        assert_eq!((record.id.as_deref(), record.transcript.as_deref()), (Some("7"), Some("t")));
        assert_eq!(media(&parse(r#"{"images": ["a.jpg"]}"#)), [("jpg", "a.jpg")]);
    }

    #[test]
    fn a_file_that_is_named_twice_counts_once() {
        let record = parse(r#"{"wav": "a.wav", "path": "a.wav", "audio": "", "wrd": "HI"}"#);
        assert_eq!(media(&record), [("wav", "a.wav")]);
        assert_eq!(record.transcript.as_deref(), Some("HI"));
        assert_eq!(media(&parse(r#"{"file_name": "a.png"}"#)), [("png", "a.png")]);
    }

    #[test]
    fn a_segment_names_its_file() {
        assert_eq!(media(&parse(r#"{"wav": {"file": "a.wav", "start": 0}}"#)), [("wav", "a.wav")]);
    }

    #[test]
    fn only_recordings_without_turns_have_a_transcript() {
        for entry in [
            r#"{"image": "a.jpg", "caption": "x"}"#,
            r#"{"text": "x"}"#,
            r#"{"audio": "a.wav", "text": "x", "conversations": [{"from": "human", "value": "hi"}]}"#,
            r#"{"audio": "a.wav", "text": " "}"#,
        ] {
            assert_eq!(parse(entry).transcript, None, "{entry}");
        }
    }

    #[test]
    fn an_entry_that_is_no_sample_says_why() {
        let table = [
            ("{", "not JSON"),
            ("[1]", "expected a JSON object"),
            (r#"{"model": "x", "image": null, "text": ""}"#, "expected a column for a medium"),
            (r#"{"image": {"bytes": "x"}}"#, "column `image` must contain a path"),
            (r#"{"image": ["a.jpg", 3]}"#, "column `image` must contain a path"),
            (r#"{"image": "image"}"#, "needs an extension"),
        ];
        for (entry, reason) in table {
            let found = Record::parse(entry.as_bytes()).unwrap_err();
            assert!(found.contains(reason), "{entry}: {found}");
        }
    }

    /// Runs this test again in a separate process, which then has no descriptor left.
    #[test]
    fn a_machine_without_descriptors_is_an_error_and_no_reason_to_skip_a_file() {
        const CHILD: &str = "DFLOP_TEST_NO_DESCRIPTORS";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.txt");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_medium(&path).unwrap().unwrap(), b"text");
        assert!(read_medium(directory.path()).unwrap().is_err(), "a directory is skipped");
        if std::env::var_os(CHILD).is_none() {
            let name = "a_machine_without_descriptors_is_an_error_and_no_reason_to_skip_a_file";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let run = child.args([name, "--nocapture"]).env(CHILD, "1").output().unwrap();
            assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
            return;
        }
        let resource = rustix::process::Resource::Nofile;
        let all = rustix::process::getrlimit(resource);
        rustix::process::setrlimit(resource, rustix::process::Rlimit { current: Some(0), ..all }).unwrap();
        let (read, hashed) =
            (read_medium(&path), crate::directory::hash_names(directory.path(), false, |_| {}));
        rustix::process::setrlimit(resource, all).unwrap();
        for error in [read.unwrap_err(), hashed.unwrap_err()] {
            let text = dflop_samples::error_reason(&error);
            assert!(text.contains("open files"), "{text}");
        }
    }

    #[test]
    fn placeholders_stand_for_the_root() {
        let root = Path::new("/data");
        let table = [
            ("{data_root}/a.wav", "/data/a.wav"),
            ("$data_root/../b/a.wav", "/data/../b/a.wav"),
            ("${root}//a.wav", "/data/a.wav"),
            ("a/{b}.wav", "/data/a/{b}.wav"),
            ("$/a.wav", "/data/$/a.wav"),
            ("/abs/a.wav", "/abs/a.wav"),
        ];
        for (named, expected) in table {
            assert_eq!(resolve_medium(root, named), Path::new(expected), "{named}");
        }
    }

    #[test]
    fn the_extension_follows_the_last_dot_or_the_last_two() {
        let table = [
            ("a.JPG", Some(("a", "jpg"))),
            ("a.b.seg.png", Some(("a.b.seg", "png"))),
            ("a.b.Json.gz", Some(("a.b", "json.gz"))),
            ("a.gz", Some(("a", "gz"))),
            ("a.gz.gz", Some(("a", "gz.gz"))),
            ("a.x.gz.xz", Some(("a.x.gz", "xz"))),
            ("README", None),
            ("a.", None),
            (".gz", None),
            ("d.x/a", None),
            ("d/.gz", None),
            ("d.x/a.b", Some(("d.x/a", "b"))),
        ];
        for (name, expected) in table {
            let split = split_extension(name);
            assert_eq!(split.as_ref().map(|(stem, ext)| (*stem, ext.as_str())), expected, "{name}");
        }
    }
}
