//! Tests tables that are read in place, by themselves and through the loaders.

mod arrow;
mod hub;
mod loaders;
mod parquet_files;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BinaryArray, DictionaryArray, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};

use dflop_import::{PackOptions, pack, register_tables};
use dflop_loader::error::Skipped;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{RawSample, ShardItem, expand_shards, scan_shards};
use futures::StreamExt;

/// Returns an image of one pixel, with a tail of its own.
pub(crate) fn gif(number: usize) -> Vec<u8> {
    let image = b"GIF89a\x01\0\x01\0\x80\0\0\xff\0\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;";
    [&image[..], &vec![number as u8; 100 + number]].concat()
}

pub(crate) fn texts(values: impl IntoIterator<Item = Option<String>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<StringArray>())
}

/// Images with bytes and path, as `datasets` stores them; null where `number` is.
pub(crate) fn images(numbers: &[Option<usize>]) -> ArrayRef {
    let bytes: BinaryArray = numbers.iter().map(|number| number.map(gif)).collect();
    let paths: StringArray =
        numbers.iter().map(|number| number.map(|number| format!("{number}.gif"))).collect();
    let fields = [("bytes", DataType::Binary), ("path", DataType::Utf8)];
    let fields: Vec<Field> = fields.into_iter().map(|(name, kind)| Field::new(name, kind, true)).collect();
    Arc::new(StructArray::new(fields.into(), vec![Arc::new(bytes), Arc::new(paths)], None))
}

pub(crate) fn table(columns: &[(&str, ArrayRef)]) -> RecordBatch {
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let arrays = columns.iter().map(|(_, array)| array.clone()).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
}

/// Rows with an image, a label and a caption that repeats.
pub(crate) fn rows(count: usize) -> RecordBatch {
    let numbers: Vec<Option<usize>> = (0..count).map(Some).collect();
    let labels: Int64Array = (0..count).map(|number| Some((number % 3) as i64)).collect();
    let captions = (0..count).map(|number| Some(format!("caption {}", number % 7)));
    table(&[("image", images(&numbers)), ("label", Arc::new(labels)), ("caption", texts(captions))])
}

pub(crate) fn properties(group_rows: usize) -> WriterPropertiesBuilder {
    WriterProperties::builder().set_max_row_group_row_count(Some(group_rows))
}

pub(crate) fn write(path: &Path, batch: &RecordBatch, properties: WriterPropertiesBuilder) -> PathBuf {
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties.build())).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    path.to_owned()
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// Returns the samples and skipped rows of a file, read from start to end.
pub(crate) fn scanned(path: &Path) -> (Vec<RawSample>, Vec<Skipped>) {
    register_tables();
    let shards = expand_shards(&[path.to_str().unwrap()]).unwrap();
    let items: Vec<_> = block_on(async { scan_shards(shards).collect().await });
    let (mut samples, mut skipped) = (Vec::new(), Vec::new());
    for item in items {
        match item.unwrap() {
            ShardItem::Sample(sample) => samples.push(sample),
            ShardItem::Skipped(bad) => skipped.push(bad),
        }
    }
    (samples, skipped)
}

pub(crate) fn fields(sample: &RawSample) -> Vec<(String, Bytes)> {
    let field = |field: &dflop_loader::shard::RawField| {
        (field.extension.to_string(), field.payload.clone().unwrap_or_default())
    };
    sample.fields.iter().map(field).collect()
}

pub(crate) fn index(path: &Path) -> dflop_loader::Result<Index> {
    register_tables();
    Index::open_or_build(expand_shards(&[path.to_str().unwrap()])?, &IndexOptions::default())
}
