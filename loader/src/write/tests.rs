use super::{ShardCompression, ShardWriter, ZSTD_LEVEL, *};
use crate::error::{Error, OutputError};
use crate::shard::{FIELD_BYTES_MAX, MappedSamples, RawSample, ShardItem};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

fn read_samples(archive: Vec<u8>) -> Vec<RawSample> {
    let samples = MappedSamples::new(Arc::from("s.tar"), archive.into(), FIELD_BYTES_MAX);
    let expect_sample = |item| match item {
        ShardItem::Sample(sample) => sample,
        ShardItem::Skipped(skipped) => panic!("{skipped:?}"),
    };
    samples.map(expect_sample).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".dflop");
    names.sort();
    names
}

fn write_numbered(directory: &Path, samples: usize, shard_bytes: u64) -> super::WrittenShards {
    let mut writer = ShardWriter::builder(directory).shard_bytes(shard_bytes).build().unwrap();
    for sample in 0..samples {
        writer.write(&format!("{sample:03}"), &[("jpg", &[7; 600]), ("txt", b"a kite")]).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).build().unwrap();
    let long = format!("{}/日本", "d".repeat(150));
    let keys = ["a", "d.1/b", long.as_str(), &"k".repeat(96), &"k".repeat(97), &"k".repeat(2000)];
    for key in keys {
        writer.write(key, &[("jpg", b"pixels!"), ("seg.png", b""), ("txt", &[1; 513])]).unwrap();
    }
    let written = writer.finish().unwrap();
    assert_eq!((written.samples, written.bytes), (6, 6 * (b"pixels!".len() as u64 + 513)));
    let samples = read_samples(fs::read(&written.shards[0]).unwrap());
    assert_eq!(samples.iter().map(|sample| sample.key.as_str()).collect::<Vec<_>>(), keys);
    for sample in samples {
        let fields = sample.fields.iter().map(|field| (&*field.extension, field.payload.clone().unwrap()));
        let expected = [("jpg", b"pixels!".to_vec()), ("seg.png", vec![]), ("txt", vec![1; 513])];
        assert!(fields.eq(expected.map(|(extension, payload)| (extension, payload.into()))));
    }
}

#[test]
fn shards_roll_at_their_limit_and_hold_whole_samples() {
    let directory = tempfile::tempdir().unwrap();
    // A sample needs 512 + 1024 + 512 + 512 bytes, so two samples and the end marker fill a shard exactly.
    let written = write_numbered(directory.path(), 5, 2 * 2560 + 1024);
    assert_eq!(names(directory.path()), ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]);
    let sizes: Vec<u64> = written.shards.iter().map(|shard| fs::metadata(shard).unwrap().len()).collect();
    assert_eq!(sizes, [6144, 6144, 3584]);
    let counts = written.shards.iter().map(|shard| read_samples(fs::read(shard).unwrap()).len());
    assert_eq!(counts.collect::<Vec<_>>(), [2, 2, 1]);
}

#[test]
fn shards_roll_at_whichever_limit_comes_first() {
    let directory = tempfile::tempdir().unwrap();
    let builder = ShardWriter::builder(directory.path()).shard_samples(3).shard_bytes(10 * 1024);
    let mut writer = builder.build().unwrap();
    for (sample, bytes) in [1, 1, 1, 1, 5_000, 4_000, 1].into_iter().enumerate() {
        writer.write(&sample.to_string(), &[("bin", &vec![0; bytes])]).unwrap();
    }
    let shards = writer.finish().unwrap().shards;
    let counts = shards.iter().map(|shard| read_samples(fs::read(shard).unwrap()).len());
    assert_eq!(counts.collect::<Vec<_>>(), [3, 2, 2]);
}

#[test]
fn appending_numbers_on_and_removes_what_a_killed_writer_left() {
    let directory = tempfile::tempdir().unwrap();
    write_numbered(directory.path(), 3, 2 * 2560 + 1024);
    let abandoned = directory.path().join(".shard-000002.tar.partial");
    fs::write(&abandoned, b"half a header").unwrap();
    let mut writer = ShardWriter::builder(directory.path()).append(true).build().unwrap();
    writer.write("new", &[("txt", b"a kite")]).unwrap();
    let second = ShardWriter::builder(directory.path()).append(true).build();
    assert!(
        matches!(&second, Err(Error::Output(OutputError::ShardExists { path })) if path.ends_with(".partial")),
        "{second:?}"
    );
    let written = writer.finish().unwrap();
    assert_eq!(written.shards, [directory.path().join("shard-000002.tar")]);
    assert_eq!(names(directory.path()), ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]);
}

#[test]
fn appending_to_foreign_names_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("shard-1.tar"), b"").unwrap();
    let error = ShardWriter::builder(directory.path()).append(true).build().unwrap_err();
    assert!(matches!(error, Error::Output(OutputError::ShardExists { .. })), "{error}");
}

#[test]
fn a_sample_over_the_limit_has_a_shard_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).shard_bytes(4096).build().unwrap();
    for (key, bytes) in [("a", 10), ("b", 100_000), ("c", 10), ("d", 10)] {
        writer.write(key, &[("bin", &vec![0; bytes])]).unwrap();
    }
    let shards = writer.finish().unwrap().shards;
    let keys = shards.iter().map(|shard| {
        read_samples(fs::read(shard).unwrap()).into_iter().map(|sample| sample.key).collect::<String>()
    });
    assert_eq!(keys.collect::<Vec<_>>(), ["a", "b", "cd"]);
}

#[test]
fn long_names_count_towards_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).build().unwrap();
    for bytes in [95, 96, 97, 600, 1024] {
        writer.write(&"k".repeat(bytes), &[("txt", b"x")]).unwrap();
    }
    let counted = writer.open.as_ref().unwrap().file.tar_bytes() + super::shard_file::END_BYTES;
    let shards = writer.finish().unwrap().shards;
    assert_eq!(fs::metadata(&shards[0]).unwrap().len(), counted);
}

#[test]
fn equal_samples_give_equal_bytes() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = directories.each_ref().map(|directory| write_numbered(directory.path(), 9, 9000));
    assert_eq!(first.shards.len(), 3);
    for (first, second) in first.shards.iter().zip(&second.shards) {
        assert_eq!(fs::read(first).unwrap(), fs::read(second).unwrap());
    }
}

#[test]
fn zstd_shards_hold_the_same_archive() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let plain = write_numbered(directories[0].path(), 5, 1 << 20);
    let compression = ShardCompression::Zstd { level: ZSTD_LEVEL };
    let mut writer = ShardWriter::builder(directories[1].path()).compression(compression).build().unwrap();
    for sample in 0..5 {
        writer.write(&format!("{sample:03}"), &[("jpg", &[7; 600]), ("txt", b"a kite")]).unwrap();
    }
    let written = writer.finish().unwrap();
    assert_eq!(names(directories[1].path()), ["shard-000000.tar.zst"]);
    let mut archive = Vec::new();
    let file = fs::File::open(&written.shards[0]).unwrap();
    zstd::Decoder::new(file).unwrap().read_to_end(&mut archive).unwrap();
    assert_eq!(archive, fs::read(&plain.shards[0]).unwrap());
    assert_eq!((written.samples, written.bytes), (plain.samples, plain.bytes));
}

#[test]
fn a_shard_has_no_name_before_it_is_complete_and_a_drop_removes_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).shard_bytes(3000).build().unwrap();
    writer.write("a", &[("bin", &[0; 2000])]).unwrap();
    assert_eq!(names(directory.path()), [".shard-000000.tar.partial"]);
    writer.write("b", &[("bin", &[0; 2000])]).unwrap();
    assert_eq!(names(directory.path()), [".shard-000001.tar.partial", "shard-000000.tar"]);
    drop(writer);
    assert_eq!(names(directory.path()), ["shard-000000.tar"]);
}

#[test]
fn a_refused_sample_leaves_the_writer_and_the_shard_as_they_were() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).build().unwrap();
    writer.write("a", &[("txt", b"1")]).unwrap();
    for (key, extension) in [("a", "txt"), ("b.c", "txt"), ("../b", "txt"), ("b", "TXT")] {
        let error = writer.write(key, &[(extension, b"2")]).unwrap_err();
        assert!(matches!(error, Error::Output(OutputError::Write { .. })), "{error}");
    }
    writer.write("b", &[("txt", b"3")]).unwrap();
    let written = writer.finish().unwrap();
    assert_eq!((written.samples, written.bytes), (2, 2));
    assert_eq!(read_samples(fs::read(&written.shards[0]).unwrap()).len(), 2);
}

#[test]
fn a_writer_whose_shard_failed_goes_no_further_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(directory.path()).shard_bytes(3000).build().unwrap();
    writer.write("a", &[("bin", &[0; 2000])]).unwrap();
    fs::write(directory.path().join("shard-000000.tar"), b"of another writer").unwrap();
    let error = writer.write("b", &[("bin", &[0; 2000])]).unwrap_err();
    assert!(matches!(error, Error::Output(OutputError::ShardExists { .. })), "{error}");
    assert!(writer.write("c", &[("bin", b"")]).is_err());
    assert!(writer.finish().is_err());
    assert_eq!(names(directory.path()), ["shard-000000.tar"]);
    assert_eq!(fs::read(directory.path().join("shard-000000.tar")).unwrap(), b"of another writer");
}

#[test]
fn a_directory_with_shards_or_the_rest_of_one_is_refused() {
    for name in ["shard-000007.tar", "shard-000000.tar.zst", ".shard-000000.tar.partial"] {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(name), b"").unwrap();
        let error = ShardWriter::builder(directory.path()).build().unwrap_err();
        assert!(
            matches!(&error, Error::Output(OutputError::ShardExists { path }) if path.ends_with(name)),
            "{error}"
        );
    }
}

#[test]
fn settings_without_sense_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let builder = ShardWriter::builder(directory.path().join("new"));
    let zstd = ShardCompression::Zstd { level: 99 };
    for builder in
        [builder.clone().shard_bytes(0), builder.clone().shard_samples(0), builder.compression(zstd)]
    {
        assert!(matches!(builder.build(), Err(Error::Config { .. })));
    }
    assert!(names(directory.path()).is_empty(), "an invalid setting must not create a directory");
}

#[test]
fn no_sample_gives_no_shard() {
    let directory = tempfile::tempdir().unwrap();
    let written = ShardWriter::builder(directory.path().join("a/b")).build().unwrap().finish().unwrap();
    assert_eq!(written, super::WrittenShards::default());
}

/// Creates an in-memory bucket.
fn bucket() -> (crate::store::Stores, Arc<dyn object_store::ObjectStore>) {
    let memory: Arc<dyn object_store::ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    let stores = crate::store::Stores::builder().build().unwrap();
    stores.insert("s3://bucket", &memory);
    (stores, memory)
}

fn to_bucket(stores: &crate::store::Stores) -> super::ShardWriterBuilder {
    ShardWriter::builder("s3://bucket/run").stores(stores).shard_samples(2).index(false)
}

fn object(memory: &Arc<dyn object_store::ObjectStore>, url: &Path) -> Vec<u8> {
    let path = url.to_str().unwrap().strip_prefix("s3://bucket/").unwrap();
    let (store, path) = (memory.clone(), object_store::path::Path::from(path));
    let get = async move { object_store::ObjectStoreExt::get(&store, &path).await.unwrap().bytes().await };
    crate::store::spawn(get).wait().unwrap().unwrap().to_vec()
}

#[test]
fn shards_on_a_store_are_those_of_a_directory_and_old_ones_are_kept() {
    let (directory, (stores, memory)) = (tempfile::tempdir().unwrap(), bucket());
    let fill = |mut writer: ShardWriter, keys: std::ops::Range<usize>| {
        for key in keys {
            writer.write(&format!("{key:03}"), &[("jpg", &[7; 600]), ("txt", b"a kite")]).unwrap();
        }
        writer.finish().unwrap().shards
    };
    let local = fill(ShardWriter::builder(directory.path()).shard_samples(2).build().unwrap(), 0..5);
    let remote = fill(to_bucket(&stores).build().unwrap(), 0..5);
    assert_eq!(remote.len(), 3);
    for (local, remote) in local.iter().zip(&remote) {
        assert_eq!(fs::read(local).unwrap(), object(&memory, remote));
    }
    let error = to_bucket(&stores).build().unwrap_err();
    assert!(
        matches!(&error, Error::Output(OutputError::ShardExists { path }) if path == "s3://bucket/run/shard-000000.tar"),
        "{error}"
    );
    let added = fill(to_bucket(&stores).append(true).build().unwrap(), 5..7);
    assert_eq!(added, [Path::new("s3://bucket/run/shard-000003.tar")]);
}

#[test]
fn a_name_that_was_taken_in_the_meantime_is_left_as_it_is() {
    let (stores, memory) = bucket();
    let (mut first, mut second) = (to_bucket(&stores).build().unwrap(), to_bucket(&stores).build().unwrap());
    first.write("first", &[("txt", b"a")]).unwrap();
    second.write("second", &[("txt", b"b")]).unwrap();
    let written = first.finish().unwrap();
    assert!(matches!(second.finish().unwrap_err(), Error::Output(OutputError::ShardExists { .. })));
    assert_eq!(read_samples(object(&memory, &written.shards[0]))[0].key, "first");
}

#[test]
fn the_shard_under_construction_is_no_object_and_its_directory_goes_with_the_writer() {
    let (stores, memory) = bucket();
    let mut writer = to_bucket(&stores).build().unwrap();
    let staging = writer.destination.staging().to_owned();
    writer.write("a", &[("txt", b"a")]).unwrap();
    assert_eq!(names(&staging).len(), 1);
    drop(writer);
    assert!(!staging.exists());
    let list = async move { memory.list_with_delimiter(None).await.unwrap().common_prefixes.len() };
    assert_eq!(crate::store::spawn(list).wait().unwrap(), 0);
}

fn reason(key: &str, extensions: &[&str]) -> Option<String> {
    let fields: Vec<(&str, &[u8])> = extensions.iter().map(|&ext| (ext, b"x".as_slice())).collect();
    match check_sample(key, &fields, Some("before")) {
        Err(Error::Output(OutputError::Write { reason, .. })) => Some(reason),
        _ => None,
    }
}

#[test]
fn keys_that_do_not_come_back_are_refused() {
    let long = "k".repeat(5000);
    let refused = [
        "",
        "a.b",
        "d/a.b",
        "d/",
        "/a",
        "../a",
        "a/../b",
        "./a",
        "a//b",
        "a\0b",
        "__meta__/a",
        "before",
        ".hidden",
        &long,
    ];
    for key in refused {
        assert!(reason(key, &["txt"]).is_some(), "{key:?} was accepted");
    }
}

#[test]
fn keys_of_real_datasets_are_taken() {
    for key in ["a", "d.1/e.v2/a", "a bé", "日本", "__x", "d/__m__", "__m__", "a\\b", "-", "a\nb"] {
        assert_eq!(reason(key, &["jpg", "seg.png", "0.jpg", ""]), None, "{key:?}");
    }
}

#[test]
fn extensions_that_do_not_come_back_are_refused() {
    for extensions in [&["JPG"] as &[&str], &["a/b"], &["a\0"], &["txt", "jpg", "txt"], &[]] {
        assert!(reason("a", extensions).is_some(), "{extensions:?} were accepted");
    }
    assert!(reason("__a", &["b__"]).is_some());
}
