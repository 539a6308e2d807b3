//! Packs CSV with a header: an entry per row, without spaces around values.
//!
//! A quoted value must start with the quote: after a space, a quote is an ordinary character.

use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use serde_json::{Map, Value};

use super::lines::open_text;
use super::packer::Packer;
use super::record::{KNOWN_COLUMNS, SHOWN_MAX, is_known_column};
use dflop_loader::error::{Error, OutputError, Result, StorageError, excerpt};
use dflop_samples::error_reason;

/// Packs every row; skips a row if the number of values differs from the header.
pub(super) fn pack_table(path: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let shown = path.display();
    let reader = open_text(path)
        .map_err(|source| Error::Storage(StorageError::File { path: shown.to_string(), source }))?;
    let mut table = ReaderBuilder::new().trim(Trim::All).from_reader(reader);
    let fail = |reason: String| Error::Output(OutputError::Pack { path: shown.to_string(), reason });
    let header = table.headers().map_err(|error| fail(error_reason(&error)))?.clone();
    if packer.column_map().is_empty() && !header.iter().any(is_known_column) {
        let found: Vec<&str> = header.iter().collect();
        let reason = format!(
            "the header must have a column for {KNOWN_COLUMNS}, found {}",
            excerpt(&found.join(", "), SHOWN_MAX)
        );
        return Err(fail(reason));
    }
    packer.begin(0);
    let mut row = StringRecord::new();
    loop {
        if packer.is_done() {
            return Ok(());
        }
        let line = table.position().line();
        let origin = || format!("{shown}:{line}");
        match table.read_record(&mut row) {
            Ok(false) => return Ok(()),
            Ok(true) => packer.add_entry(&origin(), None, &row_json(&header, &row))?,
            Err(error) if error.is_io_error() => return Err(fail(error_reason(&error))),
            Err(error) => packer.skip_entry(origin(), error_reason(&error)),
        }
    }
}

/// Returns the row as a JSON object of strings; columns without a name are left out.
fn row_json(header: &StringRecord, row: &StringRecord) -> Vec<u8> {
    let named = header.iter().zip(row).filter(|(column, _)| !column.is_empty());
    let object: Map<String, Value> = named.map(|(column, value)| (column.to_owned(), value.into())).collect();
    Value::Object(object).to_string().into_bytes()
}
