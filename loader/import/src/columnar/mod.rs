//! Packs Parquet and Arrow files, row by row, in file order.

mod cells;
mod files;

use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use self::cells::row_at;
use self::files::Batches;
pub(super) use self::files::Columnar;
use super::packer::Packer;
use super::record::ID_COLUMNS;
use super::row::RowRules;
use dflop_loader::error::{Error, OutputError, Result};

/// Key for the features in the metadata of a schema that Hugging Face `datasets` wrote.
const FEATURES: &str = "huggingface";

/// Table file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TableFile {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Name in the row documents: the path relative to the source.
    pub(super) name: String,
}

/// Packs every row. Holds one batch in memory: 64 rows for Parquet, a stored batch for Arrow.
pub(super) fn pack_files(files: &[TableFile], packer: &mut Packer<'_>) -> Result<()> {
    packer.begin(count_rows(files)?);
    for file in files {
        if packer.is_done() {
            break;
        }
        pack_file(file, packer)?;
    }
    Ok(())
}

/// Returns the total number of rows, 0 if a file does not declare it.
fn count_rows(files: &[TableFile]) -> Result<u64> {
    let mut rows = 0;
    for file in files {
        match open(file, |_| false, 0)?.rows() {
            Some(more) => rows += more,
            None => return Ok(0),
        }
    }
    Ok(rows)
}

fn pack_file(file: &TableFile, packer: &mut Packer<'_>) -> Result<()> {
    // Rows in earlier parts are not read, where the format counts them.
    let rows = open(file, |_| false, 0)?.rows();
    let mut row = 0;
    if let Some(rows) = rows {
        row = packer.pass(rows);
        if row == rows {
            return Ok(());
        }
    }
    let map = packer.column_map().clone();
    let is_listing = packer.is_listing();
    let is_id = |column: &str| ID_COLUMNS.contains(&column) || map.key_column() == Some(column);
    let batches = open(file, |column| !is_listing || is_id(column), row)?;
    let mut rules = RowRules::new(&map);
    declare(batches.schema(), &mut rules);
    packer.set_classes(rules.label_classes());
    for batch in batches {
        pack_batch(&batch?, &file.name, &mut row, &rules, packer)?;
        if packer.is_done() {
            break;
        }
    }
    Ok(())
}

/// Adds schema declarations to the rules.
pub(super) fn declare(schema: &SchemaRef, rules: &mut RowRules) {
    if let Some(metadata) = schema.metadata().get(FEATURES) {
        rules.declare(metadata);
    }
}

/// Packs the rows of a batch.
///
/// - `row`: number of the first row in the file, and then of the row after the last
pub(super) fn pack_batch(
    batch: &RecordBatch,
    file: &str,
    row: &mut u64,
    rules: &RowRules,
    packer: &mut Packer<'_>,
) -> Result<()> {
    let first = packer.pass(batch.num_rows() as u64);
    *row += first;
    for at in first as usize..batch.num_rows() {
        if packer.is_done() {
            break;
        }
        packer.add_row(file, *row, || row_at(batch, at), rules)?;
        *row += 1;
    }
    Ok(())
}

fn open(file: &TableFile, wanted: impl Fn(&str) -> bool, first_row: u64) -> Result<Batches> {
    let format = Columnar::of(&file.path).map_err(|source| Error::file(&file.path, source))?;
    let format = format.ok_or_else(|| unknown(&file.path))?;
    Batches::open(&file.path, format, wanted, first_row)
}

fn unknown(path: &Path) -> Error {
    let reason = "expected a Parquet or Arrow file, found another format by its first bytes".to_owned();
    Error::Output(OutputError::Pack { path: path.display().to_string(), reason })
}

#[cfg(all(test, feature = "parquet"))]
mod tests;
