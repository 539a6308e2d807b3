//! Defines the schema of an index file: its columns and its metadata.
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `key` | utf8 | sample key |
//! | `offset` | u64 | first header of the sample in the uncompressed shard |
//! | `fields` | list of struct | in shard order: |
//! | `fields.extension` | dictionary u16 to utf8 | what follows the key's dot |
//! | `fields.start_blocks` | u32 | start of the payload behind `offset`, in blocks of 512 bytes |
//! | `fields.bytes` | u64 | length of the payload |
//! | `fields.medium` | u8 | 0 opaque, 1 image, 2 audio, 3 text, 4 video |
//! | `fields.shape` | two u32 | image: width, height in pixels; audio: frames, sample rate in Hz; text: tokens, target tokens; video: frames after sampling, width x 65,536 + height |
//! | `text_tokens:DIGEST` | two u32 | tokens beside those of media, target tokens, by the counter of this digest; any number of such columns |
//!
//! A record batch is a shard. The schema's metadata key `dflop` holds the rest as JSON: [`Metadata`].

use std::sync::Arc;

use arrow_schema::{DataType, Field, Fields, Schema};

use crate::error::Skipped;
use crate::media::VideoSampling;
use crate::shard::Compression;

/// Changes with every change of the file's meaning; another number is rebuilt.
pub(super) const VERSION: u32 = 5;
/// Prefix of the names of counted columns; the digest of the counter follows.
pub(super) const TEXT_TOKENS_PREFIX: &str = "text_tokens:";
/// Metadata key of the JSON document.
pub(super) const METADATA_KEY: &str = "dflop";

/// Metadata of one shard.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IndexedShard {
    /// Base name.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// Time of the last change, in nanoseconds since 1970; tells a replaced shard.
    pub modified_ns: u64,
    /// Entity tag of a remote shard, which tells a replaced one too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Compression of the shard.
    pub compression: Compression,
    /// Length after decompression.
    pub unpacked_bytes: u64,
    /// Good samples.
    pub samples: u64,
    /// Payload bytes of the good samples.
    pub payload_bytes: u64,
    /// Digest of the file's length and of keys, extensions, offsets and lengths; not of the name.
    pub digest: u64,
}

/// The JSON document in the schema's metadata.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Metadata {
    pub(super) version: u32,
    pub(super) fingerprint: String,
    pub(super) shards: Vec<IndexedShard>,
    /// What is bad, with the number of its shard: the name may be another when the file is opened.
    pub(super) skipped: Vec<(usize, Skipped)>,
    pub(super) warnings: Vec<String>,
    /// Sampling of videos; `None` if they were not examined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) video_sampling: Option<VideoSampling>,
}

/// Codes of `fields.medium`.
pub(super) const OPAQUE: u8 = 0;
pub(super) const IMAGE: u8 = 1;
pub(super) const AUDIO: u8 = 2;
pub(super) const TEXT: u8 = 3;
pub(super) const VIDEO: u8 = 4;

pub(super) fn shape_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::UInt32, false))
}

pub(super) fn field_columns() -> Fields {
    let extension = DataType::Dictionary(Box::new(DataType::UInt16), Box::new(DataType::Utf8));
    Fields::from(vec![
        Field::new("extension", extension, false),
        Field::new("start_blocks", DataType::UInt32, false),
        Field::new("bytes", DataType::UInt64, false),
        Field::new("medium", DataType::UInt8, false),
        Field::new("shape", pair(), false),
    ])
}

pub(super) fn field_item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Struct(field_columns()), false))
}

/// The type of a column of two numbers a row.
fn pair() -> DataType {
    DataType::FixedSizeList(shape_item(), 2)
}

/// Digests of the counted columns of a schema.
pub(super) fn counter_digests(schema: &Schema) -> impl Iterator<Item = &str> {
    schema.fields().iter().filter_map(|field| field.name().strip_prefix(TEXT_TOKENS_PREFIX))
}

/// The schema with one counted column for each digest.
pub(super) fn schema<'a>(metadata: String, counters: impl IntoIterator<Item = &'a str>) -> Schema {
    let mut columns = vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("fields", DataType::List(field_item()), false),
    ];
    let counted = |digest| Field::new(format!("{TEXT_TOKENS_PREFIX}{digest}"), pair(), false);
    columns.extend(counters.into_iter().map(counted));
    Schema::new(columns).with_metadata([(METADATA_KEY.to_owned(), metadata)].into())
}
