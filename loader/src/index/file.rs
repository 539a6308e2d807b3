//! Reads an index file in place.

use std::sync::Arc;

use arrow_buffer::Buffer;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::FileDecoder;
use arrow_schema::{ArrowError, SchemaRef};
use bytes::Bytes;

use super::checksum::{checksum, checksum_place, damaged, file_footer};
use super::rows::ShardRows;
use super::schema::{METADATA_KEY, Metadata, VERSION};
use crate::error::guarded;
use crate::flow::{cores, in_parallel};

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
}
