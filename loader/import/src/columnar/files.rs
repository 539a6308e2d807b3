//! Opens Parquet and Arrow files as record batches; Parquet files in builds with the feature `parquet`.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, SchemaRef};

use dflop_loader::error::{Error, OutputError, Result, excerpt};
use dflop_loader::store::file;
use dflop_samples::guarded;

/// Bytes that are read from a file at a time.
const BUFFER_BYTES: usize = 1 << 18;
/// Maximum number of characters kept from a library message.
const REASON_MAX: usize = 200;

/// Maximum number of rows in memory at a time.
#[cfg(feature = "parquet")]
const BATCH_ROWS: usize = 64;
/// Row bytes in memory at a time, except for a single row that exceeds them.
#[cfg(feature = "parquet")]
const BATCH_BYTES: usize = 256 << 20;

/// Columnar file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columnar {
    Parquet,
    /// Arrow IPC with a footer, also known as Feather 2.
    ArrowFile,
    ArrowStream,
}

impl Columnar {
    /// Detects the format from the first bytes of a file; `None` for an unknown format.
    pub(crate) fn of(path: &Path) -> std::io::Result<Option<Self>> {
        let mut start = Vec::with_capacity(8);
        file::open(path)?.take(8).read_to_end(&mut start)?;
        Ok(Self::from_start(&start))
    }

    fn from_start(start: &[u8]) -> Option<Self> {
        match start {
            [b'P', b'A', b'R', b'1', ..] => Some(Self::Parquet),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Some(Self::ArrowFile),
            [0xff, 0xff, 0xff, 0xff, _, _, _, 0, ..] => Some(Self::ArrowStream),
            _ => None,
        }
    }
}

/// Record batches from a file, in order.
pub(crate) struct Batches {
    path: String,
    opened: Opened,
}

/// File reader with the schema and row count, where known before the first batch.
struct Opened {
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    schema: SchemaRef,
    /// Number of rows in the file, if known without reading it.
    rows: Option<u64>,
}

impl Opened {
    fn without_rows(
        schema: SchemaRef,
        batches: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
    ) -> Self {
        Self { batches: Box::new(batches), schema, rows: None }
    }
}

impl Batches {
    /// Opens a file.
    ///
    /// - `wanted`: chooses the columns that are read
    /// - `first_row`: rows before it are passed over where the format allows it cheaply, in Parquet
    ///
    /// # Errors
    /// [`Error::Storage`] if the file cannot be opened, [`Error::Output`] if it is damaged or this build
    /// cannot read it.
    pub(crate) fn open(
        path: &Path,
        format: Columnar,
        wanted: impl Fn(&str) -> bool,
        first_row: u64,
    ) -> Result<Self> {
        let file = file::open(path).map_err(|source| Error::file(path, source))?;
        let shown = path.display().to_string();
        let buffered = |file| BufReader::with_capacity(BUFFER_BYTES, file);
        let open = || -> Result<_, ArrowError> {
            Ok(match format {
                Columnar::Parquet => open_parquet(file, wanted, first_row)?,
                Columnar::ArrowFile => {
                    let schema = FileReader::try_new(buffered(file.try_clone()?), None)?.schema();
                    let reader = FileReader::try_new(buffered(file), Some(chosen(&schema, wanted)))?;
                    Opened::without_rows(reader.schema(), reader)
                }
                Columnar::ArrowStream => {
                    check_end(&file)?;
                    let schema = StreamReader::try_new(buffered(file), None)?.schema();
                    let file = file::open(path)?;
                    let reader = StreamReader::try_new(buffered(file), Some(chosen(&schema, wanted)))?;
                    Opened::without_rows(reader.schema(), reader)
                }
            })
        };
        let opened = checked(&shown, open)?;
        Ok(Self { path: shown, opened })
    }

    /// Returns the batch schema.
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.opened.schema
    }

    /// Returns the number of rows in the file, if known without reading it.
    pub(crate) fn rows(&self) -> Option<u64> {
        self.opened.rows
    }
}

impl Iterator for Batches {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = || self.opened.batches.next().transpose();
        checked(&self.path, next).transpose()
    }
}

/// Checks that a stream ends with an end marker: for a file that was cut between two batches, a reader
/// accepts the end of the file as the end of the stream.
fn check_end(mut file: &File) -> Result<(), ArrowError> {
    const MARKER: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
    let mut end = [0; MARKER.len()];
    file.seek(SeekFrom::End(-(MARKER.len() as i64)))?;
    file.read_exact(&mut end)?;
    file.rewind()?;
    if end == MARKER {
        return Ok(());
    }
    Err(ArrowError::ParseError("it ends without its end marker".to_owned()))
}

/// Returns the positions of the selected columns.
fn chosen(schema: &SchemaRef, wanted: impl Fn(&str) -> bool) -> Vec<usize> {
    let columns = schema.fields().iter().enumerate();
    columns.filter(|(_, field)| wanted(field.name())).map(|(at, _)| at).collect()
}

/// Runs a reader step; errors, and panics on damaged files, name the file.
fn checked<T>(path: &str, step: impl FnOnce() -> Result<T, ArrowError>) -> Result<T> {
    let fail = |reason: &str| {
        let reason = format!("the file is damaged: {}", excerpt(reason, REASON_MAX));
        Error::Output(OutputError::Pack { path: path.to_owned(), reason })
    };
    match guarded(step) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(ArrowError::IoError(_, source))) if source.kind() != ErrorKind::UnexpectedEof => {
            Err(Error::file(Path::new(path), source))
        }
        Ok(Err(ArrowError::NotYetImplemented(what))) => {
            let reason = excerpt(&what, REASON_MAX).into_owned();
            Err(Error::Output(OutputError::Pack { path: path.to_owned(), reason }))
        }
        Ok(Err(error)) => Err(fail(&error.to_string())),
        Err(panic) => Err(fail(&panic)),
    }
}

/// Refuses every file.
#[cfg(not(feature = "parquet"))]
fn open_parquet(_file: File, _wanted: impl Fn(&str) -> bool, _first_row: u64) -> Result<Opened, ArrowError> {
    let reason = "Parquet needs the cargo feature `parquet`, which is disabled in this build";
    Err(ArrowError::NotYetImplemented(reason.to_owned()))
}

/// Opens a file at a row; see [`Batches::open`].
#[cfg(feature = "parquet")]
fn open_parquet(file: File, wanted: impl Fn(&str) -> bool, first_row: u64) -> Result<Opened, ArrowError> {
    use parquet::arrow::ProjectionMask;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    let builder = ParquetRecordBatchReaderBuilder::try_new(file.try_clone()?)?;
    let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or_default();
    let schema = builder.schema().clone();
    let mask = ProjectionMask::roots(builder.parquet_schema(), chosen(&schema, wanted));
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
