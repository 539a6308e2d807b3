//! Converts rows to samples: column rules, media names, caller mapping.
//!
//! Whatever the format, a row is a list of columns. Media become fields ([`media`]), a class label the field
//! `cls`, and all columns together the field `json`, where each medium is replaced by the field name and
//! `__source__` holds the file and the row number. Loaders read this document: `messages`, `conversations`,
//! `text` and the like keep the same names, and so do column pairs such as `prompt` and `completion`.
//!
//! Media in a modality are named `jpg`, or `0.jpg`, `1.jpg` if there is more than one medium, as in a packed
//! manifest. If media in a modality come from more than one column, this rule applies to the column that
//! documents refer to, and other names have the column name as prefix: `mask.png`.

mod cell;
mod media;
#[cfg(test)]
mod tests;

use super::record::{
    FILE_COLUMNS, ID_COLUMNS, KNOWN_COLUMNS, LABEL_COLUMNS, REQUEST_COLUMNS, SHOWN_MAX, TRANSCRIPT_COLUMNS,
};
use dflop_loader::error::{Error, Result, excerpt};
use dflop_samples::media::{Modality, extension_modality};
use dflop_samples::sample::document::{MEDIA_COLUMNS, has_text, has_turns, is_text_column};
use media::{RowMedium, has_embedded, take_media};
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) use cell::Cell;
pub(super) use media::Content;

/// Document column for the file and number of a row.
pub(super) const SOURCE_COLUMN: &str = "__source__";

/// Columns of a row, in order.
pub(super) type Columns = Vec<(String, Cell)>;

/// Sample from a row, before files are read.
#[derive(Debug, PartialEq)]
pub(super) struct RowSample {
    /// Extension and content of each field except the document.
    pub(super) fields: Vec<(String, Content)>,
    /// The document.
    pub(super) json: Vec<u8>,
    /// Each column, and the field that it is in.
    pub(super) uses: Vec<(String, String)>,
}

/// Returns the row identifier: the column that is mapped to the key, else a known key column.
pub(super) fn row_id(columns: &Columns, map: &ColumnMap) -> Option<String> {
    let name = |column: &str| columns.iter().find(|(name, _)| name == column)?.1.to_name();
    match map.key_column() {
        Some(column) => name(column),
        None => ID_COLUMNS.iter().find_map(|column| name(column)),
    }
}

/// Returns whether a JSON row holds media itself, as base64.
pub(super) fn holds_embedded(columns: &Columns) -> bool {
    columns.iter().any(|(column, value)| has_embedded(value, is_media_column(column)))
}

/// Creates a sample from a row.
///
/// - `source`: file and row number in it, kept in the document
///
/// # Errors
/// The reason, if the row describes no sample or a value cannot be the field that it is mapped to.
pub(super) fn row_sample(
    columns: Columns,
    rules: &RowRules,
    source: Option<(&str, u64)>,
) -> Result<RowSample, String> {
    let mut row = Row::new(columns, rules)?;
    row.take_all_media(rules)?;
    row.take_label(rules);
    row.take_transcript();
    row.check_known()?;
    Ok(row.finish(source))
}

/// Row that becomes a sample.
#[derive(Default)]
struct Row {
    columns: Columns,
    media: Vec<RowMedium>,
    fields: Vec<(String, Content)>,
    uses: Vec<(String, String)>,
}

impl Row {
    /// Applies the column mapping.
    fn new(columns: Columns, rules: &RowRules) -> Result<Self, String> {
        let mut row = Self::default();
        for (column, mut value) in columns {
            match rules.map.target(&column) {
                None => row.push_column(column, value),
                Some(Target::Key) => {
                    row.uses.push((column, "key".to_owned()));
                }
                Some(Target::Column(name)) => row.push_unique(name.clone(), value),
                Some(Target::Field(extension)) => {
                    let fields = value_fields(&column, &mut value, extension)?;
                    row.uses.extend(fields.iter().map(|(name, _)| (column.clone(), name.clone())));
                    row.fields.extend(fields);
                }
            }
        }
        Ok(row)
    }

    /// Adds an unmapped column; a column named as a field becomes that field.
    fn push_column(&mut self, column: String, value: Cell) {
        match (column.as_str(), value) {
            ("txt", Cell::Text(text)) => self.push_field("txt", &column, text.into_bytes()),
            ("json", Cell::Object(values)) => {
                for (name, value) in values {
                    self.push_unique(name, value);
                }
            }
            (_, value) => self.push_unique(column, value),
        }
    }

    /// Adds a column to the document; a repeated name is extended with underscores, because readers reject a
    /// document with repeated names.
    fn push_unique(&mut self, mut name: String, value: Cell) {
        while self.get(&name).is_some() {
            name.push('_');
        }
        self.columns.push((name, value));
    }

    fn push_field(&mut self, extension: &str, column: &str, payload: Vec<u8>) {
        self.fields.push((extension.to_owned(), Content::Bytes(payload.into())));
        self.uses.push((column.to_owned(), extension.to_owned()));
    }

    fn get(&self, column: &str) -> Option<&Cell> {
        self.columns.iter().find(|(name, _)| name == column).map(|(_, value)| value)
    }

    fn is_filled(&self, column: &str) -> bool {
        self.get(column).is_some_and(Cell::is_filled)
    }

    fn take_all_media(&mut self, rules: &RowRules) -> Result<(), String> {
        for (column, value) in &mut self.columns {
            take_media(column, value, rules.is_media(column), &mut self.media)?;
        }
        let is_text = |column: &&&str| self.get(column).and_then(Cell::as_text).is_some();
        // Columns for any modality come last, because they often repeat a medium path.
        if self.media.is_empty()
            && self.fields.is_empty()
            && let Some(file) = FILE_COLUMNS.iter().find(is_text)
            && let Some((column, value)) = self.columns.iter_mut().find(|(name, _)| name == file)
        {
            take_media(column, value, true, &mut self.media)?;
        }
        Ok(())
    }

    /// Creates the field `cls` from a label that the schema declares, or from an integer next to media.
    fn take_label(&mut self, rules: &RowRules) {
        let declared: Vec<&str> =
            self.columns.iter().map(|(name, _)| name.as_str()).filter(|name| rules.is_label(name)).collect();
        let is_named = |column: &&str| LABEL_COLUMNS.contains(column);
        let column = match *declared {
            [only] => Some(only),
            [] if !self.media.is_empty() || !self.fields.is_empty() => {
                LABEL_COLUMNS.into_iter().find(|column| self.get(column).is_some())
            }
            _ => declared.iter().copied().find(is_named),
        };
        let has_class = self.fields.iter().any(|(extension, _)| extension == "cls");
        let Some(column) = column.map(str::to_owned).filter(|_| !has_class) else { return };
        // A number that is written as text may be an answer.
        if matches!(self.get(&column), Some(Cell::Text(_))) && has_turns(&self.document()) {
            return;
        }
        // Negative labels mean that the label is unknown.
        if let Some(label) = self.get(&column).and_then(Cell::as_integer).filter(|label| *label >= 0) {
            self.push_field("cls", &column, label.to_string().into_bytes());
        }
    }

    /// Returns the columns in the form in which texts are read, without media.
    fn document(&self) -> Value {
        let column = |(name, value): &(String, Cell)| (name.clone(), value.to_json());
        Value::Object(self.columns.iter().map(column).collect())
    }

    /// Creates the field `txt` from the transcript of a recording; a conversation has none.
    fn take_transcript(&mut self) {
        let is_recording =
            self.media.iter().any(|medium| extension_modality(&medium.extension) == Some(Modality::Audio));
        let has_field = self.fields.iter().any(|(extension, _)| extension == "txt");
        if !is_recording || has_field || has_turns(&self.document()) {
            return;
        }
        let text = |column: &str| Some((column.to_owned(), self.get(column)?.as_text()?.to_owned()));
        if let Some((column, text)) = TRANSCRIPT_COLUMNS.iter().find_map(|column| text(column)) {
            self.push_field("txt", &column, text.into_bytes());
        }
    }

    fn check_known(&self) -> Result<(), String> {
        let is_request = || REQUEST_COLUMNS.iter().any(|column| self.is_filled(column));
        if !self.media.is_empty() || !self.fields.is_empty() || is_request() || has_text(&self.document()) {
            return Ok(());
        }
        Err(format!(
            "expected a column for {KNOWN_COLUMNS}, or `--map COLUMN=FIELD` (`columns` in Python) for another"
        ))
    }

    fn finish(mut self, source: Option<(&str, u64)>) -> RowSample {
        let names = field_names(&self.media);
        for (column, value) in &mut self.columns {
            let is_named = self.uses.iter().any(|(known, _)| known == column);
            put_names(value, &names);
            if !is_named && !self.media.iter().any(|medium| medium.column == *column) {
                self.uses.push((column.clone(), "json".to_owned()));
            }
        }
        let mut fields = Vec::with_capacity(names.len() + self.fields.len());
        for (medium, name) in self.media.into_iter().zip(names) {
            self.uses.push((medium.column, name.clone()));
            fields.push((name, medium.content));
        }
        fields.append(&mut self.fields);
        if let Some((file, row)) =
            source.filter(|_| self.columns.iter().all(|(name, _)| name != SOURCE_COLUMN))
        {
            let place = vec![
                ("file".to_owned(), Cell::Text(file.to_owned())),
                ("row".to_owned(), Cell::Unsigned(row)),
            ];
            self.columns.push((SOURCE_COLUMN.to_owned(), Cell::Object(place)));
        }
        // Every cell can be written.
        let json = serde_json::to_vec(&Cell::Object(self.columns)).unwrap_or_default();
        RowSample { fields, json, uses: self.uses }
    }
}

/// Returns whether a column names media in documents.
fn is_media_column(column: &str) -> bool {
    MEDIA_COLUMNS.iter().any(|columns| columns.contains(&column))
}

/// Returns the extension for each medium, all different.
fn field_names(media: &[RowMedium]) -> Vec<String> {
    let primary = Modality::ALL.map(|modality| primary_column(media, modality));
    let is_primary = |medium: &RowMedium| {
        extension_modality(&medium.extension).map_or(medium.column == medium.extension, |modality| {
            primary[modality as usize] == Some(medium.column.as_str())
        })
    };
    let is_sibling = |a: &RowMedium, b: &RowMedium| {
        a.column == b.column && extension_modality(&a.extension) == extension_modality(&b.extension)
    };
    let name = |(at, medium): (usize, &RowMedium)| {
        let siblings = media.iter().filter(|other| is_sibling(other, medium)).count();
        let number = media[..at].iter().filter(|other| is_sibling(other, medium)).count();
        let number = if siblings > 1 { format!("{number}.") } else { String::new() };
        let RowMedium { column, extension, .. } = medium;
        if is_primary(medium) {
            return format!("{number}{extension}");
        }
        // A column that is named as a field in this modality is that field, as in rows created from shards.
        if extension_modality(column).is_some() && extension_modality(column) == extension_modality(extension)
        {
            return format!("{number}{}", column.to_lowercase());
        }
        format!("{}.{number}{extension}", column_prefix(column))
    };
    media.iter().enumerate().map(name).collect()
}

/// Replaces the media in a value by field names.
fn put_names(cell: &mut Cell, names: &[String]) {
    match cell {
        Cell::Medium(number) => {
            *cell = names.get(*number).map_or(Cell::Null, |name| Cell::Text(name.clone()));
        }
        Cell::List(values) => values.iter_mut().for_each(|value| put_names(value, names)),
        Cell::Object(values) => values.iter_mut().for_each(|(_, value)| put_names(value, names)),
        _ => {}
    }
}

/// Returns the column with the media that documents refer to, per modality.
fn primary_column(media: &[RowMedium], modality: Modality) -> Option<&str> {
    let of_modality =
        || media.iter().filter(|medium| extension_modality(&medium.extension) == Some(modality));
    let is_there = |column: &&&str| of_modality().any(|medium| medium.column == ***column);
    if let Some(known) = MEDIA_COLUMNS[modality as usize].iter().find(is_there) {
        return Some(known);
    }
    let first = &of_modality().next()?.column;
    of_modality().all(|medium| medium.column == *first).then_some(first)
}

/// Returns a column name in the form of an extension.
fn column_prefix(column: &str) -> String {
    let letter = |letter: char| if letter.is_alphanumeric() || letter == '-' { letter } else { '_' };
    column.to_lowercase().chars().map(letter).collect()
}

/// Column rules for the rows of a source.
#[derive(Debug, Clone, Default)]
pub(crate) struct RowRules {
    /// Mapping that the caller gave.
    pub(crate) map: ColumnMap,
    /// Columns that the schema declares to hold media.
    media: Vec<String>,
    /// Columns that the schema declares as class labels, with class names.
    labels: BTreeMap<String, Vec<String>>,
}

impl RowRules {
    /// Creates the rules for a table without declarations.
    pub(crate) fn new(map: &ColumnMap) -> Self {
        Self { map: map.clone(), ..Self::default() }
    }

    /// Reads the features that Hugging Face `datasets` keeps in a schema, a JSON text under `huggingface`.
    /// Other content is ignored: the features only declare what the values show as well.
    pub(crate) fn declare(&mut self, metadata: &str) {
        let Ok(metadata) = serde_json::from_str::<Value>(metadata) else { return };
        let Some(features) = metadata.pointer("/info/features").and_then(Value::as_object) else { return };
        for (column, feature) in features {
            let inner = feature.get("feature").or_else(|| feature.get(0)).unwrap_or(feature);
            match inner.get("_type").and_then(Value::as_str) {
                Some("Image" | "Audio" | "Video") => self.media.push(column.clone()),
                Some("ClassLabel") if std::ptr::eq(inner, feature) => {
                    let names = inner.get("names").and_then(Value::as_array).into_iter().flatten();
                    let names = names.filter_map(Value::as_str).map(str::to_owned).collect();
                    self.labels.insert(column.clone(), names);
                }
                _ => {}
            }
        }
    }

    /// Returns whether texts in this column are paths or base64 of media.
    pub(crate) fn is_media(&self, column: &str) -> bool {
        is_media_column(column) || self.media.iter().any(|known| known == column)
    }

    /// Returns whether the schema declares the column a class label.
    pub(crate) fn is_label(&self, column: &str) -> bool {
        self.labels.contains_key(column)
    }

    /// Returns the class names for the column that becomes `cls`, in label order; empty if none are declared.
    pub(crate) fn label_classes(&self) -> &[String] {
        let column = match self.labels.len() {
            1 => self.labels.keys().next().map(String::as_str),
            _ => LABEL_COLUMNS.into_iter().find(|column| self.is_label(column)),
        };
        column.and_then(|column| self.labels.get(column)).map_or(&[], Vec::as_slice)
    }
}

/// Name that turns a column into the sample key, as in WebDataset.
const KEY: &str = "__key__";

/// Use of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// The sample key.
    Key,
    /// A document column with a name that loaders know, such as `messages` or `image`.
    Column(String),
    /// The field with this extension.
    Field(String),
}

/// Column mapping, by name. Unmapped columns are used according to name and content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ColumnMap(BTreeMap<String, Target>);

impl ColumnMap {
    /// Creates a mapping from (column, target) pairs. A target is `__key__`, the name of a column that
    /// loaders know (`messages`, `conversations`, `text`, `image`, …), or a field extension (`txt`, `cls`,
    /// `jpg`, `npy`, `meta.json`).
    ///
    /// # Errors
    /// [`Error::Config`] for a column that is mapped twice, an empty name, or an extension that no shard can
    /// hold.
    pub fn new(pairs: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let mut map = BTreeMap::new();
        for (column, target) in pairs {
            let refuse = |reason: String| Err(Error::Config { setting: "map", reason });
            if column.is_empty() || target.is_empty() {
                return refuse("expected COLUMN=FIELD, found an empty name".to_owned());
            }
            if target.contains(['/', '\0']) || target.to_lowercase() != target {
                let shown = excerpt(&target, SHOWN_MAX);
                return refuse(format!("expected the extension of a field in lower case, found `{shown}`"));
            }
            if target == "json" {
                let reason = "`json` is the document of all columns; expected a field such as `meta.json`";
                return refuse(reason.to_owned());
            }
            let is_column = is_media_column(&target) || is_text_column(&target);
            let meaning = match target {
                key if key == KEY => Target::Key,
                name if is_column => Target::Column(name),
                extension => Target::Field(extension),
            };
            if map.insert(column.clone(), meaning).is_some() {
                return refuse(format!("column `{}` is mapped twice", excerpt(&column, SHOWN_MAX)));
            }
        }
        Ok(Self(map))
    }

    /// Returns whether no column is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the target for a column; `None` if the column is not mapped.
    pub(crate) fn target(&self, column: &str) -> Option<&Target> {
        self.0.get(column)
    }

    /// Returns the column that becomes the key.
    pub(crate) fn key_column(&self) -> Option<&str> {
        self.0.iter().find(|(_, target)| **target == Target::Key).map(|(column, _)| column.as_str())
    }
}

/// Returns the fields for a value: a single field, numbered fields for a list of media, none for null.
///
/// # Errors
/// The reason, if the value cannot be this field.
fn value_fields(column: &str, value: &mut Cell, extension: &str) -> Result<Vec<(String, Content)>, String> {
    let last = extension.rsplit('.').next().unwrap_or_default();
    if extension_modality(last).is_some() {
        let mut media = Vec::new();
        take_media(column, value, true, &mut media)?;
        let number = |(at, medium): (usize, RowMedium)| (format!("{at}.{extension}"), medium.content);
        return Ok(match <[RowMedium; 1]>::try_from(media) {
            Ok([only]) => vec![(extension.to_owned(), only.content)],
            Err(media) => media.into_iter().enumerate().map(number).collect(),
        });
    }
    let payload = match value.take() {
        Cell::Null => return Ok(Vec::new()),
        Cell::Bytes(bytes) => bytes,
        value if last == "json" => serde_json::to_vec(&value).unwrap_or_default().into(),
        value => {
            let text = value.to_name().ok_or_else(|| {
                let (column, kind) = (excerpt(column, SHOWN_MAX), value.kind());
                format!("column `{column}` holds {kind}, which cannot be the field `{extension}`")
            })?;
            text.into_bytes().into()
        }
    };
    Ok(vec![(extension.to_owned(), Content::Bytes(payload))])
}
