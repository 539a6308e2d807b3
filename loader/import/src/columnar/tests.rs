use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BinaryArray, DictionaryArray, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, TimestampMicrosecondArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

use crate::{
    ColumnMap, PackOptions, Packed, SkippedSource, finish_parts, list_parts, pack, pack_all, pack_batches,
    pack_part,
};
use dflop_loader::error::Error;
use dflop_loader::shard::{FIELD_BYTES_MAX, MappedSamples, RawSample, ShardItem};

const FEATURES: &str =
    r#"{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}"#;

fn jpeg(number: usize) -> Vec<u8> {
    [&b"\xff\xd8\xff\xe0"[..], &vec![number as u8; 100 + number]].concat()
}

/// Rows `first..first + rows`: id, image with bytes and path, label, caption.
fn batch(first: usize, rows: usize) -> RecordBatch {
    let numbers: Vec<usize> = (first..first + rows).collect();
    let bytes: BinaryArray = numbers.iter().map(|&number| Some(jpeg(number))).collect();
    let paths: StringArray = numbers.iter().map(|number| Some(format!("{number}.jpg"))).collect();
    let fields = [("bytes", DataType::Binary), ("path", DataType::Utf8)];
    let fields: Vec<Field> = fields.into_iter().map(|(name, kind)| Field::new(name, kind, true)).collect();
    let image = StructArray::new(fields.into(), vec![Arc::new(bytes), Arc::new(paths)], None);
    let ids: StringArray = numbers.iter().map(|number| Some(format!("row.{number}"))).collect();
    let labels: Int64Array = numbers.iter().map(|number| Some((number % 2) as i64)).collect();
    let captions: StringArray = numbers.iter().map(|number| Some(format!("caption {number}"))).collect();
    let columns: [(&str, ArrayRef); 4] = [
        ("id", Arc::new(ids)),
        ("image", Arc::new(image)),
        ("label", Arc::new(labels)),
        ("caption", Arc::new(captions)),
    ];
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let metadata = [("huggingface".to_owned(), FEATURES.to_owned())].into();
    let schema = Schema::new_with_metadata(fields, metadata);
    RecordBatch::try_new(Arc::new(schema), columns.into_iter().map(|(_, array)| array).collect()).unwrap()
}

fn write_parquet(path: &Path, batches: &[RecordBatch], rows_of_group: usize) {
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(rows_of_group)).build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batches[0].schema(), Some(properties)).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.close().unwrap();
}

fn write_stream(path: &Path, batches: &[RecordBatch]) {
    let file = File::create(path).unwrap();
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(file, &batches[0].schema()).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.finish().unwrap();
}

fn write_file(path: &Path, batches: &[RecordBatch]) {
    let file = File::create(path).unwrap();
    let mut writer = arrow_ipc::writer::FileWriter::try_new(file, &batches[0].schema()).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.finish().unwrap();
}

fn samples(packed: &Packed) -> Vec<RawSample> {
    let read = |shard: &PathBuf| {
        let archive = fs::read(shard).unwrap().into();
        MappedSamples::new(Arc::from("s.tar"), archive, FIELD_BYTES_MAX).map(|item| match item {
            ShardItem::Sample(sample) => sample,
            ShardItem::Skipped(skipped) => panic!("{skipped:?}"),
        })
    };
    packed.shards.iter().flat_map(read).collect()
}

fn payload(sample: &RawSample, extension: &str) -> Vec<u8> {
    sample.field(extension).and_then(|field| field.payload.as_ref()).expect(extension).to_vec()
}

/// Checks that the samples are rows 0 to `rows` of [`batch`], numbered from 0 in `file`.
fn check_rows(packed: &Packed, rows: usize, file: &str) {
    let samples = samples(packed);
    assert_eq!((packed.samples, samples.len(), packed.skipped.len()), (rows as u64, rows, 0));
    for (number, sample) in samples.iter().enumerate() {
        assert_eq!(sample.key, format!("row_{number}"));
        assert_eq!(payload(sample, "jpg"), jpeg(number));
        assert_eq!(payload(sample, "cls"), (number % 2).to_string().into_bytes());
        let json = format!(
            r#"{{"id":"row.{number}","image":{{"file":"jpg","path":"{number}.jpg"}},"label":{},"caption":"caption {number}","__source__":{{"file":"{file}","row":{number}}}}}"#,
            number % 2
        );
        assert_eq!(String::from_utf8(payload(sample, "json")).unwrap(), json);
    }
    assert_eq!(packed.taken.classes, ["cat", "dog"]);
}

fn packed(source: &Path) -> Result<Packed, Error> {
    let out = source.with_extension("out");
    pack(source, &out, &PackOptions::default())
}

#[test]
fn every_columnar_file_gives_the_same_samples() {
    let directory = tempfile::tempdir().unwrap();
    let batches = [batch(0, 90), batch(90, 60)];
    for name in ["a.parquet", "b.arrow", "c.stream"] {
        let path = directory.path().join(name);
        match name {
            "a.parquet" => write_parquet(&path, &batches, 40),
            "b.arrow" => write_file(&path, &batches),
            _ => write_stream(&path, &batches),
        }
        let packed = packed(&path).unwrap();
        check_rows(&packed, 150, name);
        assert_eq!(packed.taken.fields["jpg"], 150);
        let classes = fs::read_to_string(path.with_extension("out").join("classes.json")).unwrap();
        assert_eq!(classes, r#"["cat","dog"]"#);
    }
}

#[test]
fn batches_in_memory_are_rows_as_well() {
    let out = tempfile::tempdir().unwrap();
    let batches = [batch(0, 3), batch(3, 2)].into_iter().map(Ok);
    let packed = pack_batches(batches, "rows", out.path(), &PackOptions::default()).unwrap();
    check_rows(&packed, 5, "rows");
}

#[test]
fn parts_of_tables_are_the_samples_of_one_run() {
    let directory = tempfile::tempdir().unwrap();
    let tables = directory.path().join("tables");
    fs::create_dir(&tables).unwrap();
    write_parquet(&tables.join("train-00000-of-00003.parquet"), &[batch(0, 30)], 7);
    write_stream(&tables.join("train-00001-of-00003.arrow"), &[batch(5, 20), batch(50, 10)]);
    write_file(&tables.join("train-00002-of-00003.arrow"), &[batch(0, 11)]);
    // The images are none that an index could measure.
    let options = PackOptions { is_indexed: false, ..PackOptions::default() };
    let whole = pack(&tables, &directory.path().join("whole"), &options).unwrap();
    let out = directory.path().join("parts");
    let parts = list_parts(&tables, 4, &options).unwrap();
    let packed = parts.iter().map(|part| pack_part(&tables, &out, part, &options).unwrap()).collect();
    let joined = finish_parts(&out, packed, &options).unwrap();
    let shown = |packed: &Packed| -> Vec<(String, Vec<u8>)> {
        samples(packed).iter().map(|sample| (sample.key.clone(), payload(sample, "json"))).collect()
    };
    assert_eq!(whole.samples, 71);
    assert_eq!(shown(&joined), shown(&whole));
    assert_eq!(joined.taken, whole.taken);
}

#[test]
fn a_saved_dataset_is_read_by_its_state_and_asks_for_a_split() {
    let directory = tempfile::tempdir().unwrap();
    let saved = directory.path().join("saved");
    for (split, rows) in [("train", 4), ("test", 2)] {
        fs::create_dir_all(saved.join(split)).unwrap();
        write_stream(&saved.join(split).join("data-00000-of-00001.arrow"), &[batch(0, rows)]);
        // Written by `map`, and not part of the dataset.
        write_stream(&saved.join(split).join("cache-1f.arrow"), &[batch(0, 9)]);
        let state = r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}"#;
        fs::write(saved.join(split).join("state.json"), state).unwrap();
        fs::write(saved.join(split).join("dataset_info.json"), "{}").unwrap();
    }
    fs::write(saved.join("dataset_dict.json"), r#"{"splits": ["train", "test"]}"#).unwrap();
    let error = pack(&saved, &directory.path().join("a"), &PackOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it has the splits train, test"), "{error}");
    let options = PackOptions { split: Some("test".into()), ..PackOptions::default() };
    let test = pack(&saved, &directory.path().join("b"), &options).unwrap();
    check_rows(&test, 2, "test/data-00000-of-00001.arrow");
    let train = pack(&saved.join("train"), &directory.path().join("c"), &PackOptions::default()).unwrap();
    check_rows(&train, 4, "data-00000-of-00001.arrow");
    fs::write(saved.join("train/state.json"), r#"{"_data_files": [{"filename": "../test/state.json"}]}"#)
        .unwrap();
    let error = pack(&saved.join("train"), &directory.path().join("d"), &PackOptions::default()).unwrap_err();
    assert!(error.to_string().contains("another directory"), "{error}");
}

#[test]
fn several_sources_follow_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    write_parquet(&path("a.parquet"), &[batch(0, 2)], 10);
    fs::write(path("b.jsonl"), "{\"id\": \"row_1\", \"text\": \"x\"}\n").unwrap();
    let sources = [path("a.parquet"), path("b.jsonl")];
    let packed = pack_all(&sources, &path("out"), &PackOptions::default()).unwrap();
    let keys: Vec<String> = samples(&packed).into_iter().map(|sample| sample.key).collect();
    assert_eq!(keys, ["row_0", "row_1", "row_1_1"]);
}

#[test]
fn paths_in_tables_are_files_next_to_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("1.jpg"), jpeg(1)).unwrap();
    let names = StringArray::from(vec!["1.jpg", "2.jpg", "../secret.jpg"]);
    let schema = Schema::new(vec![Field::new("file_name", DataType::Utf8, true)]);
    let rows = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(names)]).unwrap();
    write_parquet(&path("t.parquet"), &[rows], 10);
    let packed = packed(&path("t.parquet")).unwrap();
    assert_eq!(payload(&samples(&packed)[0], "jpg"), jpeg(1));
    let reasons: Vec<&str> =
        packed.skipped.iter().map(|SkippedSource { reason, .. }| reason.as_str()).collect();
    assert!(reasons[0].ends_with("named by t.parquet:1") && reasons.len() == 2, "{reasons:?}");
}

#[test]
fn lists_times_and_dictionaries_go_to_the_document() {
    let directory = tempfile::tempdir().unwrap();
    let values = StringArray::from(vec!["a", "b", "c"]);
    let item = Arc::new(Field::new_list_field(DataType::Utf8, true));
    let lists = ListArray::new(item, OffsetBuffer::from_lengths([2, 1]), Arc::new(values), None);
    let times = TimestampMicrosecondArray::from(vec![Some(1_500_000), None]).with_timezone("UTC");
    let kinds: DictionaryArray<Int32Type> = ["x", "y"].into_iter().collect();
    let texts = StringArray::from(vec!["one", "two"]);
    let columns: [(&str, ArrayRef); 4] = [
        ("tags", Arc::new(lists)),
        ("at", Arc::new(times)),
        ("kind", Arc::new(kinds)),
        ("text", Arc::new(texts)),
    ];
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    let rows = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap();
    let path = directory.path().join("t.arrow");
    write_file(&path, &[rows]);
    let samples = samples(&packed(&path).unwrap());
    let json = String::from_utf8(payload(&samples[0], "json")).unwrap();
    let expected = r#"{"tags":["a","b"],"at":"1970-01-01T00:00:01.500Z","kind":"x","text":"one","#;
    assert!(json.starts_with(expected), "{json}");
    assert!(String::from_utf8(payload(&samples[1], "json")).unwrap().contains(r#""at":null,"kind":"y""#));
}

#[test]
fn damaged_files_and_columns_without_use_are_short_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    write_parquet(&path("a.parquet"), &[batch(0, 200)], 50);
    let whole = fs::read(path("a.parquet")).unwrap();
    fs::write(path("cut.parquet"), &whole[..whole.len() / 2]).unwrap();
    let mut flipped = whole;
    flipped[300..340].fill(0xff);
    fs::write(path("flipped.parquet"), flipped).unwrap();
    write_stream(&path("b.arrow"), &[batch(0, 200)]);
    let whole = fs::read(path("b.arrow")).unwrap();
    fs::write(path("cut.arrow"), &whole[..whole.len() / 2]).unwrap();
    write_stream(&path("end.arrow"), &[batch(0, 200), batch(200, 10)]);
    let whole = fs::read(path("end.arrow")).unwrap();
    fs::write(path("end.arrow"), &whole[..whole.len() - 8]).unwrap();
    for name in ["cut.parquet", "flipped.parquet", "cut.arrow", "end.arrow"] {
        let error = packed(&path(name)).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("damaged") && error.len() < 500, "{error}");
    }
    let numbers = Int64Array::from(vec![1, 2]);
    let schema = Schema::new(vec![Field::new("n", DataType::Int64, true)]);
    let rows = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(numbers)]).unwrap();
    write_parquet(&path("n.parquet"), std::slice::from_ref(&rows), 10);
    let error = packed(&path("n.parquet")).unwrap_err().to_string();
    assert!(error.contains("no samples") && error.contains("n.parquet:0`: expected a column"), "{error}");
    let map = ColumnMap::new([("n".to_owned(), "cls".to_owned())]).unwrap();
    let options = PackOptions { map, ..PackOptions::default() };
    let packed = pack(&path("n.parquet"), &path("n"), &options).unwrap();
    assert_eq!(payload(&samples(&packed)[1], "cls"), b"2");
}

#[test]
fn layouts_in_tables_are_read_like_those_in_lines() {
    let directory = tempfile::tempdir().unwrap();
    let texts = |values: &[&str]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let turns = {
        let fields: Vec<Field> =
            ["role", "content"].map(|name| Field::new(name, DataType::Utf8, true)).into();
        let columns = vec![texts(&["user", "assistant"]), texts(&["what", "kite"])];
        let turns = StructArray::new(fields.into(), columns, None);
        let item = Arc::new(Field::new("item", turns.data_type().clone(), true));
        let list = ListArray::new(item, OffsetBuffer::from_lengths([2]), Arc::new(turns), None);
        Arc::new(list) as ArrayRef
    };
    let asked = "user: what | assistant: kite";
    let tables: Vec<(Vec<(&str, ArrayRef)>, &str)> = vec![
        (vec![("conversation", turns.clone())], asked),
        (
            vec![("messages", turns), ("system", texts(&["brief"]))],
            "system: brief | user: what | assistant: kite",
        ),
        (vec![("query", texts(&["what"])), ("response", texts(&["kite"]))], asked),
        (vec![("prompt", texts(&["what"])), ("completion", texts(&["kite"])), ("id", texts(&["x"]))], asked),
        (
            vec![("instruction", texts(&["wh"])), ("input", texts(&["at"])), ("output", texts(&["kite"]))],
            "user: wh\nat | assistant: kite",
        ),
    ];
    for (number, (columns, told)) in tables.into_iter().enumerate() {
        let fields: Vec<Field> =
            columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
        let arrays = columns.into_iter().map(|(_, array)| array).collect();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap();
        let path = directory.path().join(format!("{number}.parquet"));
        write_parquet(&path, &[batch], 10);
        let out = directory.path().join(format!("out-{number}"));
        let packed = pack(&path, &out, &PackOptions::default()).unwrap();
        assert_eq!(crate::tests::told(&packed), [told]);
    }
}
