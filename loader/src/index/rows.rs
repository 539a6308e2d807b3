//! Reads the rows of the index in place.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, DictionaryArray, ListArray, PrimitiveArray, RecordBatch, StringArray};
use dflop_costmodel::{AudioLength, ImageSize, Module, SampleShape, VideoShape};

use super::build::ShardColumns;
use super::schema::{AUDIO, IMAGE, TEXT, VIDEO, field_item};
use super::text_counts;
use super::text_counts::CountedTexts;
use crate::media::is_video_extension;
use crate::sample::FieldShape;
use crate::sample::text::TextLength;

/// Bytes of a tar block, the unit of `start_blocks`.
pub(super) const BLOCK_BYTES: u64 = 512;

/// Rows of one shard.
#[derive(Debug)]
pub(super) struct ShardRows {
    batch: RecordBatch,
    keys: StringArray,
    offsets: PrimitiveArray<UInt64Type>,
    lists: ListArray,
    extensions: DictionaryArray<UInt16Type>,
    names: StringArray,
    starts: PrimitiveArray<UInt32Type>,
    bytes: PrimitiveArray<UInt64Type>,
    media: PrimitiveArray<UInt8Type>,
    shapes: PrimitiveArray<UInt32Type>,
    /// Token counts, by the digest of the counter.
    text_counts: Vec<(String, PrimitiveArray<UInt32Type>)>,
    /// Token counts that are returned; `None` for estimates.
    selected_counts: Option<PrimitiveArray<UInt32Type>>,
}

impl ShardRows {
    /// Splits a batch into its columns; `None` if they are not those of [`super::schema`].
    pub(super) fn new(batch: &RecordBatch) -> Option<Self> {
        let lists = batch.column_by_name("fields")?.as_list_opt::<i32>()?.clone();
        if lists.value_type() != *field_item().data_type() {
            return None;
        }
        let fields = lists.values().as_struct();
        let extensions = fields.column_by_name("extension")?.as_dictionary_opt::<UInt16Type>()?.clone();
        Some(Self {
            keys: batch.column_by_name("key")?.as_string_opt::<i32>()?.clone(),
            offsets: batch.column_by_name("offset")?.as_primitive_opt()?.clone(),
            names: extensions.values().as_string_opt::<i32>()?.clone(),
            extensions,
            starts: fields.column_by_name("start_blocks")?.as_primitive_opt()?.clone(),
            bytes: fields.column_by_name("bytes")?.as_primitive_opt()?.clone(),
            media: fields.column_by_name("medium")?.as_primitive_opt()?.clone(),
            shapes: fields
                .column_by_name("shape")?
                .as_fixed_size_list_opt()?
                .values()
                .as_primitive_opt()?
                .clone(),
            lists,
            text_counts: text_counts::columns_of(batch)?,
            selected_counts: None,
            batch: batch.clone(),
        })
    }

    /// Returns the token counts, by the digest of the counter.
    pub(super) fn text_counts(&self) -> &[(String, PrimitiveArray<UInt32Type>)] {
        &self.text_counts
    }

    pub(super) fn has_counts(&self, digest: &str) -> bool {
        self.text_counts.iter().any(|(known, _)| known == digest)
    }

    /// Selects the token counts of this counter, or estimates.
    pub(super) fn select_counts(&mut self, digest: Option<&str>) {
        let found = self.text_counts.iter().find(|(known, _)| Some(known.as_str()) == digest);
        self.selected_counts = found.map(|(_, lengths)| lengths.clone());
    }

    /// Returns the columns as they were before encoding; extensions are numbered by the file's dictionary.
    pub(super) fn columns(&self) -> ShardColumns {
        let counted = |(digest, lengths): &(String, PrimitiveArray<UInt32Type>)| CountedTexts {
            digest: digest.clone(),
            lengths: lengths.values().to_vec(),
        };
        ShardColumns {
            keys: self.keys.iter().flatten().map(str::to_owned).collect(),
            offsets: self.offsets.values().to_vec(),
            field_ends: self.lists.value_offsets().to_vec(),
            extension_names: self.names.iter().flatten().map(Arc::from).collect(),
            extensions: self.extensions.keys().values().to_vec(),
            start_blocks: self.starts.values().to_vec(),
            bytes: self.bytes.values().to_vec(),
            media: self.media.values().to_vec(),
            shapes: self.shapes.values().to_vec(),
            text_counts: self.text_counts.iter().map(counted).collect(),
        }
    }

    /// Returns the columns as encoded.
    pub(super) fn batch(&self) -> &RecordBatch {
        &self.batch
    }

    /// Returns the extensions of the fields of all shards, which share one dictionary.
    pub(super) fn extensions(&self) -> impl Iterator<Item = &str> {
        self.names.iter().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn row(&self, shard: usize, row: usize) -> SampleRow<'_> {
        SampleRow { rows: self, shard, row }
    }
}

/// Sample in the index.
#[derive(Debug, Clone, Copy)]
pub struct SampleRow<'a> {
    rows: &'a ShardRows,
    /// Index of the shard in the dataset.
    pub shard: usize,
    row: usize,
}

/// Field in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldRow<'a> {
    /// Part of the entry name after the key's dot, lower-cased.
    pub extension: &'a str,
    /// Offset of the payload in the uncompressed shard.
    pub offset: u64,
    /// Length of the payload.
    pub bytes: u64,
    /// Shape of the medium.
    pub shape: FieldShape,
}

impl<'a> SampleRow<'a> {
    /// Returns the sample's key.
    #[must_use]
    pub fn key(&self) -> &'a str {
        self.rows.keys.value(self.row)
    }

    /// Returns the offset of the sample's first header in the uncompressed shard.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.rows.offsets.value(self.row)
    }

    /// Iterates over the fields, in shard order.
    pub fn fields(&self) -> impl Iterator<Item = FieldRow<'a>> + use<'a> {
        let (rows, offset) = (self.rows, self.offset());
        let ends = rows.lists.value_offsets();
        (ends[self.row] as usize..ends[self.row + 1] as usize).map(move |at| FieldRow {
            extension: rows.names.value(usize::from(rows.extensions.keys().value(at))),
            offset: offset + u64::from(rows.starts.value(at)) * BLOCK_BYTES,
            bytes: rows.bytes.value(at),
            shape: rows.shape(at),
        })
    }

    /// Returns the payload bytes of all fields.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fields().map(|field| field.bytes).fold(0, u64::saturating_add)
    }

    /// Writes the shape that the cost model needs into `shape`, whose buffers are reused; text by
    /// [`super::TokenCounts`].
    pub fn read_shape(&self, shape: &mut SampleShape) {
        shape.clear();
        for field in self.fields() {
            field.shape.add_to(shape);
        }
        if let Some(counts) = &self.rows.selected_counts {
            shape.text_tokens = counts.value(2 * self.row);
            shape.target_tokens = counts.value(2 * self.row + 1);
        }
    }
}

impl ShardRows {
    /// Returns whether any field has a medium of an encoder.
    pub(super) fn has_media_of(&self, module: Module) -> bool {
        let kinds = match module {
            Module::Vision => [IMAGE, VIDEO],
            Module::Audio => [AUDIO; 2],
            Module::Llm => [TEXT; 2],
        };
        self.media.values().iter().any(|medium| kinds.contains(medium))
    }

    /// Returns whether any field of the dataset has the extension of a video.
    pub(super) fn has_videos(&self) -> bool {
        self.names.iter().flatten().any(is_video_extension)
    }

    fn shape(&self, at: usize) -> FieldShape {
        let (first, second) = (self.shapes.value(2 * at), self.shapes.value(2 * at + 1));
        match self.media.value(at) {
            IMAGE => FieldShape::Image(ImageSize { width: first, height: second }),
            AUDIO => FieldShape::Audio(AudioLength { frames: first.into(), sample_rate_hz: second }),
            TEXT => FieldShape::Text(TextLength { tokens: first, target_tokens: second }),
            VIDEO => {
                let (width, height) = (second >> 16, second & 0xFFFF);
                FieldShape::Video(VideoShape { frames: first, width, height })
            }
            _ => FieldShape::Opaque,
        }
    }
}
