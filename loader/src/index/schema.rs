//! Defines the columns and metadata of an index file.
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `key` | utf8 | sample key |
//! | `offset` | u64 | first header of the sample in the uncompressed shard |
//! | `fields` | list of struct | in shard order: |
//! | `fields.extension` | dictionary u16 to utf8 | part of the entry name after the key's dot |
//! | `fields.start_blocks` | u32 | start of the payload after `offset`, in blocks of 512 bytes |
//! | `fields.bytes` | u64 | length of the payload |
//! | `fields.kind` | u8 | kind of the shape |
//! | `fields.shape` | three u32 | the shape as numbers |
//! | `text_tokens:DIGEST` | two u32 | tokens without those of media, target tokens, by one counter |
//!
//! Kind and numbers are those of [`to_numbers`](dflop_samples::media::MediaShape::to_numbers): the columns
//! are the same for every modality, and a new one is a new kind. There may be any number of `text_tokens`
//! columns.
//!
//! Shards of at most 512 samples share record batches, any other one is a batch. The schema's metadata key
//! `dflop` holds the rest as JSON: [`Metadata`].

use std::sync::Arc;

use arrow_array::types::UInt32Type;
use arrow_array::{ArrayRef, FixedSizeListArray, PrimitiveArray};
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};
use dflop_samples::media::{SHAPE_NUMBERS, VideoSampling};

use super::account::UnusedParts;
use crate::error::Skipped;
use crate::shard::Compression;

/// Changes whenever the meaning of the file changes; an index of another version is rebuilt.
pub(super) const VERSION: u32 = 8;
/// Prefix of the names of token count columns, followed by the digest of the counter.
pub(super) const TEXT_TOKENS_PREFIX: &str = "text_tokens:";
/// Metadata key of the JSON document.
pub(super) const METADATA_KEY: &str = "dflop";

/// Indexed properties of one shard.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IndexedShard {
    /// Base name.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// Modification time, in nanoseconds since 1970; detects a replaced shard.
    pub modified_ns: u64,
    /// Entity tag of a remote shard, which also detects a replaced one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Compression of the file.
    pub compression: Compression,
    /// Length after decompression.
    pub unpacked_bytes: u64,
    /// Good samples.
    pub samples: u64,
    /// Payload bytes of the good samples.
    pub payload_bytes: u64,
    /// Digest of the file's length and of keys, extensions, offsets and lengths, without the name.
    pub digest: u64,
}

/// JSON document in the schema's metadata.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Metadata {
    pub(super) version: u32,
    pub(super) fingerprint: String,
    pub(super) shards: Vec<IndexedShard>,
    /// Bad entries with the index of their shard, whose name may have changed when the file is opened.
    pub(super) skipped: Vec<(usize, Skipped)>,
    pub(super) warnings: Vec<String>,
    /// Parts of the good samples that no reader uses.
    #[serde(default, skip_serializing_if = "UnusedParts::is_empty")]
    pub(super) unused: UnusedParts,
    /// Sampling of videos; `None` if they were not decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) video_sampling: Option<VideoSampling>,
    /// Names of the registered codecs that shapes come from.
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

/// Returns the type of a column of this many numbers per row.
fn numbers(count: usize) -> DataType {
    DataType::FixedSizeList(shape_item(), count as i32)
}

/// Returns a token count column: tokens and target tokens of each sample.
///
/// # Errors
/// [`ArrowError`] if their number is odd.
pub(super) fn counts_column(lengths: PrimitiveArray<UInt32Type>) -> Result<ArrayRef, ArrowError> {
    Ok(Arc::new(FixedSizeListArray::try_new(shape_item(), 2, Arc::new(lengths), None)?))
}

/// Returns the digests of the token count columns of a schema.
pub(super) fn counter_digests(schema: &Schema) -> impl Iterator<Item = &str> {
    schema.fields().iter().filter_map(|field| field.name().strip_prefix(TEXT_TOKENS_PREFIX))
}

/// Returns the schema, with one token count column per digest.
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
