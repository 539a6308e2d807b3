use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::import::{PackOptions, Packed, finish_parts, list_parts, pack, pack_part};
use crate::shard::{FIELD_BYTES_MAX, MappedSamples, ShardItem};

/// Number of rows in each file.
const ROWS: [usize; 3] = [3, 1, 2];
const JPEG: &[u8] = b"\xff\xd8\xff\xe0";

fn little(numbers: impl IntoIterator<Item = usize>) -> Vec<u8> {
    numbers.into_iter().flat_map(|number| (number as u32).to_le_bytes()).collect()
}

/// Joins items as both formats do: count, offsets, what lies between, items.
fn file(items: &[Vec<u8>], between: &[u8]) -> Vec<u8> {
    let start = 4 * (items.len() + 2) + between.len();
    let mut ends = vec![start];
    for item in items {
        ends.push(ends[ends.len() - 1] + item.len());
    }
    [little([items.len()]), little(ends), between.to_vec(), items.concat()].concat()
}

/// Values of a row: text of varying length, number, image.
fn values(row: usize) -> [Vec<u8>; 3] {
    ["x".repeat(row).into_bytes(), (row as i64).to_le_bytes().to_vec(), [JPEG, &[row as u8]].concat()]
}

fn write_mds(directory: &Path, compression: Option<&str>) {
    let mut first = 0;
    let mut shards = Vec::new();
    for (number, rows) in ROWS.into_iter().enumerate() {
        let item = |row| {
            let [text, count, image] = values(row);
            [little([text.len(), image.len()]), text, count, image].concat()
        };
        let items: Vec<Vec<u8>> = (first..first + rows).map(item).collect();
        first += rows;
        let raw = format!("shard.{number:05}.mds");
        let content = file(&items, b"{\"columns\": 3}");
        let zip = compression.map(|_| serde_json::json!({"basename": format!("{raw}.zstd"), "bytes": 1}));
        if compression.is_some() {
            let compressed = zstd::encode_all(&content[..], 3).unwrap();
            fs::write(directory.join(format!("{raw}.zstd")), compressed).unwrap();
        } else {
            fs::write(directory.join(&raw), content).unwrap();
        }
        shards.push(serde_json::json!({
            "format": "mds", "version": 2, "samples": rows, "compression": compression, "zip_data": zip,
            "column_names": ["text", "count", "image"], "column_encodings": ["str", "int", "jpeg"],
            "column_sizes": [null, 8, null], "raw_data": {"basename": raw, "bytes": 1},
        }));
    }
    let index = serde_json::json!({"version": 2, "shards": shards});
    fs::write(directory.join("index.json"), index.to_string()).unwrap();
}

fn write_litdata(directory: &Path) {
    let mut first = 0;
    let mut chunks = Vec::new();
    for (number, rows) in ROWS.into_iter().enumerate() {
        let item = |row| {
            let values = values(row);
            [little(values.iter().map(Vec::len)), values.concat()].concat()
        };
        let items: Vec<Vec<u8>> = (first..first + rows).map(item).collect();
        first += rows;
        let name = format!("chunk-0-{number}.bin");
        fs::write(directory.join(&name), file(&items, b"")).unwrap();
        chunks.push(serde_json::json!({"filename": name, "chunk_size": rows, "chunk_bytes": 1}));
    }
    let leaf = serde_json::json!({"type": null, "context": null, "children_spec": []});
    let spec = serde_json::json!([1, {
        "type": "builtins.dict", "context": "[\"text\", \"count\", \"image\"]", "children_spec": [leaf, leaf, leaf],
    }]);
    let config = serde_json::json!({
        "compression": null, "data_format": ["str", "int", "jpeg"], "data_spec": spec.to_string(),
        "item_loader": "PyTreeLoader", "encryption": null,
    });
    let index = serde_json::json!({"chunks": chunks, "config": config});
    fs::write(directory.join("index.json"), index.to_string()).unwrap();
}

/// Key, image and document of every sample.
fn samples(packed: &Packed) -> Vec<(String, Vec<u8>, String)> {
    let mut samples = Vec::new();
    for shard in &packed.shards {
        let archive = fs::read(shard).unwrap().into();
        for item in MappedSamples::new(Arc::from("s.tar"), archive, FIELD_BYTES_MAX) {
            let ShardItem::Sample(sample) = item else { panic!("{item:?}") };
            let payload = |name| sample.field(name).and_then(|field| field.payload.clone()).unwrap().to_vec();
            samples.push((sample.key.clone(), payload("jpg"), String::from_utf8(payload("json")).unwrap()));
        }
    }
    samples
}

fn expected(name: impl Fn(usize) -> String) -> Vec<(String, Vec<u8>, String)> {
    let places = ROWS.into_iter().enumerate().flat_map(|(file, rows)| (0..rows).map(move |row| (file, row)));
    let sample = |(number, (file, row)): (usize, (usize, usize))| {
        let json = format!(
            r#"{{"text":"{}","count":{number},"image":"jpg","__source__":{{"file":"{}","row":{row}}}}}"#,
            "x".repeat(number),
            name(file)
        );
        (format!("{number:09}"), values(number)[2].clone(), json)
    };
    places.enumerate().map(sample).collect()
}

fn packed(source: &Path) -> Result<Packed, Error> {
    pack(source, tempfile::tempdir().unwrap().keep().as_path(), &PackOptions::default())
}

#[test]
fn rows_of_mds_are_samples_compressed_or_not_and_in_parts() {
    for compression in [None, Some("zstd:7")] {
        let directory = tempfile::tempdir().unwrap();
        write_mds(directory.path(), compression);
        let name = |file| format!("shard.{file:05}.mds");
        assert_eq!(samples(&packed(directory.path()).unwrap()), expected(name));
        let out = tempfile::tempdir().unwrap();
        // The images are none that an index could measure.
        let options = PackOptions { is_indexed: false, ..PackOptions::default() };
        let parts = list_parts(directory.path(), 4, &options).unwrap();
        let packed = parts
            .iter()
            .map(|part| pack_part(directory.path(), out.path(), part, &options).unwrap())
            .collect();
        assert_eq!(samples(&finish_parts(out.path(), packed, &options).unwrap()), expected(name));
    }
}

#[test]
fn items_of_litdata_are_samples() {
    let directory = tempfile::tempdir().unwrap();
    write_litdata(directory.path());
    let packed = packed(directory.path()).unwrap();
    assert_eq!(samples(&packed), expected(|file| format!("chunk-0-{file}.bin")));
    assert_eq!(packed.taken.fields["jpg"], 6);
}

#[test]
fn frames_and_items_of_litdata_are_decompressed() {
    for level in ["batch", "sample"] {
        let directory = tempfile::tempdir().unwrap();
        write_litdata(directory.path());
        for (number, rows) in ROWS.into_iter().enumerate() {
            let path = directory.path().join(format!("chunk-0-{number}.bin"));
            let chunk = fs::read(&path).unwrap();
            let offset = |at: usize| {
                let bytes = &chunk[4 * at + 4..4 * at + 8];
                u32::from_le_bytes(bytes.try_into().unwrap()) as usize
            };
            let items: Vec<&[u8]> = (0..rows).map(|row| &chunk[offset(row)..offset(row + 1)]).collect();
            let compress = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
            let compressed = if level == "sample" {
                file(&items.iter().map(|item| compress(item)).collect::<Vec<_>>(), b"")
            } else {
                let offsets = (0..=rows).map(|row| offset(row) - offset(0));
                // One frame per item.
                let frames: Vec<u8> = items.iter().flat_map(|item| compress(item)).collect();
                [
                    &b"LDFZ01\0\0"[..],
                    &little([1, rows, 1, rows]),
                    &little(offsets),
                    &vec![0; 24 * rows],
                    &frames,
                ]
                .concat()
            };
            fs::write(&path, compressed).unwrap();
        }
        let path = directory.path().join("index.json");
        let set = format!(r#""compression":"zstd:4","compression_level":"{level}""#);
        let index = fs::read_to_string(&path).unwrap().replace("\"compression\":null", &set);
        fs::write(&path, index).unwrap();
        let packed = packed(directory.path()).unwrap();
        assert_eq!(samples(&packed), expected(|file| format!("chunk-0-{file}.bin")), "{level}");
    }
}

#[test]
fn damage_and_names_that_lead_outside_are_errors_that_name_the_file() {
    type Change = fn(&Path);
    let changes: [(Change, &str); 5] = [
        (
            |path| fs::write(path.join("shard.00001.mds"), b"\x01\0\0\0").unwrap(),
            "shard.00001.mds`: the file ends early",
        ),
        (
            |path| fs::write(path.join("shard.00000.mds"), little([3, 30, 20, 10, 5])).unwrap(),
            "shard.00000.mds`: the file is damaged",
        ),
        (|path| fs::remove_file(path.join("shard.00002.mds")).unwrap(), "shard.00002.mds"),
        (
            |path| {
                let index = fs::read_to_string(path.join("index.json")).unwrap();
                fs::write(path.join("index.json"), index.replace("shard.00000.mds", "../shard.00000.mds"))
                    .unwrap();
            },
            "outside of its directory",
        ),
        (
            |path| {
                fs::remove_file(path.join("shard.00000.mds")).unwrap();
                std::os::unix::fs::symlink("/etc/passwd", path.join("shard.00000.mds")).unwrap();
            },
            "outside of its directory",
        ),
    ];
    for (change, reason) in changes {
        let directory = tempfile::tempdir().unwrap();
        write_mds(directory.path(), None);
        change(directory.path());
        let error = packed(directory.path()).unwrap_err().to_string();
        assert!(error.contains(reason) && error.len() < 400, "{error}");
    }
}

#[test]
fn layouts_that_are_not_read_are_named() {
    for (from, to, reason) in [
        ("\"encryption\":null", "\"encryption\":{}", "encrypted"),
        ("PyTreeLoader", "TokensLoader", "expected `PyTreeLoader`"),
        ("builtins.dict", "my.Class", "not a tree"),
        ("[\"str\",\"int\",\"jpeg\"]", "[\"str\"]", "3 leaves, its `data_format` 1"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        write_litdata(directory.path());
        let path = directory.path().join("index.json");
        let index = fs::read_to_string(&path).unwrap();
        assert!(index.contains(from), "{from}: {index}");
        fs::write(&path, index.replace(from, to)).unwrap();
        let error = packed(directory.path()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
