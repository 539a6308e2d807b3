//! Collects rows and builds record batch columns from them.

use std::sync::Arc;

use arrow_array::builder::StringBuilder;
use arrow_array::types::UInt16Type;
use arrow_array::{
    ArrayRef, DictionaryArray, FixedSizeListArray, ListArray, PrimitiveArray, StringArray, StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::ArrowError;
use dflop_samples::media::{MediaShape, SHAPE_NUMBERS};

use super::schema::{BLOCK_BYTES, counts_column, field_columns, field_item, shape_item};
use super::text_counts::CountedTexts;
use crate::shard::RawSample;

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
