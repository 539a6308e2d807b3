//! Reads an index file in place, and computes the checksum while writing and when reading.
//!
//! The checksum is the XXH3 digest over the digests of all file chunks. It covers everything except the
//! digits in the footer.

use super::rows::ShardRows;
use super::schema::{METADATA_KEY, Metadata, VERSION};
use crate::error::guarded;
use crate::flow::{cores, in_parallel};
use arrow_buffer::Buffer;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_schema::{ArrowError, SchemaRef};
use bytes::Bytes;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Returns the lower-case hex digits of `bytes`.
pub(super) fn hex(bytes: &[u8]) -> String {
    format!("{:x}", Bytes::copy_from_slice(bytes))
}

/// Decoded index file; the arrays are views into the file.
#[derive(Debug)]
pub(super) struct DecodedIndex {
    pub(super) metadata: Metadata,
    pub(super) rows: Vec<ShardRows>,
}

/// Decodes an index; the arrays are views into `file`.
///
/// # Errors
/// The reason why the file is damaged, or that it has a different version.
pub(super) fn decode_index(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    // The checksum guards against accidents; Arrow's reader panics on many files that were made up.
    guarded(|| decode_checked(file)).map_err(|reason| damaged(&reason))?
}

fn decode_checked(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    let footer = file_footer(file)?;
    let digits = checksum_place(file, &footer)?;
    if !cfg!(fuzzing) && checksum(file, &digits).as_bytes() != &file[digits] {
        return Err(damaged("the checksum differs"));
    }
    let schema = Arc::new(fb_to_schema(footer.schema().ok_or_else(|| damaged("no schema"))?));
    let document = schema.metadata().get(METADATA_KEY).ok_or_else(|| damaged("no metadata"))?;
    let metadata: Metadata = serde_json::from_str(document).map_err(|error| damaged(&error.to_string()))?;
    if metadata.version != VERSION {
        return Err(ArrowError::SchemaError(format!("version {} instead of {VERSION}", metadata.version)));
    }
    let batches = read_batches(file, &footer, schema)?;
    let counts = metadata.shards.iter().map(|shard| shard.samples);
    let rows = split_batches(&batches, counts).ok_or_else(|| damaged("the numbers of samples differ"))?;
    Ok(DecodedIndex { metadata, rows })
}

/// Splits batches into shard rows; each shard is in one batch. `None` if the sample counts differ from
/// `counts`.
fn split_batches(batches: &[ShardRows], counts: impl Iterator<Item = u64>) -> Option<Vec<ShardRows>> {
    let mut batches = batches.iter();
    let (mut batch, mut at) = (batches.next(), 0);
    let mut rows = Vec::new();
    for count in counts {
        let count = usize::try_from(count).ok()?;
        while count > 0 && batch.is_some_and(|batch| batch.len() == at) {
            (batch, at) = (batches.next(), 0);
        }
        rows.push(batch?.slice(at, count)?);
        at += count;
    }
    let is_end = batch.is_none_or(|batch| batch.len() == at) && batches.all(|batch| batch.len() == 0);
    is_end.then_some(rows)
}

/// Decodes a shard's rows; ignores metadata and checksum, if any.
///
/// # Errors
/// The Arrow reader error.
pub(super) fn decode_rows(file: &Bytes) -> Result<ShardRows, ArrowError> {
    let footer = file_footer(file)?;
    let schema = Arc::new(fb_to_schema(footer.schema().ok_or_else(|| damaged("no schema"))?));
    let mut rows = read_batches(file, &footer, schema)?;
    rows.pop().filter(|_| rows.is_empty()).ok_or_else(|| damaged("several shards where one is expected"))
}

/// Reads all batches, in parallel.
fn read_batches(
    file: &Bytes,
    footer: &arrow_ipc::Footer<'_>,
    schema: SchemaRef,
) -> Result<Vec<ShardRows>, ArrowError> {
    let buffer = Buffer::from(file.clone());
    let mut decoder = FileDecoder::new(schema, footer.version());
    let block_of = |block: &arrow_ipc::Block| {
        let start = usize::try_from(block.offset()).unwrap_or(usize::MAX);
        let length = block.metaDataLength() as usize + block.bodyLength() as usize;
        let is_inside = start.checked_add(length).is_some_and(|end| end <= buffer.len());
        if is_inside {
            Ok(buffer.slice_with_length(start, length))
        } else {
            Err(damaged("a block lies outside of the file"))
        }
    };
    for block in footer.dictionaries().iter().flatten() {
        decoder.read_dictionary(block, &block_of(block)?)?;
    }
    let blocks: Vec<_> = footer.recordBatches().iter().flatten().collect();
    let rows_of = |block: &&arrow_ipc::Block| {
        let batch = decoder.read_record_batch(block, &block_of(block)?)?;
        let batch = batch.ok_or_else(|| damaged("a block has no batch"))?;
        ShardRows::new(&batch).ok_or_else(|| damaged("columns differ"))
    };
    // On a separate thread, a panic in Arrow's reader would be printed.
    let guarded_rows = |block: &_| guarded(|| rows_of(block)).map_err(|reason| damaged(&reason))?;
    in_parallel(cores(), &blocks, guarded_rows).into_iter().collect()
}

/// Metadata key for the checksum in the footer.
pub(super) const CHECKSUM_KEY: &str = "dflop.xxh3";
/// Number of hex digits in the checksum.
pub(super) const CHECKSUM_DIGITS: usize = 16;
/// Number of file bytes per digest.
const CHECKSUM_CHUNK_BYTES: usize = 1 << 20;
/// Length of the trailer after an Arrow footer: four length bytes, six magic bytes.
const TRAILER_BYTES: usize = 10;

/// Error while writing an index file.
#[derive(Debug)]
pub(super) enum WriteFault {
    /// The index cannot be encoded.
    Encode(ArrowError),
    /// The rows cannot be read back.
    Rows(io::Error),
    /// The file cannot be written.
    Write(io::Error),
}

impl From<ArrowError> for WriteFault {
    fn from(error: ArrowError) -> Self {
        match error {
            ArrowError::IoError(_, source) => Self::Write(source),
            other => Self::Encode(other),
        }
    }
}

pub(super) fn damaged(what: &str) -> ArrowError {
    ArrowError::ParseError(format!("damaged: {what}"))
}

/// Returns the footer of a file, or of a file's end, before anything in it is verified.
pub(super) fn file_footer(file: &[u8]) -> Result<arrow_ipc::Footer<'_>, ArrowError> {
    let trailer_start = file
        .len()
        .checked_sub(TRAILER_BYTES)
        .ok_or_else(|| damaged("the file is shorter than its trailer"))?;
    let trailer = file[trailer_start..].try_into().map_err(|_| damaged("trailer"))?;
    let footer_start = trailer_start.checked_sub(read_footer_length(trailer)?);
    let footer_start = footer_start.ok_or_else(|| damaged("the file is shorter than its footer"))?;
    arrow_ipc::root_as_footer(&file[footer_start..trailer_start]).map_err(|error| damaged(&error.to_string()))
}

/// Returns the location of the checksum digits in the file.
pub(super) fn checksum_place(
    file: &[u8],
    footer: &arrow_ipc::Footer<'_>,
) -> Result<Range<usize>, ArrowError> {
    let stored = footer.custom_metadata().iter().flatten().find(|pair| pair.key() == Some(CHECKSUM_KEY));
    let stored = stored.and_then(|pair| pair.value()).filter(|digits| digits.len() == CHECKSUM_DIGITS);
    let stored = stored.ok_or_else(|| damaged("no checksum"))?;
    // The digits are a view into `file`, so the digits' address determines the offset.
    let start = stored.as_ptr().addr() - file.as_ptr().addr();
    Ok(start..start + CHECKSUM_DIGITS)
}

/// Computes a file's checksum as hex digits, hashing chunks in parallel.
pub(super) fn checksum(file: &[u8], digits: &Range<usize>) -> String {
    let parts = [&file[..digits.start], &file[digits.end..]];
    let chunks: Vec<&[u8]> = parts.iter().flat_map(|part| part.chunks(CHECKSUM_CHUNK_BYTES)).collect();
    checksum_digits(&in_parallel(cores(), &chunks, |chunk| xxh3_64(chunk).to_le_bytes()).concat())
}

fn checksum_digits(digests: &[u8]) -> String {
    format!("{:0CHECKSUM_DIGITS$x}", xxh3_64(digests))
}

/// Arrow file writer that hashes all bytes and writes them in chunks.
#[derive(Debug)]
pub(super) struct ChecksumWriter<W> {
    sink: W,
    /// Chunk digests so far.
    digests: Vec<u8>,
    /// Bytes of the incomplete chunk.
    chunk: Vec<u8>,
    /// Bytes written after [`Self::hold`].
    held: Option<Vec<u8>>,
}

impl<W: Write> ChecksumWriter<W> {
    pub(super) fn new(sink: W) -> Self {
        Self { sink, digests: Vec::new(), chunk: Vec::with_capacity(CHECKSUM_CHUNK_BYTES), held: None }
    }

    /// Keeps everything written from now on in memory: the footer, whose checksum is not known yet.
    pub(super) fn hold(&mut self) {
        self.held = Some(Vec::new());
    }

    /// Writes the footer with the checksum, and returns the file writer.
    ///
    /// # Errors
    /// [`WriteFault`] if the file cannot be written, or if the held bytes are not a footer.
    pub(super) fn finish(mut self) -> Result<W, WriteFault> {
        let footer = self.held.take().unwrap_or_default();
        let digits = checksum_place(&footer, &file_footer(&footer)?)?;
        let after = &footer[digits.end..];
        let written = self.write_all(&footer[..digits.start]).and_then(|()| {
            self.end_chunk()?;
            self.digests
                .extend(after.chunks(CHECKSUM_CHUNK_BYTES).flat_map(|chunk| xxh3_64(chunk).to_le_bytes()));
            self.sink.write_all(checksum_digits(&self.digests).as_bytes())?;
            self.sink.write_all(after)
        });
        written.map_err(WriteFault::Write)?;
        Ok(self.sink)
    }

    fn end_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.digests.extend(xxh3_64(&self.chunk).to_le_bytes());
        self.sink.write_all(&self.chunk)?;
        self.chunk.clear();
        Ok(())
    }
}

impl<W: Write> Write for ChecksumWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(held) = &mut self.held {
            held.extend_from_slice(bytes);
            return Ok(bytes.len());
        }
        let room = CHECKSUM_CHUNK_BYTES - self.chunk.len();
        let taken = &bytes[..room.min(bytes.len())];
        self.chunk.extend_from_slice(taken);
        if self.chunk.len() == CHECKSUM_CHUNK_BYTES {
            self.end_chunk()?;
        }
        Ok(taken.len())
    }

    /// Does nothing, because each digest covers a full chunk.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards a fixed bug: the checksum once omitted the footer, where a wrong fingerprint digit changed the
    /// order.
    #[test]
    fn no_byte_of_an_index_changes_unnoticed() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = crate::write::ShardWriter::builder(directory.path().join("shards")).build().unwrap();
        for key in ["a", "b"] {
            writer.write(key, &[("txt", b"a kite")]).unwrap();
        }
        let index = std::fs::read(writer.finish().unwrap().index.unwrap()).unwrap();
        assert!(decode_index(&index.clone().into()).is_ok());
        for at in 0..index.len() {
            for flipped in [0x01, 0x80] {
                let mut damaged = index.clone();
                damaged[at] ^= flipped;
                assert!(decode_index(&damaged.into()).is_err(), "byte {at} of {}", index.len());
            }
        }
    }

    #[test]
    fn a_file_that_is_written_in_pieces_has_the_checksum_that_is_read() {
        for bytes in [0, 1, CHECKSUM_CHUNK_BYTES - 1, CHECKSUM_CHUNK_BYTES, 2 * CHECKSUM_CHUNK_BYTES + 9] {
            let content: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
            let mut writer = ChecksumWriter::new(Vec::new());
            content.chunks(100_003).for_each(|piece| writer.write_all(piece).unwrap());
            writer.end_chunk().unwrap();
            let end = content.len()..content.len();
            assert_eq!(checksum_digits(&writer.digests), checksum(&content, &end), "{bytes} bytes");
            assert_eq!(writer.sink, content);
        }
    }
}
