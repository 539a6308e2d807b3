//! Columns of an index.
//!
//! | column | type | meaning |
//! | --- | --- | --- |
//! | `key` | utf8 | sample key |
//! | `offset` | u64 | first sample header in the uncompressed shard |
//! | `fields` | list of struct | in shard order: |
//! | `fields.extension` | dictionary u16 to utf8 | entry name after the key's dot |
//! | `fields.start_blocks` | u32 | payload start after `offset`, in 512-byte blocks |
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

use super::account::UnusedParts;
use crate::error::Skipped;
use crate::shard::{Compression, RawField, RawSample};
use arrow_array::builder::StringBuilder;
use arrow_array::cast::AsArray;
use arrow_array::types::{UInt16Type, UInt32Type};
use arrow_array::{
    ArrayRef, DictionaryArray, FixedSizeListArray, ListArray, PrimitiveArray, RecordBatch, StringArray,
    StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema};
use dflop_samples::inputs::TextCounter;
use dflop_samples::media::{
    Content, DecodeLimits, Media, MediaShape, Modality, RgbImage, SHAPE_NUMBERS, TextLength, Video,
    VideoSampling, extension_codec,
};
use dflop_samples::sample::{self, Sample};
use std::fmt::Debug;
use std::sync::Arc;

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

/// Columns for the rows so far; `extension_names` numbers the extensions.
#[derive(Debug)]
pub(super) struct Columns {
    pub(super) keys: StringBuilder,
    pub(super) offsets: Vec<u64>,
    pub(super) field_ends: Vec<i32>,
    pub(super) extension_names: Vec<Arc<str>>,
    pub(super) extensions: Vec<u16>,
    pub(super) start_blocks: Vec<u32>,
    pub(super) bytes: Vec<u64>,
    /// Kind of each field shape; `shapes` has the numbers.
    pub(super) kinds: Vec<u8>,
    pub(super) shapes: Vec<u32>,
    /// Token counts, by counter.
    pub(super) text_counts: Vec<CountedTexts>,
}

impl Columns {
    /// Creates columns without rows.
    pub(super) fn new() -> Self {
        Self {
            // Small shards must not reserve memory for a thousand keys.
            keys: StringBuilder::with_capacity(0, 0),
            offsets: Vec::new(),
            field_ends: vec![0],
            extension_names: Vec::new(),
            extensions: Vec::new(),
            start_blocks: Vec::new(),
            bytes: Vec::new(),
            kinds: Vec::new(),
            shapes: Vec::new(),
            text_counts: Vec::new(),
        }
    }

    /// Returns the number of rows.
    pub(super) fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Returns the memory used by the rows, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        let counts: usize = self.text_counts.iter().map(|counted| size_of_val(&*counted.lengths)).sum();
        self.keys.values_slice().len()
            + size_of_val(self.keys.offsets_slice())
            + size_of_val(&*self.offsets)
            + size_of_val(&*self.field_ends)
            + size_of_val(&*self.extensions)
            + size_of_val(&*self.start_blocks)
            + size_of_val(&*self.bytes)
            + size_of_val(&*self.kinds)
            + size_of_val(&*self.shapes)
            + counts
    }

    /// Adds a sample with field shapes.
    pub(super) fn push(&mut self, sample: &RawSample, shapes: &[MediaShape]) {
        self.keys.append_value(&sample.key);
        self.offsets.push(sample.offset);
        for (field, shape) in sample.fields.iter().zip(shapes) {
            let (kind, numbers) = shape.to_numbers();
            let extension = self.extension(&field.extension);
            self.extensions.push(extension);
            self.start_blocks.push(((field.offset - sample.offset) / BLOCK_BYTES) as u32);
            self.bytes.push(field.bytes);
            self.kinds.push(kind);
            self.shapes.extend(numbers);
        }
        self.field_ends.push(self.extensions.len() as i32);
    }

    /// Returns the number of an extension; a shard has few different extensions, so a linear search is fast.
    fn extension(&mut self, name: &Arc<str>) -> u16 {
        let known = self.extension_names.iter().position(|known| known == name);
        known.unwrap_or_else(|| {
            self.extension_names.push(name.clone());
            self.extension_names.len() - 1
        }) as u16
    }

    /// Adds rows without token counts; extension `n` in `rows` is extension `numbers[n]` in `self`.
    ///
    /// # Panics
    /// Never: a string builder holds UTF-8.
    pub(super) fn append(&mut self, rows: &Self, numbers: &[u16]) {
        let keys = std::str::from_utf8(rows.keys.values_slice()).expect("keys are texts");
        for ends in rows.keys.offsets_slice().windows(2) {
            self.keys.append_value(&keys[ends[0] as usize..ends[1] as usize]);
        }
        self.offsets.extend_from_slice(&rows.offsets);
        let fields = self.extensions.len() as i32;
        self.field_ends.extend(rows.field_ends[1..].iter().map(|end| fields + end));
        self.extensions.extend(rows.extensions.iter().map(|&number| numbers[usize::from(number)]));
        self.start_blocks.extend_from_slice(&rows.start_blocks);
        self.bytes.extend_from_slice(&rows.bytes);
        self.kinds.extend_from_slice(&rows.kinds);
        self.shapes.extend_from_slice(&rows.shapes);
    }

    /// Returns the length of the last sample, from the first header, in bytes.
    pub(super) fn last_sample_bytes(&self) -> u64 {
        let blocks = self.start_blocks.last().copied().unwrap_or(0);
        u64::from(blocks) * BLOCK_BYTES + self.bytes.last().copied().unwrap_or(0)
    }

    /// Returns the columns as arrays, with the extensions in `names`.
    ///
    /// # Errors
    /// The Arrow error if an extension has no name.
    pub(super) fn into_arrays(mut self, names: Arc<StringArray>) -> Result<Vec<ArrayRef>, ArrowError> {
        let extensions = DictionaryArray::<UInt16Type>::try_new(self.extensions.into(), names)?;
        let shapes = Arc::new(PrimitiveArray::from(self.shapes));
        let fields: Vec<ArrayRef> = vec![
            Arc::new(extensions),
            Arc::new(PrimitiveArray::from(self.start_blocks)),
            Arc::new(PrimitiveArray::from(self.bytes)),
            Arc::new(PrimitiveArray::from(self.kinds)),
            Arc::new(FixedSizeListArray::try_new(shape_item(), SHAPE_NUMBERS as i32, shapes, None)?),
        ];
        let fields = StructArray::try_new(field_columns(), fields, None)?;
        let ends = OffsetBuffer::new(self.field_ends.into());
        let mut arrays: Vec<ArrayRef> = vec![
            Arc::new(self.keys.finish()),
            Arc::new(PrimitiveArray::from(self.offsets)),
            Arc::new(ListArray::try_new(field_item(), ends, Arc::new(fields), None)?),
        ];
        for counted in self.text_counts {
            arrays.push(counts_column(counted.lengths.into())?);
        }
        Ok(arrays)
    }
}

/// Source of the token counts that an index returns.
#[derive(Debug, Clone, Default)]
pub enum TokenCounts {
    /// Estimates from the text alone.
    #[default]
    Estimated,
    /// Counts from this counter; a missing column is created.
    Of(Arc<dyn TextCounter>),
    /// Counts from this counter if the index has the column, else estimates.
    IfPresent(Arc<dyn TextCounter>),
}

impl TokenCounts {
    /// Returns the counter whose column is required.
    pub(super) fn required(&self) -> Option<&Arc<dyn TextCounter>> {
        match self {
            Self::Of(counter) => Some(counter),
            Self::Estimated | Self::IfPresent(_) => None,
        }
    }

    /// Returns the digest of the counter whose column is read.
    pub(super) fn wanted(&self) -> Option<String> {
        match self {
            Self::Estimated => None,
            Self::Of(counter) | Self::IfPresent(counter) => Some(counter.digest()),
        }
    }
}

/// Token count column: tokens and target tokens for each sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CountedTexts {
    pub(super) digest: String,
    pub(super) lengths: Vec<u32>,
}

/// Counts a shard's samples in order.
#[derive(Debug)]
pub(super) struct ShardCounter {
    counter: Arc<dyn TextCounter>,
    counted: CountedTexts,
    /// Number of samples that could not be counted, and the first error.
    refused: Option<(u64, String)>,
    limits: DecodeLimits,
}

impl ShardCounter {
    /// Creates a counter without samples; `limits` include the video sampling.
    pub(super) fn new(counter: Arc<dyn TextCounter>, limits: DecodeLimits) -> Self {
        let counted = CountedTexts { digest: counter.digest(), lengths: Vec::new() };
        Self { counter, counted, refused: None, limits }
    }

    /// Counts a sample with these field shapes; a sample that cannot be counted keeps the estimate.
    pub(super) fn push(&mut self, sample: &RawSample, shapes: &[MediaShape], estimate: TextLength) {
        let length = match self.counter.count(&self.text_sample(sample, shapes)) {
            Ok(length) => length,
            Err(error) => {
                let key = &sample.key;
                let first = || (0, format!("`{key}`, {error}"));
                self.refused.get_or_insert_with(first).0 += 1;
                estimate
            }
        };
        self.counted.lengths.extend([length.tokens, length.target_tokens.min(length.tokens)]);
    }

    /// Returns the sample with texts and documents. Videos are included without pixels if the counter reads
    /// frame times, images without pixels if it reads image sizes; other fields only have names.
    fn text_sample(&self, sample: &RawSample, shapes: &[MediaShape]) -> Sample {
        let field = |(field, shape): (&RawField, &MediaShape)| {
            let media = match shape {
                MediaShape::Image(size) if self.counter.reads_image_sizes() => Some(Media::Image(RgbImage {
                    width: size.width,
                    height: size.height,
                    ..RgbImage::default()
                })),
                _ => self.field_text(field),
            };
            let media = media.unwrap_or_else(|| Media::Opaque(bytes::Bytes::new()));
            sample::Field { extension: field.extension.clone(), media }
        };
        let mut texts =
            Sample::new(sample.key.clone(), sample.fields.iter().zip(shapes).map(field).collect());
        texts.shard = sample.shard.clone();
        texts.offset = sample.offset;
        texts
    }

    fn field_text(&self, field: &RawField) -> Option<Media> {
        let codec = extension_codec(&field.extension)?;
        let payload = field.payload.clone().unwrap_or_default();
        match codec.content() {
            Content::Text | Content::Document => codec.decode(payload, &self.limits).ok(),
            Content::Medium(Modality::Video) if self.counter.reads_video_times() => {
                let video = Video::without_pixels(&payload, &self.limits.video.sampling)?;
                video.ok().map(Media::Video)
            }
            _ => None,
        }
    }

    /// Returns the column, and a warning if some samples keep estimates.
    pub(super) fn finish(self, shard: &str) -> (CountedTexts, Option<String>) {
        let warning = self.refused.map(|(samples, first)| {
            format!(
                "tokens of {samples} samples of shard `{shard}` could not be counted and are estimates; the first: {first}"
            )
        });
        (self.counted, warning)
    }
}

/// Returns the token count columns in a record batch.
pub(super) fn count_columns(batch: &RecordBatch) -> Option<Vec<(String, PrimitiveArray<UInt32Type>)>> {
    let schema = batch.schema();
    counter_digests(&schema)
        .map(|digest| {
            let column = batch.column_by_name(&format!("{TEXT_TOKENS_PREFIX}{digest}"))?;
            let lengths = column.as_fixed_size_list_opt()?.values();
            Some((digest.to_owned(), lengths.as_primitive_opt()?.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::ImageSize;
    use dflop_samples::BoxError;

    /// Counts the pixels that images would have, if it reads sizes.
    #[derive(Debug)]
    struct Pixels {
        has_sizes: bool,
    }

    impl TextCounter for Pixels {
        fn digest(&self) -> String {
            "0123456789abcdef".to_owned()
        }

        fn reads_image_sizes(&self) -> bool {
            self.has_sizes
        }

        fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
            let pixels = |field: &sample::Field| match &field.media {
                Media::Image(image) => image.width * image.height + image.pixels.len() as u32,
                _ => 0,
            };
            let tokens = sample.fields.iter().map(pixels).sum();
            Ok(TextLength { tokens, target_tokens: 0 })
        }
    }

    #[test]
    fn a_counter_gets_the_sizes_of_images_on_request() {
        let field = |extension: &str| RawField {
            extension: extension.into(),
            offset: 0,
            bytes: 2,
            payload: Some(bytes::Bytes::from_static(b"ab")),
            size: None,
        };
        let fields = vec![field("png"), field("txt"), field("jpg")];
        let sample = RawSample { key: "k".into(), shard: "s".into(), offset: 0, epoch: 0, fields };
        let image = |width, height| MediaShape::Image(ImageSize { width, height });
        let shapes = [image(300, 20), MediaShape::Opaque, image(7, 10)];
        for (has_sizes, tokens) in [(true, 6070), (false, 0)] {
            let mut counter = ShardCounter::new(Arc::new(Pixels { has_sizes }), DecodeLimits::default());
            counter.push(&sample, &shapes, TextLength::default());
            let (counted, warning) = counter.finish("s");
            assert_eq!((counted.lengths, warning), (vec![tokens, 0], None));
        }
    }
}
