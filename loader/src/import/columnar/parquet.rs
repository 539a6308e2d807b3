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

/// Maximum number of rows in memory at a time.
#[cfg(feature = "parquet")]
const BATCH_ROWS: usize = 64;
/// Row bytes in memory at a time, except for a single row that exceeds them.
#[cfg(feature = "parquet")]
const BATCH_BYTES: usize = 256 << 20;

/// Opens a file at a row; see [`super::files::Batches::open`].
#[cfg(feature = "parquet")]
pub(super) fn open_parquet(
    file: File,
    wanted: impl Fn(&str) -> bool,
    first_row: u64,
) -> Result<Opened, ArrowError> {
    use parquet::arrow::ProjectionMask;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    let builder = ParquetRecordBatchReaderBuilder::try_new(file.try_clone()?)?;
    let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or_default();
    let schema = builder.schema().clone();
    let mask = ProjectionMask::roots(builder.parquet_schema(), super::files::chosen(&schema, wanted));
    let offset = usize::try_from(first_row).unwrap_or(usize::MAX);
    let batch_rows = batch_rows(file, &mask)?;
    let reader = builder.with_projection(mask).with_offset(offset).with_batch_size(batch_rows).build()?;
    // The projection leaves out the schema metadata.
    let fields = arrow_array::RecordBatchReader::schema(&reader).fields().clone();
    let schema = arrow_schema::Schema::new_with_metadata(fields, schema.metadata().clone());
    Ok(Opened { batches: Box::new(reader), schema: schema.into(), rows: Some(rows) })
}

/// Returns the number of rows per batch, so that equal values that are stored once do not fill the memory:
/// each row may hold a copy of the longest dictionary value. Values without a dictionary are stored as often
/// as they occur.
#[cfg(feature = "parquet")]
fn batch_rows(
    file: File,
    mask: &parquet::arrow::ProjectionMask,
) -> Result<usize, parquet::errors::ParquetError> {
    use parquet::column::page::Page;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    let reader = SerializedFileReader::new(file)?;
    let mut largest = 0;
    for number in 0..reader.num_row_groups() {
        let group = reader.get_row_group(number)?;
        let mut bytes = 0_usize;
        for column in (0..group.num_columns()).filter(|&column| mask.leaf_included(column)) {
            let chunk = group.metadata().column(column);
            let is_small = chunk.uncompressed_size() <= (BATCH_BYTES / BATCH_ROWS) as i64;
            if is_small || chunk.dictionary_page_offset().is_none() {
                continue;
            }
            if let Some(Page::DictionaryPage { buf, .. }) =
                group.get_column_page_reader(column)?.get_next_page()?
            {
                bytes = bytes.saturating_add(buf.len());
            }
        }
        largest = largest.max(bytes);
    }
    Ok((BATCH_BYTES / largest.max(1)).clamp(1, BATCH_ROWS))
}

#[cfg(all(test, feature = "parquet"))]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::{ArrowWriter, ProjectionMask};
    use parquet::file::properties::WriterProperties;

    use super::*;

    /// Writes rows for one text column, with a dictionary.
    fn written(texts: &[String]) -> File {
        let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
        let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
        let settings = WriterProperties::builder().set_dictionary_page_size_limit(64 << 20);
        let mut file = tempfile::tempfile().unwrap();
        let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(settings.build())).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        file
    }

    #[test]
    fn rows_that_share_a_long_value_are_read_in_small_batches() {
        let long = |length: usize| vec!["x".repeat(length); 4];
        for (texts, rows) in [(long(100), 64), (long(32 << 20), 7), (vec!["a".into(), "b".into()], 64)] {
            assert_eq!(batch_rows(written(&texts), &ProjectionMask::all()).unwrap(), rows);
        }
    }
}
