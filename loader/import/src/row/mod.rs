//! Turns a table row into a sample: media, label, and a JSON document with everything else.
//!
//! Whatever the format, a row is a list of columns. Media become fields ([`media`]), a class label the field
//! `cls`, and all columns together the field `json`, where each medium is replaced by the field name and
//! `__source__` holds the file and the row number. Loaders read this document: `messages`, `conversations`,
//! `text` and the like keep the same names, and so do column pairs such as `prompt` and `completion`.

mod cell;
mod mapping;
mod media;
mod names;
mod rules;
mod signature;

use dflop_samples::media::{Modality, extension_modality};
use dflop_samples::sample::document::{MEDIA_COLUMNS, has_text, has_turns};
use serde_json::Value;

pub(super) use self::cell::Cell;
pub use self::mapping::ColumnMap;
pub(super) use self::media::Content;
pub(super) use self::rules::RowRules;

use self::mapping::Target;
use self::media::{RowMedium, has_embedded, take_media};
use self::names::{field_names, put_names};
use super::record::{
    FILE_COLUMNS, ID_COLUMNS, KNOWN_COLUMNS, LABEL_COLUMNS, REQUEST_COLUMNS, TRANSCRIPT_COLUMNS,
};

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
                    let fields = mapping::value_fields(&column, &mut value, extension)?;
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

#[cfg(test)]
mod tests;
