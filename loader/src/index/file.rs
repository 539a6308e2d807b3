//! Encodes an index as Arrow IPC and reads it in place.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::StringBuilder;
use arrow_array::{
    ArrayRef, DictionaryArray, FixedSizeListArray, ListArray, PrimitiveArray, RecordBatch, StringArray,
    StructArray, types::UInt16Type,
};
use arrow_buffer::{Buffer, OffsetBuffer};
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::writer::FileWriter;
use arrow_schema::ArrowError;
use bytes::Bytes;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use super::build::{BuiltShard, ShardColumns};
use super::rows::ShardRows;
use super::schema::{METADATA_KEY, Metadata, VERSION, field_columns, field_item, schema, shape_item};
use crate::error::guarded;
use crate::media::VideoSampling;

/// Metadata key of the checksum in the footer.
const CHECKSUM_KEY: &str = "dflop.xxh3";
/// Hex digits of the checksum.
const CHECKSUM_DIGITS: usize = 16;
/// Bytes of the file that one digest covers.
const CHECKSUM_CHUNK_BYTES: usize = 1 << 20;
/// Length of the trailer after the footer of an Arrow file: four bytes of length, six of magic.
const TRAILER_BYTES: usize = 10;

/// Encodes the shards, in order.
pub(super) fn encode_index(
    built: Vec<BuiltShard>,
    video_sampling: VideoSampling,
) -> Result<Vec<u8>, ArrowError> {
    let names = extension_names(&built)?;
    let metadata = Metadata {
        version: VERSION,
        fingerprint: fingerprint(&built),
        shards: built.iter().map(|shard| shard.shard.clone()).collect(),
        skipped: built
            .iter()
            .enumerate()
            .flat_map(|(number, shard)| shard.skipped.iter().map(move |skipped| (number, skipped.clone())))
            .collect(),
        warnings: built.iter().flat_map(|shard| shard.warnings.clone()).collect(),
        video_sampling: cfg!(feature = "video").then_some(video_sampling),
    };
    let metadata =
        serde_json::to_string(&metadata).map_err(|error| ArrowError::ExternalError(error.into()))?;
    let counters: Vec<String> = counters(&built).map(str::to_owned).collect();
    let schema = Arc::new(schema(metadata, counters.iter().map(String::as_str)));
    let mut writer = FileWriter::try_new(Vec::new(), &schema)?;
    for shard in built {
        let columns = columns_of(shard.columns, &names, &counters)?;
        writer.write(&RecordBatch::try_new(schema.clone(), columns)?)?;
    }
    // Reserves the digits, which are replaced in place when the checksum of the rest is known.
    writer.write_metadata(CHECKSUM_KEY, "0".repeat(CHECKSUM_DIGITS));
    let mut file = writer.into_inner()?;
    let digits = checksum_place(&file, &footer_of(&file)?)?;
    let checksum = checksum(&file, &digits);
    file[digits].copy_from_slice(checksum.as_bytes());
    Ok(file)
}

fn damaged(what: &str) -> ArrowError {
    ArrowError::ParseError(format!("damaged: {what}"))
}

/// Returns the footer, before anything in it is verified.
fn footer_of(file: &[u8]) -> Result<arrow_ipc::Footer<'_>, ArrowError> {
    let trailer_start = file
        .len()
        .checked_sub(TRAILER_BYTES)
        .ok_or_else(|| damaged("the file is shorter than its trailer"))?;
    let trailer = file[trailer_start..].try_into().map_err(|_| damaged("trailer"))?;
    let footer_start = trailer_start.checked_sub(read_footer_length(trailer)?);
    let footer_start = footer_start.ok_or_else(|| damaged("the file is shorter than its footer"))?;
    arrow_ipc::root_as_footer(&file[footer_start..trailer_start]).map_err(|error| damaged(&error.to_string()))
}

/// Returns the location of the checksum's digits in the file.
fn checksum_place(file: &[u8], footer: &arrow_ipc::Footer<'_>) -> Result<Range<usize>, ArrowError> {
    let stored = footer.custom_metadata().iter().flatten().find(|pair| pair.key() == Some(CHECKSUM_KEY));
    let stored = stored.and_then(|pair| pair.value()).filter(|digits| digits.len() == CHECKSUM_DIGITS);
    let stored = stored.ok_or_else(|| damaged("no checksum"))?;
    // The digits are a view into `file`, so their address gives their offset.
    let start = stored.as_ptr().addr() - file.as_ptr().addr();
    Ok(start..start + CHECKSUM_DIGITS)
}

/// Computes XXH3 of everything but the digits of the checksum, as hex digits: the digest of the digests of
/// its chunks, which are computed in parallel.
fn checksum(file: &[u8], digits: &Range<usize>) -> String {
    let parts = [&file[..digits.start], &file[digits.end..]];
    let chunks: Vec<&[u8]> = parts.iter().flat_map(|part| part.chunks(CHECKSUM_CHUNK_BYTES)).collect();
    let digests = in_parallel(&chunks, |chunk| xxh3_64(chunk).to_le_bytes());
    format!("{:0CHECKSUM_DIGITS$x}", xxh3_64(&digests.concat()))
}

/// Processes every item, on one thread per core; returns the results in the order of the items.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = items.len().div_ceil(threads).max(1);
    let (first, others) = items.split_at(share.min(items.len()));
    std::thread::scope(|scope| {
        let run = |share: &[T]| share.iter().map(&work).collect::<Vec<R>>();
        let running: Vec<_> = others.chunks(share).map(|share| scope.spawn(move || run(share))).collect();
        let mut answers = run(first);
        for thread in running {
            answers.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        answers
    })
}

/// Collects the extensions of all shards in the order of their first use: one dictionary for the whole file.
fn extension_names(built: &[BuiltShard]) -> Result<Arc<StringArray>, ArrowError> {
    let mut names: Vec<&str> = Vec::new();
    for name in built.iter().flat_map(|shard| &shard.columns.extension_names) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    if names.len() > usize::from(u16::MAX) {
        let reason = format!(
            "{} different field extensions, expected at most 65,535; keys must not contain dots",
            names.len()
        );
        return Err(ArrowError::InvalidArgumentError(reason));
    }
    Ok(Arc::new(StringArray::from(names)))
}

fn fingerprint(built: &[BuiltShard]) -> String {
    let mut hasher = Sha256::new();
    for shard in built {
        hasher.update(shard.digest);
    }
    hex(&hasher.finalize()[..16])
}

/// Returns the lower-case hex digits of `bytes`.
pub(super) fn hex(bytes: &[u8]) -> String {
    format!("{:x}", Bytes::copy_from_slice(bytes))
}

/// Returns the digests of the counters that counted all shards.
fn counters(built: &[BuiltShard]) -> impl Iterator<Item = &str> {
    let has = |shard: &BuiltShard, digest: &str| {
        shard.columns.text_counts.iter().any(|counted| counted.digest == digest)
    };
    let first = built.iter().take(1).flat_map(|shard| &shard.columns.text_counts);
    let digests = first.map(|counted| counted.digest.as_str());
    digests.filter(move |digest| built.iter().all(|shard| has(shard, digest)))
}

fn columns_of(
    mut columns: ShardColumns,
    names: &Arc<StringArray>,
    counters: &[String],
) -> Result<Vec<ArrayRef>, ArrowError> {
    let global = |local: &Arc<str>| names.iter().position(|name| name == Some(local)).unwrap_or(0) as u16;
    let map: Vec<u16> = columns.extension_names.iter().map(global).collect();
    let extensions = columns.extensions.iter().map(|&local| map[usize::from(local)]);
    let extensions = PrimitiveArray::<UInt16Type>::from_iter_values(extensions);
    let shapes = Arc::new(PrimitiveArray::from(columns.shapes));
    let fields: Vec<ArrayRef> = vec![
        Arc::new(DictionaryArray::try_new(extensions, names.clone())?),
        Arc::new(PrimitiveArray::from(columns.start_blocks)),
        Arc::new(PrimitiveArray::from(columns.bytes)),
        Arc::new(PrimitiveArray::from(columns.media)),
        Arc::new(FixedSizeListArray::try_new(shape_item(), 2, shapes, None)?),
    ];
    let fields = StructArray::try_new(field_columns(), fields, None)?;
    let ends = OffsetBuffer::new(columns.field_ends.into());
    let mut keys = StringBuilder::new();
    columns.keys.iter().for_each(|key| keys.append_value(key));
    let counted = counters.iter().filter_map(|digest| {
        let found = columns.text_counts.iter_mut().find(|counted| counted.digest == *digest)?;
        Some(std::mem::take(&mut found.lengths))
    });
    let counted: Vec<ArrayRef> = counted
        .map(|lengths| {
            let lengths = Arc::new(PrimitiveArray::from(lengths));
            Ok(Arc::new(FixedSizeListArray::try_new(shape_item(), 2, lengths, None)?) as ArrayRef)
        })
        .collect::<Result<_, ArrowError>>()?;
    let mut arrays: Vec<ArrayRef> = vec![
        Arc::new(keys.finish()),
        Arc::new(PrimitiveArray::from(columns.offsets)),
        Arc::new(ListArray::try_new(field_item(), ends, Arc::new(fields), None)?),
    ];
    arrays.extend(counted);
    Ok(arrays)
}

/// Decoded index file, whose arrays are views of it.
pub(super) struct DecodedIndex {
    pub(super) metadata: Metadata,
    pub(super) rows: Vec<ShardRows>,
}

/// Decodes an index; the arrays are views of `file`.
///
/// # Errors
/// The reason why the file is damaged, or that it has another version.
pub(super) fn decode_index(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    // The checksum guards against accidents; Arrow's reader panics on many files that were made up.
    guarded(|| decode_checked(file)).map_err(|reason| damaged(&reason))?
}

fn decode_checked(file: &Bytes) -> Result<DecodedIndex, ArrowError> {
    let footer = footer_of(file)?;
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
    let rows = in_parallel(&blocks, rows_of).into_iter().collect::<Result<Vec<_>, _>>()?;
    let counts = metadata.shards.iter().map(|shard| shard.samples);
    if !counts.eq(rows.iter().map(|rows| rows.len() as u64)) {
        return Err(damaged("the numbers of samples differ"));
    }
    Ok(DecodedIndex { metadata, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards a fixed bug: the checksum once omitted the footer, where a wrong digit of the fingerprint
    /// changed the order.
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
