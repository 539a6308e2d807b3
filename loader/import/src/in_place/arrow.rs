//! Opens Arrow IPC files and streams by range: the headers first, then a record batch at a time.
//!
//! A record batch is a block, because its buffers are not cut by rows. A stream has no footer: the headers of
//! the batches are read from start to end, and the bodies between them are passed over.

use super::{RowSamples, checked};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{Block, MessageHeader, MetadataVersion, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, Schema, SchemaRef};
use bytes::Bytes;
use dflop_loader::shard::{RowBlock, Table, TableFault, TableFile, TableFormat, TableRow};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes at both ends of a file with a footer.
const MAGIC: &[u8] = b"ARROW1";
/// Bytes before the length of a message.
const MARKER: [u8; 4] = [0xff; 4];
/// Length of the footer length and the magic bytes behind it.
const TAIL_BYTES: u64 = 10;
/// Length of the marker and the metadata length before a message.
const PREFIX_BYTES: u64 = 8;
/// Maximum length of the metadata of a message, in bytes.
const METADATA_BYTES_MAX: u64 = 64 << 20;
/// Number of rows that are converted at a time.
const BATCH_ROWS: usize = 64;

/// Arrow IPC files, also known as Feather 2, and streams, as `datasets` saves them.
#[derive(Debug)]
pub(super) struct Arrow;

impl TableFormat for Arrow {
    fn name(&self) -> &'static str {
        "Arrow"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["arrow", "feather"]
    }

    fn is_format(&self, first: &[u8]) -> bool {
        first.starts_with(MAGIC) || (first.starts_with(&MARKER) && first.get(7) == Some(&0))
    }

    fn open(&self, name: &str, file: Box<dyn TableFile>) -> Result<Arc<dyn Table>, TableFault> {
        let file = ArrowFile(file);
        let is_file = file.read(0..MAGIC.len() as u64)?.starts_with(MAGIC);
        let Layout { schema, version, dictionaries, batches } =
            if is_file { file.layout_by_footer()? } else { file.layout_by_headers()? };
        let mut decoder = FileDecoder::new(schema.clone(), version);
        for block in &dictionaries {
            let bytes = Buffer::from(file.message(block)?);
            checked(|| decoder.read_dictionary(block, &bytes))?;
        }
        let (mut blocks, mut stored, mut start) = (Vec::new(), Vec::new(), 0);
        for block in batches {
            let rows = file.batch_rows(&block)?;
            if rows > 0 {
                blocks.push(RowBlock { group: stored.len(), rows: start..start + rows });
                stored.push(block);
                start += rows;
            }
        }
        Ok(Arc::new(ArrowTable { samples: RowSamples::new(name, &schema), file, decoder, blocks, stored }))
    }
}

/// Open Arrow file.
#[derive(Debug)]
struct ArrowTable {
    file: ArrowFile,
    decoder: FileDecoder,
    blocks: Vec<RowBlock>,
    /// Location of each block.
    stored: Vec<Block>,
    samples: RowSamples,
}

impl Table for ArrowTable {
    fn blocks(&self) -> &[RowBlock] {
        &self.blocks
    }

    fn read(&self, block: usize, first_row: u64) -> Result<Vec<TableRow>, TableFault> {
        let RowBlock { rows, .. } = &self.blocks[block];
        let bytes = Buffer::from(self.file.message(&self.stored[block])?);
        checked(|| {
            let batch = self.decoder.read_record_batch(&self.stored[block], &bytes)?;
            let batch = batch.filter(|batch| batch.num_rows() as u64 == rows.end - rows.start);
            let batch = batch.ok_or_else(|| invalid("a batch has other rows than its header declares"))?;
            self.samples.collect(slices(&batch, (first_row - rows.start) as usize), first_row)
        })
    }
}

/// Cuts the rows of a batch from `first` on into short batches.
fn slices(batch: &RecordBatch, first: usize) -> impl Iterator<Item = Result<RecordBatch, ArrowError>> {
    let starts = (first..batch.num_rows()).step_by(BATCH_ROWS);
    starts.map(|start| Ok(batch.slice(start, BATCH_ROWS.min(batch.num_rows() - start))))
}

fn invalid(reason: &str) -> ArrowError {
    ArrowError::ParseError(reason.to_owned())
}

/// Location of everything in a file.
struct Layout {
    schema: SchemaRef,
    version: MetadataVersion,
    dictionaries: Vec<Block>,
    batches: Vec<Block>,
}

#[derive(Debug)]
struct ArrowFile(Box<dyn TableFile>);

impl ArrowFile {
    /// # Errors
    /// [`TableFault::Damaged`] if the range ends outside the file.
    fn read(&self, range: Range<u64>) -> Result<Bytes, TableFault> {
        if range.end > self.0.bytes() || range.start > range.end {
            let (bytes, end) = (self.0.bytes(), range.end);
            return Err(TableFault::Damaged(format!("it ends at byte {bytes}, before byte {end}")));
        }
        let read = self.0.read(&[range])?;
        read.into_iter().next().ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof).into())
    }

    /// Reads a whole message.
    fn message(&self, block: &Block) -> Result<Bytes, TableFault> {
        let [start, metadata, body] =
            [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()].map(u64::try_from);
        match (start, metadata, body) {
            (Ok(start), Ok(metadata), Ok(body)) if metadata >= PREFIX_BYTES => {
                self.read(start..start.saturating_add(metadata).saturating_add(body))
            }
            _ => Err(TableFault::Damaged("a message has an invalid location".to_owned())),
        }
    }

    /// Returns the number of rows in a batch, from its header.
    fn batch_rows(&self, block: &Block) -> Result<u64, TableFault> {
        let header = Block::new(block.offset(), block.metaDataLength(), 0);
        let header = self.message(&header)?;
        checked(|| {
            let start = if header.starts_with(&MARKER) { 8 } else { 4 };
            let message = root_as_message(&header[start..]).map_err(|error| invalid(&error.to_string()))?;
            let batch = message.header_as_record_batch().ok_or_else(|| invalid("expected a record batch"))?;
            u64::try_from(batch.length()).map_err(|_| invalid("a batch has a negative length"))
        })
    }

    fn layout_by_footer(&self) -> Result<Layout, TableFault> {
        let bytes = self.0.bytes();
        let tail = self.read(bytes.saturating_sub(TAIL_BYTES)..bytes)?;
        let length = checked(|| {
            let tail = tail.as_ref().try_into().map_err(|_| invalid("it ends before its footer"))?;
            read_footer_length(tail)
        })?;
        let end = bytes - TAIL_BYTES;
        let start = end.checked_sub(length as u64);
        let start = start.ok_or_else(|| TableFault::Damaged("it ends before its footer".to_owned()))?;
        let footer = self.read(start..end)?;
        checked(|| {
            let footer = root_as_footer(&footer).map_err(|error| invalid(&error.to_string()))?;
            let schema = footer.schema().ok_or_else(|| invalid("the footer has no schema"))?;
            Ok(Layout {
                schema: Arc::new(fb_to_schema(schema)),
                version: footer.version(),
                dictionaries: footer.dictionaries().iter().flatten().copied().collect(),
                batches: footer.recordBatches().iter().flatten().copied().collect(),
            })
        })
    }

    /// Passes over the messages of a stream, which must end with its end marker: a stream that was cut
    /// between two batches looks complete otherwise.
    fn layout_by_headers(&self) -> Result<Layout, TableFault> {
        let (mut schema, mut version) = (None::<Schema>, MetadataVersion::V5);
        let (mut dictionaries, mut batches, mut at) = (Vec::new(), Vec::new(), 0);
        loop {
            let prefix = self.read(at..at + PREFIX_BYTES).map_err(without_end)?;
            let length = u64::from(u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]));
            if !prefix.starts_with(&MARKER) || length > METADATA_BYTES_MAX {
                return Err(TableFault::Damaged(format!("there is no message at byte {at}")));
            }
            if length == 0 {
                break;
            }
            let metadata = self.read(at + PREFIX_BYTES..at + PREFIX_BYTES + length).map_err(without_end)?;
            let (kind, body) = checked(|| {
                let message = root_as_message(&metadata).map_err(|error| invalid(&error.to_string()))?;
                if let Some(found) = message.header_as_schema() {
                    schema = Some(fb_to_schema(found));
                    version = message.version();
                }
                let body = u64::try_from(message.bodyLength());
                Ok((message.header_type(), body.map_err(|_| invalid("a body has a negative length"))?))
            })?;
            let block = Block::new(at as i64, (PREFIX_BYTES + length) as i32, body as i64);
            match kind {
                MessageHeader::DictionaryBatch => dictionaries.push(block),
                MessageHeader::RecordBatch => batches.push(block),
                _ => {}
            }
            at = (at + PREFIX_BYTES + length).saturating_add(body);
        }
        let schema = schema.ok_or_else(|| TableFault::Damaged("it has no schema".to_owned()))?;
        Ok(Layout { schema: Arc::new(schema), version, dictionaries, batches })
    }
}

/// Explains that a stream was cut.
fn without_end(fault: TableFault) -> TableFault {
    match fault {
        TableFault::Damaged(reason) => TableFault::Damaged(format!("{reason}, without its end marker")),
        fault @ TableFault::Read(_) => fault,
    }
}
