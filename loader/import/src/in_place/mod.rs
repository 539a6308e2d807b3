//! Reads tables in place: Parquet and Arrow files as shards whose rows are samples.
//!
//! A row becomes the sample that [`pack`](crate::pack) would write, with the same fields and document. Keys
//! are the rows' ids, else file name and row number, because the rows of other files are not known. Media
//! must be in the table: a row that names a file is no sample.

mod arrow;
#[cfg(feature = "parquet")]
mod parquet;

use super::columnar::{declare, row_at};
use super::packer::safe_key;
use super::record::SHOWN_MAX;
use super::row::{ColumnMap, Columns, Content, RowRules, row_id, row_sample};
use arrow_array::RecordBatch;
use arrow_schema::{ArrowError, SchemaRef};
use bytes::Bytes;
use dflop_loader::error::excerpt;
use dflop_loader::shard::{TableFault, TableRow};
use dflop_samples::guarded;
use std::sync::Arc;

/// Maximum payload size of the rows that are returned together, exceeded by at most one batch.
const ROWS_BYTES_MAX: usize = 256 << 20;
/// Maximum number of characters kept from a library message.
const REASON_MAX: usize = 200;

/// Registers the table formats of this build for this process, before any dataset is opened: Arrow files, and
/// Parquet files with the feature `parquet`, are then shards for every loader and command.
pub fn register_tables() {
    dflop_loader::shard::register_tables(&arrow::Arrow);
    #[cfg(feature = "parquet")]
    dflop_loader::shard::register_tables(&parquet::Parquet);
}

/// Conversion of the rows in a file to samples.
#[derive(Debug)]
struct RowSamples {
    /// Base name of the file.
    file: String,
    rules: RowRules,
}

impl RowSamples {
    fn new(file: &str, schema: &SchemaRef) -> Self {
        let mut rules = RowRules::new(&ColumnMap::default());
        declare(schema, &mut rules);
        Self { file: file.to_owned(), rules }
    }

    /// Converts batches that start at row `first_row`, as far as the bytes allow.
    ///
    /// # Errors
    /// The error of the batches.
    fn collect(
        &self,
        batches: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
        first_row: u64,
    ) -> Result<Vec<TableRow>, ArrowError> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        for batch in batches {
            let batch = batch?;
            for at in 0..batch.num_rows() {
                let row = self.row(&batch, at, first_row + rows.len() as u64);
                bytes += row.fields.iter().flatten().map(|(_, payload)| payload.len()).sum::<usize>();
                rows.push(row);
            }
            if bytes >= ROWS_BYTES_MAX {
                break;
            }
        }
        Ok(rows)
    }

    fn row(&self, batch: &RecordBatch, at: usize, number: u64) -> TableRow {
        match row_at(batch, at) {
            Ok(columns) => {
                let id = row_id(&columns, &self.rules.map);
                let key = id.as_deref().and_then(safe_key).unwrap_or_else(|| self.numbered_key(number));
                TableRow { key, fields: self.fields(columns, number) }
            }
            Err(reason) => TableRow { key: self.numbered_key(number), fields: Err(reason) },
        }
    }

    /// Returns the key of a row without an id.
    fn numbered_key(&self, number: u64) -> String {
        let stem = self.file.rsplit_once('.').map_or(self.file.as_str(), |(stem, _)| stem);
        safe_key(&format!("{stem}/{number:09}")).unwrap_or_else(|| format!("{number:09}"))
    }

    /// Returns the fields of a row.
    ///
    /// # Errors
    /// The reason, if the row is no sample, or holds the name of a medium instead of the medium.
    fn fields(&self, columns: Columns, number: u64) -> Result<Vec<(Arc<str>, Bytes)>, String> {
        let sample = row_sample(columns, &self.rules, Some((&self.file, number)))?;
        let mut fields: Vec<(Arc<str>, Bytes)> = Vec::with_capacity(sample.fields.len() + 1);
        let contents = sample.fields.into_iter().chain([json_field(sample.json)]);
        for (extension, content) in contents {
            let column =
                || sample.uses.iter().find(|(_, field)| *field == extension).map(|(column, _)| column);
            let column = || column().map_or("", String::as_str);
            let payload = match content {
                Content::Bytes(payload) => payload,
                Content::File(path) => {
                    let (column, path) = (excerpt(column(), SHOWN_MAX), excerpt(&path, SHOWN_MAX));
                    return Err(format!(
                        "column `{column}`: it names the file `{path}` and holds no bytes; a table that is read \
                         in place holds the media, `dflop pack` also reads files"
                    ));
                }
            };
            if fields.iter().any(|(known, _)| **known == *extension) {
                let column = excerpt(column(), SHOWN_MAX);
                return Err(format!("column `{column}`: another column is the field `{extension}` already"));
            }
            fields.push((extension.into(), payload));
        }
        Ok(fields)
    }
}

/// Returns the document as a field.
fn json_field(json: Vec<u8>) -> (String, Content) {
    ("json".to_owned(), Content::Bytes(json.into()))
}

/// Runs a step of a format library; errors, and panics on damaged files, are faults.
fn checked<T>(step: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, TableFault> {
    let reason = match guarded(step) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(ArrowError::NotYetImplemented(what))) => format!("not supported: {what}"),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic,
    };
    Err(TableFault::Damaged(excerpt(&reason, REASON_MAX).into_owned()))
}
