//! Opens Parquet files by range: the footer first, then the column chunks, or the pages, of a block of rows.

use super::{RowSamples, checked};
use arrow_schema::ArrowError;
use bytes::Bytes;
use dflop_loader::shard::{RowBlock, Table, TableFault, TableFile, TableFormat, TableRow};
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection, RowSelector,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaDataReader, RowGroupMetaData,
};
use parquet::file::reader::{ChunkReader, Length};
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes at both ends of a file.
const MAGIC: &[u8] = b"PAR1";
/// Number of bytes read at the end of a file, which contain most footers.
const FOOTER_BYTES: u64 = 64 << 10;
/// Decoded size of a block, in bytes; row groups are larger by up to a half, or are cut.
const BLOCK_BYTES: u64 = 32 << 20;
/// Maximum number of rows in a block.
const BLOCK_ROWS_MAX: u64 = 8 << 10;
/// Maximum number of rows in a row group.
const GROUP_ROWS_MAX: u64 = 1 << 32;
/// Maximum number of rows in a batch.
const BATCH_ROWS_MAX: u64 = 64;
/// Maximum number of encoded bytes of a block in memory; column chunks beyond are read piece by piece.
const READ_BYTES_MAX: u64 = 256 << 20;
/// Number of bytes per read where a block is read piece by piece.
const PIECE_BYTES: usize = 1 << 20;

/// Parquet, version 1 and 2.
#[derive(Debug)]
pub(super) struct Parquet;

impl TableFormat for Parquet {
    fn name(&self) -> &'static str {
        "Parquet"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["parquet"]
    }

    fn is_format(&self, first: &[u8]) -> bool {
        first.starts_with(MAGIC)
    }

    fn open(&self, name: &str, file: Box<dyn TableFile>) -> Result<Arc<dyn Table>, TableFault> {
        let bytes = file.bytes();
        let footer = bytes.saturating_sub(FOOTER_BYTES)..bytes;
        let chunks = Chunks::new(file.into(), vec![footer])?;
        let metadata = chunks.checked(|chunks| {
            let reader = ParquetMetaDataReader::new().with_offset_index_policy(PageIndexPolicy::Optional);
            let metadata = reader.parse_and_finish(chunks)?;
            Ok(ArrowReaderMetadata::try_new(metadata.into(), ArrowReaderOptions::new())?)
        })?;
        let blocks = checked(|| blocks(metadata.metadata().row_groups()))?;
        let samples = RowSamples::new(name, metadata.schema());
        Ok(Arc::new(ParquetTable { file: chunks.file.clone(), metadata, blocks, samples }))
    }
}

/// Cuts row groups into blocks of about [`BLOCK_BYTES`].
fn blocks(groups: &[RowGroupMetaData]) -> Result<Vec<RowBlock>, ArrowError> {
    let (mut blocks, mut start) = (Vec::new(), 0);
    for (number, group) in groups.iter().enumerate() {
        let rows = u64::try_from(group.num_rows()).ok().filter(|rows| *rows <= GROUP_ROWS_MAX);
        let Some(rows) = rows else {
            let reason = format!("row group {number} declares {} rows", group.num_rows());
            return Err(ArrowError::ParquetError(reason));
        };
        let bytes: u64 = group.columns().iter().map(decoded_bytes).sum();
        let parts = (bytes / BLOCK_BYTES).max(rows.div_ceil(BLOCK_ROWS_MAX)).clamp(1, rows.max(1));
        for part in 0..parts {
            let rows = start + part * rows / parts..start + (part + 1) * rows / parts;
            if !rows.is_empty() {
                blocks.push(RowBlock { group: number, rows });
            }
        }
        start += rows;
    }
    Ok(blocks)
}

/// Estimates the decoded size of a column chunk. Values that are stored once may occur in many rows, which
/// only some writers declare.
fn decoded_bytes(chunk: &ColumnChunkMetaData) -> u64 {
    let declared = chunk.unencoded_byte_array_data_bytes().unwrap_or(0);
    declared.max(chunk.uncompressed_size()).max(0) as u64
}

/// Returns the number of rows per batch, so that a batch does not fill the memory: each row may hold a copy
/// of the longest value in a dictionary.
fn batch_rows(group: &RowGroupMetaData) -> usize {
    let rows = group.num_rows().max(1) as u64;
    let row_bytes = |chunk: &ColumnChunkMetaData| {
        let is_declared = chunk.unencoded_byte_array_data_bytes().is_some();
        let is_shared = chunk.dictionary_page_offset().is_some() && !is_declared;
        if is_shared { decoded_bytes(chunk) } else { decoded_bytes(chunk) / rows }
    };
    let row_bytes: u64 = group.columns().iter().map(row_bytes).sum();
    (BLOCK_BYTES / row_bytes.max(1)).clamp(1, BATCH_ROWS_MAX) as usize
}

/// Open Parquet file.
#[derive(Debug)]
struct ParquetTable {
    file: Arc<dyn TableFile>,
    metadata: ArrowReaderMetadata,
    blocks: Vec<RowBlock>,
    samples: RowSamples,
}

impl Table for ParquetTable {
    fn blocks(&self) -> &[RowBlock] {
        &self.blocks
    }

    fn read(&self, block: usize, first_row: u64) -> Result<Vec<TableRow>, TableFault> {
        let RowBlock { group, rows } = &self.blocks[block];
        let first_in_group = self.blocks.partition_point(|block| block.group < *group);
        let group_start = self.blocks[first_in_group].rows.start;
        let rows = first_row - group_start..rows.end - group_start;
        let ranges = checked(|| Ok(self.byte_ranges(*group, &rows)))?;
        let is_held = ranges.iter().map(|range| range.end - range.start).sum::<u64>() <= READ_BYTES_MAX;
        let chunks = Chunks::new(self.file.clone(), if is_held { ranges } else { Vec::new() })?;
        chunks.checked(|chunks| {
            let skipped = RowSelector::skip(rows.start as usize);
            let selected = RowSelector::select((rows.end - rows.start) as usize);
            let batches =
                ParquetRecordBatchReaderBuilder::new_with_metadata(chunks.clone(), self.metadata.clone())
                    .with_row_groups(vec![*group])
                    .with_row_selection(RowSelection::from(vec![skipped, selected]))
                    .with_batch_size(batch_rows(self.metadata.metadata().row_group(*group)))
                    .build()?;
            self.samples.collect(batches, first_row)
        })
    }
}

impl ParquetTable {
    /// Returns the byte ranges that rows of a row group are in: pages where the file has an offset index,
    /// else whole column chunks.
    fn byte_ranges(&self, group: usize, rows: &Range<u64>) -> Vec<Range<u64>> {
        let metadata = self.metadata.metadata();
        let pages = metadata.offset_index().and_then(|index| index.get(group));
        let mut ranges = Vec::new();
        for (number, chunk) in metadata.row_group(group).columns().iter().enumerate() {
            let (start, length) = chunk.byte_range();
            let end = start.saturating_add(length);
            let pages = pages
                .and_then(|columns| columns.get(number))
                .map(parquet::file::page_index::offset_index::OffsetIndexMetaData::page_locations);
            let Some([first, rest @ ..]) = pages.map(Vec::as_slice) else {
                ranges.push(start..end);
                continue;
            };
            // The dictionary is before the first page.
            ranges.push(start..(first.offset as u64).clamp(start, end));
            let ends = rest.iter().map(|page| page.first_row_index as u64).chain([u64::MAX]);
            for (page, page_end) in std::iter::once(first).chain(rest).zip(ends) {
                if (page.first_row_index as u64) < rows.end && page_end > rows.start {
                    let offset = page.offset as u64;
                    ranges.push(offset..offset.saturating_add(page.compressed_page_size as u64));
                }
            }
        }
        joined(ranges, self.file.bytes())
    }
}

/// Sorts ranges, joins those that touch, and leaves out bytes outside the file.
fn joined(mut ranges: Vec<Range<u64>>, bytes: u64) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let range = range.start.min(bytes)..range.end.min(bytes);
        match joined.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// File with some ranges in memory; other ranges are read as they are needed.
#[derive(Debug, Clone)]
struct Chunks {
    file: Arc<dyn TableFile>,
    /// Start and bytes, in file order.
    held: Arc<Vec<(u64, Bytes)>>,
    /// The first failed read, which the format library only shows as a text.
    failure: Arc<Mutex<Option<io::Error>>>,
}

impl Chunks {
    /// Reads `held` ranges.
    ///
    /// # Errors
    /// The failed read.
    fn new(file: Arc<dyn TableFile>, held: Vec<Range<u64>>) -> Result<Self, TableFault> {
        let read = if held.is_empty() { Vec::new() } else { file.read(&held)? };
        let held = held.into_iter().map(|range| range.start).zip(read).collect();
        Ok(Self { file, held: Arc::new(held), failure: Arc::default() })
    }

    /// Runs a step of the format library.
    ///
    /// # Errors
    /// [`TableFault::Read`] if the file could not be read, else [`TableFault::Damaged`].
    fn checked<T>(&self, step: impl FnOnce(&Self) -> Result<T, ArrowError>) -> Result<T, TableFault> {
        checked(|| step(self)).map_err(|fault| {
            let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
            failure.map_or(fault, TableFault::Read)
        })
    }

    /// Returns the held bytes from `start` on, at most `length`; empty if the first byte is not held.
    fn held(&self, start: u64, length: usize) -> Bytes {
        let at = self.held.partition_point(|(held, _)| *held <= start);
        let Some((held, bytes)) = at.checked_sub(1).map(|at| &self.held[at]) else { return Bytes::new() };
        let from = ((start - held) as usize).min(bytes.len());
        bytes.slice(from..from.saturating_add(length).min(bytes.len()))
    }

    fn read_at(&self, start: u64, length: usize) -> io::Result<Bytes> {
        let held = self.held(start, length);
        if held.len() == length {
            return Ok(held);
        }
        let end = start.checked_add(length as u64).filter(|end| *end <= self.file.bytes());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let read = self.file.read(&[start..end]).map_err(|error| {
            let same = io::Error::new(error.kind(), error.to_string());
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            same
        })?;
        read.into_iter().next().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.file.bytes()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Cursor>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let capacity = if self.held(start, 1).is_empty() { PIECE_BYTES } else { 1 << 10 };
        Ok(BufReader::with_capacity(capacity, Cursor { chunks: self.clone(), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        self.read_at(start, length).map_err(|error| ParquetError::External(Box::new(error)))
    }
}

/// Reader from a position to the end of the file.
struct Cursor {
    chunks: Chunks,
    at: u64,
}

impl Read for Cursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.chunks.file.bytes().saturating_sub(self.at);
        let wanted = left.min(buffer.len() as u64) as usize;
        let held = self.chunks.held(self.at, wanted);
        let read = if held.is_empty() { self.chunks.read_at(self.at, wanted)? } else { held };
        buffer[..read.len()].copy_from_slice(&read);
        self.at += read.len() as u64;
        Ok(read.len())
    }
}
