//! Opens Parquet files, in builds with the feature `parquet`.

use std::fs::File;

use arrow_schema::ArrowError;

use super::files::Opened;

/// Refuses every file.
#[cfg(not(feature = "parquet"))]
pub(super) fn open_parquet(
    _file: File,
    _wanted: impl Fn(&str) -> bool,
    _first_row: u64,
) -> Result<Opened, ArrowError> {
    let reason = "Parquet needs the cargo feature `parquet`, which is disabled in this build";
    Err(ArrowError::NotYetImplemented(reason.to_owned()))
}

/// Opens a file at a row; see [`super::files::Batches::open`].
#[cfg(feature = "parquet")]
pub(super) fn open_parquet(
    file: File,
    wanted: impl Fn(&str) -> bool,
    first_row: u64,
) -> Result<Opened, ArrowError> {
    use parquet::arrow::ProjectionMask;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    /// Rows that are in memory at a time.
    const BATCH_ROWS: usize = 64;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
    let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or_default();
    let schema = builder.schema().clone();
    let mask = ProjectionMask::roots(builder.parquet_schema(), super::files::chosen(&schema, wanted));
    let offset = usize::try_from(first_row).unwrap_or(usize::MAX);
    let reader = builder.with_projection(mask).with_offset(offset).with_batch_size(BATCH_ROWS).build()?;
    // The projection leaves out the metadata of the schema.
    let fields = arrow_array::RecordBatchReader::schema(&reader).fields().clone();
    let schema = arrow_schema::Schema::new_with_metadata(fields, schema.metadata().clone());
    Ok(Opened { batches: Box::new(reader), schema: schema.into(), rows: Some(rows) })
}
