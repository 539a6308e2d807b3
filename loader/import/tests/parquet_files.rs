use super::*;

#[test]
fn a_table_has_the_samples_that_packing_writes() {
    let place = tempfile::tempdir().unwrap();
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
        Compression::LZ4_RAW,
    ];
    for (number, codec) in codecs.into_iter().enumerate() {
        let settings = properties(7).set_compression(codec).set_dictionary_enabled(number % 2 == 0);
        let path = write(&place.path().join(format!("{number}.parquet")), &rows(50), settings);
        let out = place.path().join(format!("out-{number}"));
        pack(&path, &out, &PackOptions::default()).unwrap();
        let ((read, bad), (packed, _)) = (scanned(&path), scanned(&out));
        assert!(bad.is_empty() && read.len() == 50, "{bad:?}");
        for (row, (read, packed)) in read.iter().zip(&packed).enumerate() {
            assert_eq!(fields(read), fields(packed), "{codec}, row {row}");
            assert_eq!((read.key.clone(), read.offset), (format!("{number}/{row:09}"), row as u64));
        }
    }
}

#[test]
fn ids_are_keys_and_equal_ids_stay_samples_of_their_own() {
    let place = tempfile::tempdir().unwrap();
    let ids = ["a.b", "a.b", "x/y", ""].map(|id| Some(id.to_owned()));
    let captions = (0..4).map(|number| Some(format!("caption {number}")));
    let batch = table(&[("id", texts(ids)), ("caption", texts(captions))]);
    let path = write(&place.path().join("t.parquet"), &batch, properties(2));
    let (samples, bad) = scanned(&path);
    let keys: Vec<&str> = samples.iter().map(|sample| sample.key.as_str()).collect();
    assert_eq!((keys, bad), (vec!["a_b", "a_b", "x/y", "t/000000003"], Vec::new()));
    assert_eq!(index(&path).unwrap().len(), 4);
}

#[test]
fn nulls_and_missing_values_are_named_by_row_group_row_and_column() {
    let place = tempfile::tempdir().unwrap();
    let paths: StringArray = [None, Some("b.jpg"), None, None].into_iter().collect();
    let bytes: BinaryArray =
        [Some(&b"\xff\xd8\xffa"[..]), None, Some(b"\xff\xd8\xffc"), None].into_iter().collect();
    let kinds = [("bytes", DataType::Binary), ("path", DataType::Utf8)];
    let kinds: Vec<Field> = kinds.into_iter().map(|(name, kind)| Field::new(name, kind, true)).collect();
    let media = StructArray::new(kinds.into(), vec![Arc::new(bytes), Arc::new(paths)], None);
    let captions = [Some("a"), Some("b"), None, None].map(|text| text.map(str::to_owned));
    let batch = table(&[("image", Arc::new(media)), ("caption", texts(captions))]);
    let path = write(&place.path().join("t.parquet"), &batch, properties(2));
    let (samples, bad) = scanned(&path);
    let offsets: Vec<u64> = samples.iter().map(|sample| sample.offset).collect();
    assert_eq!(offsets, [0, 2]);
    let reasons: Vec<(u64, &str)> = bad.iter().map(|bad| (bad.offset, bad.reason.as_str())).collect();
    let [(1, file), (3, empty)] = reasons[..] else { panic!("{reasons:?}") };
    assert!(file.starts_with("row 1 of row group 0: column `image`: it names the file `b.jpg`"), "{file}");
    assert!(empty.starts_with("row 3 of row group 1: expected a column for"), "{empty}");
    assert!(bad.iter().all(|bad| bad.shard.ends_with("t.parquet")));
}

#[test]
fn nested_chats_are_documents() {
    let place = tempfile::tempdir().unwrap();
    let turn = |role: &str, text: &str| (role.to_owned(), text.to_owned());
    let turns = [turn("user", "what?"), turn("assistant", "a kite"), turn("user", "when?")];
    let (roles, contents): (Vec<_>, Vec<_>) = turns.into_iter().unzip();
    let kinds = ["role", "content"].map(|name| Field::new(name, DataType::Utf8, true));
    let columns = vec![texts(roles.into_iter().map(Some)), texts(contents.into_iter().map(Some))];
    let structs = StructArray::new(kinds.to_vec().into(), columns, None);
    let item = Arc::new(Field::new("item", structs.data_type().clone(), true));
    let lists = ListArray::new(item, OffsetBuffer::from_lengths([2, 1]), Arc::new(structs), None);
    let batch = table(&[
        ("messages", Arc::new(lists)),
        ("images", {
            let image = images(&[Some(1), Some(2)]);
            let item = Arc::new(Field::new("item", image.data_type().clone(), true));
            Arc::new(ListArray::new(item, OffsetBuffer::from_lengths([2, 0]), image, None))
        }),
    ]);
    let path = write(&place.path().join("t.parquet"), &batch, properties(8));
    let (samples, bad) = scanned(&path);
    assert!(bad.is_empty(), "{bad:?}");
    let extensions: Vec<String> = fields(&samples[0]).into_iter().map(|(extension, _)| extension).collect();
    assert_eq!(extensions, ["0.gif", "1.gif", "json"]);
    let document: serde_json::Value = serde_json::from_slice(&fields(&samples[1])[0].1).unwrap();
    assert_eq!(document["messages"][0]["content"], "when?");
    assert_eq!(document["__source__"], serde_json::json!({"file": "t.parquet", "row": 1}));
}

#[test]
fn tables_without_rows_or_known_columns_are_explained() {
    let place = tempfile::tempdir().unwrap();
    let path = write(&place.path().join("empty.parquet"), &rows(0), properties(8));
    assert_eq!(scanned(&path), (Vec::new(), Vec::new()));
    assert!(index(&path).unwrap_err().to_string().contains("it has no rows"));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
    let path = write(&place.path().join("numbers.parquet"), &table(&[("x", numbers)]), properties(8));
    let error = index(&path).unwrap_err().to_string();
    assert!(error.contains("row 0 of row group 0: expected a column for"), "{error}");
}

/// Returns the byte range of a row group.
fn group_range(path: &Path, group: usize) -> std::ops::Range<usize> {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let columns = reader.metadata().row_group(group).columns();
    let ranges = columns.iter().map(parquet::file::metadata::ColumnChunkMetaData::byte_range);
    let start = ranges.clone().map(|(start, _)| start).min().unwrap();
    let end = ranges.map(|(start, length)| start + length).max().unwrap();
    start as usize..end as usize
}

#[test]
fn damage_costs_the_row_group_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let settings = properties(10).set_compression(Compression::ZSTD(ZstdLevel::default()));
    let path = write(&place.path().join("t.parquet"), &rows(30), settings);
    let mut bytes = fs::read(&path).unwrap();
    bytes[group_range(&path, 1)].fill(0xa5);
    fs::write(&path, &bytes).unwrap();
    let (samples, bad) = scanned(&path);
    let offsets: Vec<u64> = samples.iter().map(|sample| sample.offset).collect();
    assert_eq!(offsets, (0..10).chain(20..30).collect::<Vec<_>>());
    assert_eq!(bad.len(), 1, "{bad:?}");
    assert!(
        bad[0].reason.starts_with("row group 1 is damaged, rows 10 to 19 are lost: "),
        "{}",
        bad[0].reason
    );
    assert_eq!(index(&path).unwrap().len(), 20);
    for length in [4, 8, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        let (samples, bad) = scanned(&path);
        assert!(samples.is_empty() && bad.len() == 1, "{length}: {bad:?}");
    }
}

#[test]
fn values_that_are_stored_once_do_not_fill_the_memory() {
    let place = tempfile::tempdir().unwrap();
    let long = "x".repeat(4 << 20);
    let keys = arrow_array::Int32Array::from(vec![0; 150]);
    let dictionary = DictionaryArray::<Int32Type>::new(keys, texts([Some(long)]));
    let batch = table(&[("text", Arc::new(dictionary))]);
    let settings = properties(1000).set_dictionary_page_size_limit(64 << 20);
    let path = write(&place.path().join("t.parquet"), &batch, settings);
    assert!(fs::metadata(&path).unwrap().len() < 20 << 20);
    // 600 MB in all.
    let index = index(&path).unwrap();
    let blocks = &index.indexed_shards()[0].blocks;
    assert_eq!((index.len(), blocks.iter().map(|block| block.samples).sum::<u64>()), (150, 150));
    assert!(blocks.len() > 10, "{} blocks", blocks.len());
}

#[test]
fn long_row_groups_are_cut_into_blocks_that_are_read_alone() {
    let place = tempfile::tempdir().unwrap();
    let captions = (0..20_000).map(|number| Some(format!("caption {number}")));
    let batch = table(&[("caption", texts(captions))]);
    let settings = properties(1 << 20).set_data_page_row_count_limit(500).set_write_batch_size(100);
    let path = write(&place.path().join("t.parquet"), &batch, settings);
    let index = index(&path).unwrap();
    let blocks: Vec<u64> = index.indexed_shards()[0].blocks.iter().map(|block| block.samples).collect();
    assert_eq!(blocks, [6_666, 6_667, 6_667]);
    let numbers = [19_999, 0, 6_666, 13_332];
    let read = block_on(dflop_loader::read_samples(&Arc::new(index), &numbers, 1 << 20)).unwrap();
    for (sample, number) in read.iter().zip(numbers) {
        let document: serde_json::Value = serde_json::from_slice(&fields(sample)[0].1).unwrap();
        assert_eq!(document["caption"], format!("caption {number}"));
    }
}
