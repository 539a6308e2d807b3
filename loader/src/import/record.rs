//! Parses one entry of a manifest: the files it names, its id and its transcript.
//!
//! Columns are known by the names that LLaVA, `NeMo`, `SpeechBrain` and datasets in their manner use. Per
//! kind of medium the first known column that is not empty counts; `path` and its like count where no other
//! does, so a file that is named twice is packed once. The entry itself is kept word for word beside its
//! media.

use serde_json::{Map, Value};

use super::medium::split_extension;
use crate::media::{MediumKind, kind_of_extension};
use crate::sample::document::{MEDIA_COLUMNS, named_path};

/// The row of [`MEDIA_COLUMNS`] for recordings.
const AUDIO: usize = 1;

/// Columns that name a medium of any kind.
const FILE_COLUMNS: &[&str] = &["path", "file", "file_path", "file_name", "filename"];

/// Columns with the words of a recording, first come first.
const TRANSCRIPT_COLUMNS: [&str; 7] =
    ["text", "transcript", "transcription", "wrd", "words", "sentence", "caption"];

/// Columns that make a sample without any medium.
const TEXT_COLUMNS: [&str; 7] =
    ["conversations", "messages", "text", "caption", "instruction", "question", "prompt"];

/// Columns whose value, if any, becomes the key.
const ID_COLUMNS: [&str; 5] = ["id", "ID", "utt_id", "uttid", "key"];

/// The known columns, for messages.
pub(super) const KNOWN_COLUMNS: &str = "a medium (`image`, `audio`, `audio_filepath`, `wav`, `video`, `path`, \
     `file`, …) or text (`conversations`, `messages`, `text`, `caption`, `instruction`, `question`, `prompt`)";

/// Whether a column can make a sample.
pub(super) fn is_known_column(column: &str) -> bool {
    let mut media = MEDIA_COLUMNS.iter().copied().chain([FILE_COLUMNS]);
    media.any(|columns| columns.contains(&column)) || TEXT_COLUMNS.contains(&column)
}

/// A sample as its entry describes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// What the entry calls itself.
    pub(super) id: Option<String>,
    /// Extension and path as named, for each medium: `jpg` for the only one of its kind, `0.jpg`, `1.jpg` for
    /// more.
    pub(super) media: Vec<(String, String)>,
    /// Words of the recording, where the entry is one and has no turns.
    pub(super) transcript: Option<String>,
}

impl Record {
    /// Reads an entry; fails with the reason if it describes no sample.
    pub(super) fn parse(entry: &[u8]) -> Result<Self, String> {
        let entry: Value = serde_json::from_slice(entry).map_err(|error| format!("not JSON: {error}"))?;
        let Value::Object(entry) = entry else { return Err("not a JSON object".to_owned()) };
        let mut media = Vec::new();
        for columns in MEDIA_COLUMNS {
            add_media(&entry, columns, &mut media)?;
        }
        if media.is_empty() {
            add_media(&entry, FILE_COLUMNS, &mut media)?;
        }
        if media.is_empty() && !TEXT_COLUMNS.iter().any(|column| is_filled(&entry, column)) {
            return Err(format!("none of its columns is {KNOWN_COLUMNS}"));
        }
        let id = ID_COLUMNS.iter().find_map(|column| id_text(entry.get(*column)?));
        Ok(Self { id, transcript: transcript(&entry, &media), media })
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

fn add_media(
    entry: &Map<String, Value>,
    columns: &[&str],
    media: &mut Vec<(String, String)>,
) -> Result<(), String> {
    let Some(column) = columns.iter().find(|column| is_filled(entry, column)) else { return Ok(()) };
    let paths = named_paths(&entry[*column]).ok_or_else(|| format!("column `{column}` holds no path"))?;
    for (at, path) in paths.iter().enumerate() {
        let (_, extension) = split_extension(path)
            .ok_or_else(|| format!("`{path}` in column `{column}` has no extension to tell its kind"))?;
        let numbered = if paths.len() > 1 { format!("{at}.{extension}") } else { extension };
        media.push((numbered, (*path).to_owned()));
    }
    Ok(())
}

/// A path, a list of them, or objects that hold one as `file` or `path` beside a segment.
fn named_paths(value: &Value) -> Option<Vec<&str>> {
    match value {
        Value::Array(values) => values.iter().map(named_path).collect(),
        value => Some(vec![named_path(value)?]),
    }
}

/// A conversation is in the entry itself; its `text`, if it has one, is something else.
fn transcript(entry: &Map<String, Value>, media: &[(String, String)]) -> Option<String> {
    let is_recording = MEDIA_COLUMNS[AUDIO].iter().any(|column| is_filled(entry, column))
        || media.iter().any(|(extension, _)| kind_of_extension(extension) == MediumKind::Audio);
    let has_turns = ["conversations", "messages"].iter().any(|column| is_filled(entry, column));
    if !is_recording || has_turns {
        return None;
    }
    let mut filled = TRANSCRIPT_COLUMNS.iter().filter(|column| is_filled(entry, column));
    filled.find_map(|column| entry[*column].as_str()).map(str::to_owned)
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
            ("[1]", "not a JSON object"),
            (r#"{"model": "x", "image": null, "text": ""}"#, "none of its columns"),
            (r#"{"image": {"bytes": "x"}}"#, "column `image` holds no path"),
            (r#"{"image": ["a.jpg", 3]}"#, "column `image` holds no path"),
            (r#"{"image": "image"}"#, "no extension"),
        ];
        for (entry, reason) in table {
            let found = Record::parse(entry.as_bytes()).unwrap_err();
            assert!(found.contains(reason), "{entry}: {found}");
        }
    }
}
