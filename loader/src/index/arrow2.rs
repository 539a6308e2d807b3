//! Converts index batches for code that still uses arrow2.
//!
//! arrow2 is unmaintained, and RUSTSEC-2025-0038 concerns arrow2's `Rows`, which is not used here; code that
//! can migrate should use `arrow`. Nothing is copied: batches pass through the Arrow C data interface, and
//! the arrow2 arrays keep the index memory alive. Only batches with index columns are accepted, because
//! arrow2's import is not safe for arbitrary batches: for example, it reads a misaligned buffer.

use std::mem::{align_of, size_of, transmute};

use ::arrow2::array::{Array, StructArray};
use ::arrow2::chunk::Chunk;
use ::arrow2::datatypes::Schema;
use ::arrow2::ffi::{ArrowArray, ArrowSchema, import_array_from_c, import_field_from_c};
use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, to_ffi};
use arrow_array::{Array as _, RecordBatch};

use super::schema::{counter_digests, schema};
use crate::error::{Error, Result, StorageError};

// Both types are the C data interface structures, field by field, in C representation.
const _: () = assert!(size_of::<FFI_ArrowArray>() == size_of::<ArrowArray>());
const _: () = assert!(align_of::<FFI_ArrowArray>() == align_of::<ArrowArray>());
const _: () = assert!(size_of::<FFI_ArrowSchema>() == size_of::<ArrowSchema>());
const _: () = assert!(align_of::<FFI_ArrowSchema>() == align_of::<ArrowSchema>());

/// Returns a batch from [`Index::record_batches`](super::Index::record_batches), or a slice of a batch, in
/// arrow2 types.
///
/// The columns are the index columns; schema metadata is dropped.
///
/// # Errors
/// [`Error::Storage`] if the columns are not index columns, or if arrow2 rejects them.
pub fn to_arrow2(batch: &RecordBatch) -> Result<(Schema, Chunk<Box<dyn Array>>)> {
    let refused =
        |reason: String| Error::Storage(StorageError::Index { path: "record batch".to_owned(), reason });
    let found = batch.schema();
    if found.fields() != schema(String::new(), counter_digests(&found)).fields() {
        return Err(refused("expected the columns of an index".to_owned()));
    }
    let columns = arrow_array::StructArray::from(batch.clone());
    let (array, field) = to_ffi(&columns.to_data()).map_err(|error| refused(error.to_string()))?;
    let imported = import(array, field).map_err(|error| refused(error.to_string()))?;
    let columns = imported.as_any().downcast_ref::<StructArray>();
    let columns = columns.ok_or_else(|| refused("arrow2 did not import the batch as a struct".to_owned()))?;
    Ok((Schema::from(columns.fields().to_vec()), Chunk::new(columns.values().to_vec())))
}

#[expect(unsafe_code, reason = "the C data interface is a contract that the compiler cannot see")]
fn import(array: FFI_ArrowArray, field: FFI_ArrowSchema) -> Result<Box<dyn Array>, ::arrow2::error::Error> {
    // SAFETY: both types are `repr(C)` and have the fields that the C data interface defines; sizes and
    // alignments are compared above. Ownership moves, so arrow2's `Drop` releases the exported data exactly
    // once.
    let (array, field) = unsafe {
        (transmute::<FFI_ArrowArray, ArrowArray>(array), transmute::<FFI_ArrowSchema, ArrowSchema>(field))
    };
    // SAFETY: `to_ffi` exports valid structures for this single array and its type, and nobody else holds
    // them. The buffers are aligned to their types, as in arrow's typed arrays, have no offset left, and are
    // never written.
    unsafe {
        let field = import_field_from_c(&field)?;
        import_array_from_c(array, field.data_type)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::arrow2::array::{DictionaryArray, FixedSizeListArray, ListArray, PrimitiveArray, Utf8Array};
    use ::arrow2::datatypes::{DataType as Arrow2Type, Field as Arrow2Field};
    use ::arrow2::ffi::{export_array_to_c, export_field_to_c};
    use arrow_array::UInt64Array;
    use arrow_array::ffi::from_ffi;
    use arrow_schema::{DataType, Field, Schema as ArrowRsSchema};

    use super::*;
    use crate::index::{Index, IndexOptions};
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    fn index() -> (tempfile::TempDir, Index) {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::builder(directory.path()).shard_samples(3).build().unwrap();
        for (number, text) in ["a", "two words", "", "\u{65e5}\u{672c}"].into_iter().enumerate() {
            let npy: &[u8] = &[0; 9];
            let fields = [("txt", text.as_bytes()), ("bin", npy), ("cls", b"1".as_slice())];
            writer.write(&format!("key-{number}"), &fields[..=number % 3]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
        let index = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
        (directory, index)
    }

    fn column<T: Array + Clone>(array: &dyn Array) -> T {
        array.as_any().downcast_ref::<T>().expect("the type of the column").clone()
    }

    /// Field extension, length in bytes, and shape.
    type FieldOf = (String, u64, [u32; 3]);

    /// Key, offset, and `(extension, bytes, shape)` for each field, read from arrow2 arrays.
    fn rows(chunk: &Chunk<Box<dyn Array>>) -> Vec<(String, u64, Vec<FieldOf>)> {
        let keys: Utf8Array<i32> = column(&*chunk.columns()[0]);
        let offsets: PrimitiveArray<u64> = column(&*chunk.columns()[1]);
        let lists: ListArray<i32> = column(&*chunk.columns()[2]);
        let fields = |row: usize| {
            let list: StructArray = column(&*lists.value(row));
            let extensions: DictionaryArray<u16> = column(&*list.values()[0]);
            let names: Utf8Array<i32> = column(&**extensions.values());
            let bytes: PrimitiveArray<u64> = column(&*list.values()[2]);
            let shapes: FixedSizeListArray = column(&*list.values()[4]);
            let field = |at: usize| {
                let shape: PrimitiveArray<u32> = column(&*shapes.value(at));
                let name = names.value(extensions.key_value(at)).to_owned();
                (name, bytes.value(at), std::array::from_fn(|number| shape.value(number)))
            };
            (0..list.len()).map(field).collect()
        };
        (0..keys.len()).map(|row| (keys.value(row).to_owned(), offsets.value(row), fields(row))).collect()
    }

    #[test]
    fn batches_arrive_whole_and_outlive_the_index() {
        let (directory, index) = index();
        let expected: Vec<_> = (0..index.len())
            .map(|sample| {
                let row = index.sample(sample);
                let fields = row
                    .fields()
                    .map(|field| (field.extension.to_owned(), field.bytes, field.shape.to_numbers().1));
                (row.key().to_owned(), row.offset(), fields.collect::<Vec<_>>())
            })
            .collect();
        let chunks: Vec<_> = index.record_batches().map(|batch| to_arrow2(batch).unwrap()).collect();
        let tail = index.record_batches().next().unwrap().slice(1, 2);
        let (_, tail) = to_arrow2(&tail).unwrap();
        drop((index, directory));
        let names: Vec<&str> = chunks[0].0.fields.iter().map(|field| field.name.as_str()).collect();
        assert_eq!(names, ["key", "offset", "fields"]);
        assert_eq!(chunks.iter().flat_map(|(_, chunk)| rows(chunk)).collect::<Vec<_>>(), expected);
        assert_eq!(rows(&tail), expected[1..3], "a slice");
    }

    /// Exports arrow2 data and imports it into arrow again.
    #[expect(unsafe_code, reason = "the inverse conversion, only for the test")]
    fn back(schema: Schema, chunk: Chunk<Box<dyn Array>>) -> RecordBatch {
        let columns = StructArray::new(Arrow2Type::Struct(schema.fields), chunk.into_arrays(), None);
        let field = Arrow2Field::new("", columns.data_type().clone(), false);
        let (array, field) = (export_array_to_c(columns.boxed()), export_field_to_c(&field));
        // SAFETY: as in `import`, in the other direction: arrow2 exports valid structures that nobody else
        // holds.
        let columns = unsafe {
            let array = transmute::<ArrowArray, FFI_ArrowArray>(array);
            from_ffi(array, &transmute::<ArrowSchema, FFI_ArrowSchema>(field)).unwrap()
        };
        columns.validate_full().unwrap();
        arrow_array::StructArray::from(columns).into()
    }

    #[test]
    fn a_batch_comes_back_from_arrow2_as_it_went() {
        let (_directory, index) = index();
        for batch in index.record_batches() {
            for batch in [batch.clone(), batch.slice(batch.num_rows() - 1, 1)] {
                let (schema, chunk) = to_arrow2(&batch).unwrap();
                let returned = back(schema, chunk);
                assert_eq!(returned.columns(), batch.columns());
                assert_eq!(returned.schema().fields(), batch.schema().fields());
            }
        }
    }

    #[test]
    fn empty_batches_arrive_and_others_are_refused() {
        let (_directory, index) = index();
        let empty = index.record_batches().next().unwrap().slice(0, 0);
        assert_eq!(to_arrow2(&empty).unwrap().1.len(), 0);
        let fresh = RecordBatch::new_empty(empty.schema());
        assert_eq!(to_arrow2(&fresh).unwrap().1.len(), 0);
        let other = ArrowRsSchema::new(vec![Field::new("key", DataType::UInt64, false)]);
        let other =
            RecordBatch::try_new(Arc::new(other), vec![Arc::new(UInt64Array::from(vec![1]))]).unwrap();
        assert!(matches!(to_arrow2(&other), Err(Error::Storage(StorageError::Index { .. }))));
    }
}
