//! Opens Parquet and Arrow files as record batches.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, SchemaRef};

use super::parquet::open_parquet;
use crate::error::{Error, OutputError, Result, excerpt, guarded};
use crate::store::file;

/// Bytes that are read from a file at a time.
const BUFFER_BYTES: usize = 1 << 18;
/// Maximum number of characters kept from a library message.
const REASON_MAX: usize = 200;

/// Columnar file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::import) enum Columnar {
    Parquet,
    /// Arrow IPC with a footer, also known as Feather 2.
    ArrowFile,
    ArrowStream,
}

impl Columnar {
    /// Detects the format from the first bytes of a file; `None` for an unknown format.
    pub(in crate::import) fn of(path: &Path) -> std::io::Result<Option<Self>> {
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
pub(in crate::import) struct Batches {
    path: String,
    opened: Opened,
}

/// File reader with the schema and row count, where known before the first batch.
pub(super) struct Opened {
    pub(super) batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    pub(super) schema: SchemaRef,
    /// Number of rows in the file, if known without reading it.
    pub(super) rows: Option<u64>,
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
    pub(in crate::import) fn open(
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
    pub(in crate::import) fn schema(&self) -> &SchemaRef {
        &self.opened.schema
    }

    /// Returns the number of rows in the file, if known without reading it.
    pub(in crate::import) fn rows(&self) -> Option<u64> {
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
pub(super) fn chosen(schema: &SchemaRef, wanted: impl Fn(&str) -> bool) -> Vec<usize> {
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
