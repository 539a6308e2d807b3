//! Rules for table columns: caller mapping and schema declarations.

use std::collections::BTreeMap;

use serde_json::Value;

use super::is_media_column;
use super::mapping::ColumnMap;
use crate::record::LABEL_COLUMNS;

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
