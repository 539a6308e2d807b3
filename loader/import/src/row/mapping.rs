//! Maps columns to fields, as the caller configures it.

use std::collections::BTreeMap;

use dflop_samples::media::extension_modality;
use dflop_samples::sample::document::is_text_column;

use super::cell::Cell;
use super::is_media_column;
use super::media::{Content, RowMedium, take_media};
use crate::record::SHOWN_MAX;
use dflop_loader::error::{Error, Result, excerpt};

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
pub(super) fn value_fields(
    column: &str,
    value: &mut Cell,
    extension: &str,
) -> Result<Vec<(String, Content)>, String> {
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
