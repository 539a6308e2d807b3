//! Packs Parquet and Arrow files, row by row, in file order.
//!
//! Reads values from Arrow arrays.

mod files;
#[cfg(all(test, feature = "parquet"))]
mod tests;

use super::packer::Packer;
use super::record::ID_COLUMNS;
use super::row::{Cell, Columns, RowRules};
use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, ArrowTimestampType, Date32Type, Date64Type, Decimal128Type, Decimal256Type,
    DurationMicrosecondType, DurationMillisecondType, DurationNanosecondType, DurationSecondType,
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, Time32MillisecondType,
    Time32SecondType, Time64MicrosecondType, Time64NanosecondType, TimestampMicrosecondType,
    TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, SchemaRef, TimeUnit};
use bytes::Bytes;
use dflop_loader::error::{Error, OutputError, Result};
use files::Batches;
use std::path::{Path, PathBuf};

pub(super) use files::Columnar;

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

/// Returns a row of a batch.
///
/// # Errors
/// The reason, if a column type is not bytes and has no JSON equivalent.
pub(super) fn row_at(batch: &RecordBatch, row: usize) -> Result<Columns, String> {
    let schema = batch.schema_ref();
    let columns = schema.fields().iter().zip(batch.columns());
    let cell = |(field, array): (&arrow_schema::FieldRef, &ArrayRef)| match cell_at(array, row) {
        Ok(cell) => Ok((field.name().clone(), cell)),
        Err(reason) => Err(format!("column `{}`: {reason}", field.name())),
    };
    columns.map(cell).collect()
}

/// Returns a single array value. Dates and times are ISO 8601 texts, decimals keep all digits.
fn cell_at(array: &dyn Array, at: usize) -> Result<Cell, String> {
    if array.is_null(at) {
        return Ok(Cell::Null);
    }
    Ok(match array.data_type() {
        DataType::Null => Cell::Null,
        DataType::Boolean => Cell::Bool(array.as_boolean().value(at)),
        DataType::Utf8 => Cell::Text(array.as_string::<i32>().value(at).to_owned()),
        DataType::LargeUtf8 => Cell::Text(array.as_string::<i64>().value(at).to_owned()),
        DataType::Utf8View => Cell::Text(array.as_string_view().value(at).to_owned()),
        DataType::Binary => bytes(array.as_binary::<i32>().value(at)),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().value(at)),
        DataType::BinaryView => bytes(array.as_binary_view().value(at)),
        DataType::FixedSizeBinary(_) => bytes(array.as_fixed_size_binary().value(at)),
        DataType::List(_) => list(&array.as_list::<i32>().value(at))?,
        DataType::LargeList(_) => list(&array.as_list::<i64>().value(at))?,
        DataType::FixedSizeList(..) => list(&array.as_fixed_size_list().value(at))?,
        DataType::Struct(_) => {
            let object = array.as_struct();
            let fields = object.fields().iter().zip(object.columns());
            let value = |(field, array): (&arrow_schema::FieldRef, &ArrayRef)| {
                Ok((field.name().clone(), cell_at(array, at)?))
            };
            Cell::Object(fields.map(value).collect::<Result<_, String>>()?)
        }
        DataType::Map(..) => map(&array.as_map().value(at))?,
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let key = cell_at(dictionary.keys(), at)?.as_integer().and_then(|key| usize::try_from(key).ok());
            let values = dictionary.values();
            let key = key.filter(|key| *key < values.len()).ok_or("a key outside of its dictionary")?;
            return cell_at(values, key);
        }
        data_type => return number_at(array, data_type, at),
    })
}

fn bytes(value: &[u8]) -> Cell {
    Cell::Bytes(Bytes::copy_from_slice(value))
}

fn list(values: &ArrayRef) -> Result<Cell, String> {
    let cells: Result<Vec<Cell>, String> = (0..values.len()).map(|at| cell_at(values, at)).collect();
    cells.map(Cell::List)
}

/// Returns an object for a map with text or number keys.
fn map(entries: &arrow_array::StructArray) -> Result<Cell, String> {
    let [keys, values] = [entries.column(0), entries.column(1)];
    let entry = |at| {
        let key = cell_at(keys, at)?;
        let name = key.to_name().ok_or_else(|| format!("a map with {} for a key", key.kind()))?;
        Ok((name, cell_at(values, at)?))
    };
    (0..entries.len()).map(entry).collect::<Result<_, String>>().map(Cell::Object)
}

/// Returns a number, or a time.
fn number_at(array: &dyn Array, data_type: &DataType, at: usize) -> Result<Cell, String> {
    Ok(match data_type {
        DataType::Int8 => Cell::Int(native::<Int8Type>(array, at).into()),
        DataType::Int16 => Cell::Int(native::<Int16Type>(array, at).into()),
        DataType::Int32 => Cell::Int(native::<Int32Type>(array, at).into()),
        DataType::Int64 => Cell::Int(native::<Int64Type>(array, at)),
        DataType::UInt8 => Cell::Int(native::<UInt8Type>(array, at).into()),
        DataType::UInt16 => Cell::Int(native::<UInt16Type>(array, at).into()),
        DataType::UInt32 => Cell::Int(native::<UInt32Type>(array, at).into()),
        DataType::UInt64 => Cell::Unsigned(native::<UInt64Type>(array, at)),
        DataType::Float16 => Cell::Single(native::<Float16Type>(array, at).to_f32()),
        DataType::Float32 => Cell::Single(native::<Float32Type>(array, at)),
        DataType::Float64 => Cell::Float(native::<Float64Type>(array, at)),
        DataType::Decimal128(..) => Cell::Text(array.as_primitive::<Decimal128Type>().value_as_string(at)),
        DataType::Decimal256(..) => Cell::Text(array.as_primitive::<Decimal256Type>().value_as_string(at)),
        DataType::Date32 => text(array.as_primitive::<Date32Type>().value_as_date(at)),
        DataType::Date64 => text(array.as_primitive::<Date64Type>().value_as_datetime(at)),
        DataType::Time32(TimeUnit::Second) => {
            text(array.as_primitive::<Time32SecondType>().value_as_time(at))
        }
        DataType::Time32(_) => text(array.as_primitive::<Time32MillisecondType>().value_as_time(at)),
        DataType::Time64(TimeUnit::Microsecond) => {
            text(array.as_primitive::<Time64MicrosecondType>().value_as_time(at))
        }
        DataType::Time64(_) => text(array.as_primitive::<Time64NanosecondType>().value_as_time(at)),
        DataType::Timestamp(unit, zone) => match unit {
            TimeUnit::Second => timestamp::<TimestampSecondType>(array, at, zone.is_some()),
            TimeUnit::Millisecond => timestamp::<TimestampMillisecondType>(array, at, zone.is_some()),
            TimeUnit::Microsecond => timestamp::<TimestampMicrosecondType>(array, at, zone.is_some()),
            TimeUnit::Nanosecond => timestamp::<TimestampNanosecondType>(array, at, zone.is_some()),
        },
        DataType::Duration(unit) => Cell::Int(match unit {
            TimeUnit::Second => native::<DurationSecondType>(array, at),
            TimeUnit::Millisecond => native::<DurationMillisecondType>(array, at),
            TimeUnit::Microsecond => native::<DurationMicrosecondType>(array, at),
            TimeUnit::Nanosecond => native::<DurationNanosecondType>(array, at),
        }),
        other => return Err(format!("values of the Arrow type {other} have no place in a sample")),
    })
}

fn native<T: ArrowPrimitiveType>(array: &dyn Array, at: usize) -> T::Native {
    array.as_primitive::<T>().value(at)
}

/// Returns a date or a time as text; `Debug` formats it as ISO 8601. Null if out of range.
fn text(time: Option<impl std::fmt::Debug>) -> Cell {
    time.map_or(Cell::Null, |time| Cell::Text(format!("{time:?}")))
}

fn timestamp<T: ArrowTimestampType>(array: &dyn Array, at: usize, is_utc: bool) -> Cell {
    match text(array.as_primitive::<T>().value_as_datetime(at)) {
        // Timestamps with a zone are stored in UTC.
        Cell::Text(time) if is_utc => Cell::Text(time + "Z"),
        cell => cell,
    }
}
