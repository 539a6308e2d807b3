//! Reads index rows in place.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, ListArray, PrimitiveArray, RecordBatch, StringArray, StructArray,
};
use arrow_schema::ArrowError;
use dflop_costmodel::{Module, SampleShape};
use dflop_samples::media::{MediaShape, Modality, SHAPE_NUMBERS, extension_modality};

use super::columns::Columns;
use super::schema::{BLOCK_BYTES, field_columns, field_item};
use super::text_counts::{self, CountedTexts};

/// Rows of a shard.
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
    kinds: PrimitiveArray<UInt8Type>,
    shapes: PrimitiveArray<UInt32Type>,
    /// Token counts, by counter digest.
    text_counts: Vec<(String, PrimitiveArray<UInt32Type>)>,
    /// Selected token counts; `None` for estimates.
    selected_counts: Option<PrimitiveArray<UInt32Type>>,
}

impl ShardRows {
    /// Splits a batch into columns; `None` if they differ from [`super::schema`].
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
            kinds: fields.column_by_name("kind")?.as_primitive_opt()?.clone(),
            shapes: fields
                .column_by_name("shape")?
                .as_fixed_size_list_opt()?
                .values()
                .as_primitive_opt()?
                .clone(),
            lists,
            text_counts: text_counts::count_columns(batch)?,
            selected_counts: None,
            batch: batch.clone(),
        })
    }

    /// Returns `count` rows from row `start`; `None` if the batch is shorter.
    pub(super) fn slice(&self, start: usize, count: usize) -> Option<Self> {
        let is_inside = start.checked_add(count).is_some_and(|end| end <= self.len());
        is_inside.then(|| Self {
            batch: self.batch.slice(start, count),
            keys: self.keys.slice(start, count),
            offsets: self.offsets.slice(start, count),
            lists: self.lists.slice(start, count),
            text_counts: {
                let part = |lengths: &PrimitiveArray<UInt32Type>| lengths.slice(2 * start, 2 * count);
                self.text_counts.iter().map(|(digest, lengths)| (digest.clone(), part(lengths))).collect()
            },
            selected_counts: None,
            // Fields are found by the `lists` offsets.
            extensions: self.extensions.clone(),
            names: self.names.clone(),
            starts: self.starts.clone(),
            bytes: self.bytes.clone(),
            kinds: self.kinds.clone(),
            shapes: self.shapes.clone(),
        })
    }

    /// Returns the counter digests.
    pub(super) fn counters(&self) -> impl Iterator<Item = &str> {
        self.text_counts.iter().map(|(digest, _)| digest.as_str())
    }

    /// Returns a counter's column: tokens and target tokens for each sample.
    pub(super) fn counts(&self, digest: &str) -> Option<&PrimitiveArray<UInt32Type>> {
        self.text_counts.iter().find(|(known, _)| known == digest).map(|(_, lengths)| lengths)
    }

    pub(super) fn has_counts(&self, digest: &str) -> bool {
        self.counts(digest).is_some()
    }

    /// Selects the token counts from this counter, or estimates.
    pub(super) fn select_counts(&mut self, digest: Option<&str>) {
        self.selected_counts = digest.and_then(|digest| self.counts(digest)).cloned();
    }

    /// Returns the columns without token counts, with a different extension dictionary.
    ///
    /// - `numbers`: number in `names` for each extension in the present dictionary
    ///
    /// # Errors
    /// [`ArrowError`] if a number is outside `names`.
    pub(super) fn arrays_with(
        &self,
        names: &Arc<StringArray>,
        numbers: &[u16],
    ) -> Result<Vec<ArrayRef>, ArrowError> {
        let keys = self.extensions.keys();
        let is_renumbered =
            numbers.iter().enumerate().any(|(present, &number)| present != usize::from(number));
        let keys = if is_renumbered {
            PrimitiveArray::from_iter_values(keys.values().iter().map(|&key| numbers[usize::from(key)]))
        } else {
            keys.clone()
        };
        let mut fields = self.lists.values().as_struct().columns().to_vec();
        fields[0] = Arc::new(DictionaryArray::try_new(keys, names.clone())?);
        let fields = Arc::new(StructArray::try_new(field_columns(), fields, None)?);
        let lists = ListArray::try_new(field_item(), self.lists.offsets().clone(), fields, None)?;
        Ok(vec![Arc::new(self.keys.clone()), Arc::new(self.offsets.clone()), Arc::new(lists)])
    }

    /// Returns columns with copied rows, without the extension names.
    pub(super) fn to_columns(&self) -> Columns {
        let mut columns = Columns::new();
        self.keys.iter().flatten().for_each(|key| columns.keys.append_value(key));
        columns.offsets = self.offsets.values().to_vec();
        columns.field_ends = self.lists.offsets().to_vec();
        columns.extensions = self.extensions.keys().values().to_vec();
        columns.start_blocks = self.starts.values().to_vec();
        columns.bytes = self.bytes.values().to_vec();
        columns.kinds = self.kinds.values().to_vec();
        columns.shapes = self.shapes.values().to_vec();
        let counted = |(digest, lengths): &(String, PrimitiveArray<UInt32Type>)| CountedTexts {
            digest: digest.clone(),
            lengths: lengths.values().to_vec(),
        };
        columns.text_counts = self.text_counts.iter().map(counted).collect();
        columns
    }

    /// Returns the encoded columns.
    pub(super) fn batch(&self) -> &RecordBatch {
        &self.batch
    }

    /// Returns the field extensions from all shards, which share one dictionary.
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
    /// Entry name after the key's dot, in lower case.
    pub extension: &'a str,
    /// Payload offset in the uncompressed shard, in bytes.
    pub offset: u64,
    /// Payload length in bytes.
    pub bytes: u64,
    /// Media shape.
    pub shape: MediaShape,
}

impl<'a> SampleRow<'a> {
    /// Returns the sample key.
    #[must_use]
    pub fn key(&self) -> &'a str {
        self.rows.keys.value(self.row)
    }

    /// Returns the offset of the first sample header in the uncompressed shard, in bytes.
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

    /// Returns the total payload size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.fields().map(|field| field.bytes).fold(0, u64::saturating_add)
    }

    /// Writes the shape that the cost model needs into `shape`, reusing the buffers; text lengths follow
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
    /// Returns the number of samples without a training target.
    pub(super) fn without_target(&self) -> u64 {
        if let Some(counts) = &self.selected_counts {
            return counts.values().chunks_exact(2).filter(|counts| counts[1] == 0).count() as u64;
        }
        let is_target = |shape| matches!(shape, MediaShape::Text(length) if length.target_tokens > 0);
        self.len() as u64 - self.rows_with(is_target)
    }

    /// Returns the number of samples with a medium for the encoder `module`.
    pub(super) fn samples_with_media(&self, module: Module) -> u64 {
        if !self.has_media(module) {
            return 0;
        }
        self.rows_with(|shape| shape.module() == Some(module))
    }

    /// Returns the number of samples with a field whose shape satisfies `is_such`.
    fn rows_with(&self, is_such: impl Fn(MediaShape) -> bool) -> u64 {
        let ends = self.lists.value_offsets();
        let has = |ends: &&[i32]| (ends[0] as usize..ends[1] as usize).any(|at| is_such(self.shape(at)));
        ends.windows(2).filter(has).count() as u64
    }

    /// Returns whether any field has a medium for the encoder `module`.
    pub(super) fn has_media(&self, module: Module) -> bool {
        let mut is_present = [false; 1 << u8::BITS];
        let ends = self.lists.value_offsets();
        for &kind in &self.kinds.values()[ends[0] as usize..ends[self.len()] as usize] {
            is_present[usize::from(kind)] = true;
        }
        let kinds = (0..=u8::MAX).filter(|&kind| is_present[usize::from(kind)]);
        let shapes = kinds.map(|kind| MediaShape::from_numbers(kind, Default::default()));
        shapes.map(MediaShape::module).any(|of| of == Some(module))
    }

    /// Returns whether any field in the dataset has a video extension.
    pub(super) fn has_videos(&self) -> bool {
        self.names.iter().flatten().any(|name| extension_modality(name) == Some(Modality::Video))
    }

    fn shape(&self, at: usize) -> MediaShape {
        let numbers = &self.shapes.values()[SHAPE_NUMBERS * at..];
        MediaShape::from_numbers(self.kinds.value(at), std::array::from_fn(|place| numbers[place]))
    }
}
