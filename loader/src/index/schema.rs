//! Defines the columns and metadata of an index file.
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `key` | utf8 | sample key |
//! | `offset` | u64 | first sample header in the uncompressed shard; in a table the row number |
//! | `fields` | list of struct | in shard order: |
//! | `fields.extension` | dictionary u16 to utf8 | entry name after the key's dot |
//! | `fields.start_blocks` | u32 | payload start after `offset`, in 512-byte blocks; 0 in a table |
//! | `fields.bytes` | u64 | payload length |
//! | `fields.kind` | u8 | shape kind |
//! | `fields.shape` | three u32 | shape as numbers |
//! | `text_tokens:DIGEST` | two u32 | tokens without media tokens, and target tokens, by one counter |
//!
//! [`to_numbers`](dflop_samples::media::MediaShape::to_numbers) defines kind and numbers: the columns are the
//! same for every modality, and a new modality is a new kind. There may be any number of `text_tokens`
//! columns.
//!
//! Shards with at most 512 samples share record batches; every larger shard is one batch. The schema's
//! metadata key `dflop` holds the rest as JSON: [`Metadata`].

use std::sync::Arc;

use arrow_array::types::UInt32Type;
use arrow_array::{ArrayRef, FixedSizeListArray, PrimitiveArray};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};
use dflop_samples::media::{SHAPE_NUMBERS, VideoSampling};

use super::account::UnusedParts;
use crate::error::Skipped;
use crate::shard::Compression;

/// Tar block size in bytes, the unit of `start_blocks`.
pub(super) const BLOCK_BYTES: u64 = 512;

/// File format version; changes whenever the file's meaning changes. An index with a different version is
/// rebuilt.
pub(super) const VERSION: u32 = 8;
/// Name prefix for token count columns, followed by the counter digest.
pub(super) const TEXT_TOKENS_PREFIX: &str = "text_tokens:";
/// Metadata key for the JSON document.
pub(super) const METADATA_KEY: &str = "dflop";

/// Indexed properties of one shard.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IndexedShard {
    /// Base name.
    pub name: String,
    /// File length in bytes.
    pub bytes: u64,
    /// Modification time in nanoseconds since 1970; detects a replaced shard.
    pub modified_ns: u64,
    /// Entity tag of a remote shard; also detects a replaced shard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// File compression.
    pub compression: Compression,
    /// Length after decompression, in bytes.
    pub unpacked_bytes: u64,
    /// Number of good samples.
    pub samples: u64,
    /// Total payload size of the good samples, in bytes.
    pub payload_bytes: u64,
    /// Digest over the file length and the keys, extensions, offsets and lengths, without the name.
    pub digest: u64,
    /// Blocks of a table, in row order; empty for a tar file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<IndexedBlock>,
}

/// Rows of a table that are decoded together: a row group, or a part of a long row group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IndexedBlock {
    /// Number of good samples.
    pub samples: u64,
    /// Payload size of the good samples, in bytes.
    pub bytes: u64,
}

/// JSON document in the schema metadata.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Metadata {
    pub(super) version: u32,
    pub(super) fingerprint: String,
    pub(super) shards: Vec<IndexedShard>,
    /// Skipped entries by shard number (shard names may change after indexing).
    pub(super) skipped: Vec<(usize, Skipped)>,
    pub(super) warnings: Vec<String>,
    /// Parts of good samples that no reader uses.
    #[serde(default, skip_serializing_if = "UnusedParts::is_empty")]
    pub(super) unused: UnusedParts,
    /// Video sampling; `None` if videos were not decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) video_sampling: Option<VideoSampling>,
    /// Names of the registered codecs that computed the shapes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) codecs: Vec<String>,
}

pub(super) fn shape_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::UInt32, false))
}

pub(super) fn field_columns() -> Fields {
    let extension = DataType::Dictionary(Box::new(DataType::UInt16), Box::new(DataType::Utf8));
    Fields::from(vec![
        Field::new("extension", extension, false),
        Field::new("start_blocks", DataType::UInt32, false),
        Field::new("bytes", DataType::UInt64, false),
        Field::new("kind", DataType::UInt8, false),
        Field::new("shape", numbers(SHAPE_NUMBERS), false),
    ])
}

pub(super) fn field_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Struct(field_columns()), false))
}

/// Returns the type of a column with `count` numbers per row.
fn numbers(count: usize) -> DataType {
    DataType::FixedSizeList(shape_item(), count as i32)
}

/// Returns a token count column: tokens and target tokens for each sample.
///
/// # Errors
/// [`ArrowError`] for an odd number of `lengths`.
pub(super) fn counts_column(lengths: PrimitiveArray<UInt32Type>) -> Result<ArrayRef, ArrowError> {
    Ok(Arc::new(FixedSizeListArray::try_new(shape_item(), 2, Arc::new(lengths), None)?))
}

/// Returns the counter digests in a schema's token count columns.
pub(super) fn counter_digests(schema: &Schema) -> impl Iterator<Item = &str> {
    schema.fields().iter().filter_map(|field| field.name().strip_prefix(TEXT_TOKENS_PREFIX))
}

/// Returns the schema, with a token count column per digest.
pub(super) fn schema<'a>(metadata: String, counters: impl IntoIterator<Item = &'a str>) -> Schema {
    let mut columns = vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("fields", DataType::List(field_item()), false),
    ];
    let counted = |digest| Field::new(format!("{TEXT_TOKENS_PREFIX}{digest}"), numbers(2), false);
    columns.extend(counters.into_iter().map(counted));
    Schema::new(columns).with_metadata([(METADATA_KEY.to_owned(), metadata)].into())
}
