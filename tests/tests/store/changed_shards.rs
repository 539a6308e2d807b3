//! Tests that a shard that is shortened or changed while it is read is an error that names it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use dflop_loader::decode::Decode;
use dflop_loader::error::Error;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{FieldSelection, Shard, ShardAccess, expand_shards_in};
use dflop_loader::store::{ReadMode, Stores};
use dflop_loader::{BalancedLoader, Dataset, Loader, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::media::jpeg;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::{Stream, StreamExt};

fn shards(data: &TempDataset, read: ReadMode) -> Vec<Shard> {
    let stores = Stores::builder().read(read).build().unwrap();
    expand_shards_in(&[data.pattern()], &ShardAccess::new(&stores)).unwrap()
}

/// Cuts a file to a third of the length.
fn shorten(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 3).unwrap();
}

async fn first_error<T>(items: impl Stream<Item = Result<T, Error>>) -> Option<Error> {
    let mut items = std::pin::pin!(items);
    while let Some(item) = items.next().await {
        if let Err(error) = item {
            return Some(error);
        }
    }
    None
}

fn causes(error: &dyn std::error::Error) -> String {
    let errors = std::iter::successors(Some(error), |error| error.source());
    errors.map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[test]
fn a_shard_that_is_shortened_while_it_streams_ends_the_stream_with_its_name() {
    for stored in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let data = TempDataset::new(1, 4_000, stored);
        let loader = Loader::builder(shards(&data, ReadMode::Pread)).batch_size(2).build().unwrap();
        let error = run(async {
            let mut batches = loader.stream();
            assert!(batches.next().await.unwrap().is_ok());
            shorten(&data.shard(0));
            first_error(batches).await
        });
        let error = causes(&error.expect("the stream fails"));
        assert!(
            error.contains("shard-000") && error.contains("changed while it was read"),
            "{stored:?}: {error}"
        );
    }
}

#[test]
fn a_shard_that_is_shortened_while_steps_are_read_is_an_error_with_its_name() {
    let data = TempDataset::new(1, 400, Compression::Plain);
    let options = IndexOptions::default();
    let index = Index::open_or_build(shards(&data, ReadMode::Pread), &options).unwrap();
    let planner = planner(&Arc::new(index), 4, 1, 2, Tail::Drop);
    let loader = BalancedLoader::builder(planner, 0).decode(Decode::Raw).build().unwrap();
    let error = run(async {
        let mut steps = loader.stream();
        assert!(steps.next().await.unwrap().is_ok());
        shorten(&data.shard(0));
        first_error(steps).await
    });
    let error = causes(&error.expect("the stream fails"));
    assert!(error.contains("shard-000") && error.contains("changed while it was read"), "{error}");
}

#[test]
fn a_shard_that_was_written_since_it_was_indexed_is_an_error_with_its_name() {
    for read in [ReadMode::Pread, ReadMode::Mmap] {
        let data = TempDataset::new(1, 40, Compression::Plain);
        let index = Index::open_or_build(shards(&data, read), &IndexOptions::default()).unwrap();
        let planner = planner(&Arc::new(index), 4, 1, 2, Tail::Drop);
        let written = File::options().write(true).open(data.shard(0)).unwrap();
        written.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let loader = BalancedLoader::builder(planner, 0).decode(Decode::Raw).build().unwrap();
        let error = causes(&run(first_error(loader.stream())).expect("the stream fails"));
        assert!(
            error.contains("shard-000") && error.contains("changed since it was indexed"),
            "{read:?}: {error}"
        );
    }
}

#[test]
fn an_index_that_is_shortened_after_it_was_opened_stays_readable() {
    let data = TempDataset::new(1, 400, Compression::Plain);
    let index = data.index();
    let path = index.path().expect("the index is kept").to_owned();
    let keys = || (0..index.len()).map(|sample| index.sample(sample).key().to_owned()).collect::<Vec<_>>();
    let before = keys();
    shorten(&path);
    assert_eq!(keys(), before);
    let again = data.index();
    assert_eq!(again.fingerprint(), index.fingerprint(), "a damaged index is built again");
}

#[test]
fn both_ways_of_reading_deliver_the_same() {
    for stored in [Compression::Plain, Compression::Gzip] {
        let data = TempDataset::new(3, 60, stored);
        let read = |mode| {
            let loader = Loader::builder(shards(&data, mode)).batch_size(7).build().unwrap();
            let batches: Vec<_> = run(loader.stream().map(Result::unwrap).collect());
            (format!("{batches:?}"), serde_json::to_string(&loader.state().unwrap()).unwrap())
        };
        assert_eq!(read(ReadMode::Mmap), read(ReadMode::Pread));
        let fingerprint = |mode| {
            let options = IndexOptions { is_rebuilt: true, ..IndexOptions::default() };
            let index = Index::open_or_build(shards(&data, mode), &options).unwrap();
            (index.fingerprint().to_owned(), std::fs::read(index.path().unwrap()).unwrap())
        };
        assert_eq!(fingerprint(ReadMode::Mmap), fingerprint(ReadMode::Pread));
    }
}

/// Names with zero, one and two extension headers, and entries between them that are no fields.
fn archive(first: usize) -> Vec<u8> {
    let long = |letter: &str| format!("{}/kite", letter.repeat(120));
    let mut tar = TarBytes::new();
    for number in (0..12).map(|number| (first + number) % 11 + 11 * usize::from(number == 11)) {
        let text = format!("the text of {number:02}");
        let name = |base: &str| format!("{base}-{number:02}.txt");
        tar = match number % 4 {
            0 => tar.file(&name("a"), text.as_bytes()),
            1 => tar.gnu_long_name(&name(&long("b"))).file("cut", text.as_bytes()),
            2 => tar.pax(&[("path", &name(&long("c"))), ("size", "14")]).member(
                "cut",
                b'0',
                0,
                text.as_bytes(),
            ),
            _ => tar.empty("d", b'5').file(&name("d"), text.as_bytes()).file("__skipped__", &[7; 700]),
        };
        let image = jpeg(16, 16, number as u32);
        let base = ["a", &long("b"), &long("c"), "d"][number % 4].to_owned();
        let padded = [image, vec![0; 2_000]].concat()[..2_000].to_vec();
        tar = tar.gnu_long_name(&format!("{base}-{number:02}.bin")).file("cut", &padded);
    }
    tar.finish()
}

/// Replaces a file by a file with the same length and time.
fn replace(path: &Path, contents: &[u8]) {
    let before = std::fs::metadata(path).unwrap();
    assert_eq!(before.len(), contents.len() as u64);
    std::fs::write(path, contents).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(before.modified().unwrap()).unwrap();
}

#[test]
fn a_shard_that_was_replaced_by_one_of_its_length_and_time_is_an_error_with_its_name() {
    for (read, fields) in [(ReadMode::Pread, "txt"), (ReadMode::Mmap, "txt"), (ReadMode::Mmap, "bin")] {
        let directory = tempfile::tempdir().unwrap();
        let shard = directory.path().join("shard-000.tar");
        std::fs::write(&shard, archive(0)).unwrap();
        let stores = Stores::builder().read(read).build().unwrap();
        let pattern = directory.path().to_str().unwrap().to_owned();
        let shards = expand_shards_in(&[pattern], &ShardAccess::new(&stores)).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        assert_eq!((index.len(), index.skipped().len()), (12, 0));
        let fields = FieldSelection::new([fields]).unwrap();
        let balanced = || {
            let loader = BalancedLoader::builder(planner(&index, 4, 1, 2, Tail::Short), 0);
            let loader = loader.decode(Decode::Raw).fields(fields.clone()).steps(3).build().unwrap();
            run(first_error(loader.stream()))
        };
        let dealt = || {
            let loader = Loader::builder(Vec::new()).samples_of_rank(Dataset::from(index.clone()), 0, 1);
            let loader = loader.decode(Decode::Raw).fields(fields.clone()).epochs(1).build().unwrap();
            run(first_error(loader.stream()))
        };
        assert!(balanced().is_none() && dealt().is_none(), "all headers are those of the index");
        replace(&shard, &archive(4));
        for error in [balanced(), dealt()] {
            let error = causes(&error.expect("the stream fails"));
            let is_named = ["shard-000", "of sample `", "it has changed since it was indexed"];
            assert!(is_named.iter().all(|words| error.contains(words)), "{read:?}: {error}");
        }
    }
}

/// Fields with long names after members with more than a mebibyte that are no fields.
fn archive_of_skipped_members(letter: &str) -> Vec<u8> {
    let name = |number: usize| format!("{}/kite-{number}.txt", letter.repeat(120));
    let skipped = vec![7; 3 << 19];
    let tar = TarBytes::new().file("__skipped__", &skipped).gnu_long_name(&name(0)).file("cut", b"zero");
    let tar = tar.file("__skipped__", &skipped).pax(&[("path", &name(1))]).file("cut", b"one1");
    tar.file("__skipped__", &skipped).file("short.txt", b"two2").finish()
}

#[test]
fn headers_behind_long_members_that_are_no_fields_are_compared() {
    for read in [ReadMode::Pread, ReadMode::Mmap] {
        let directory = tempfile::tempdir().unwrap();
        let shard = directory.path().join("shard-000.tar");
        std::fs::write(&shard, archive_of_skipped_members("b")).unwrap();
        let stores = Stores::builder().read(read).build().unwrap();
        let pattern = directory.path().to_str().unwrap().to_owned();
        let shards = expand_shards_in(&[pattern], &ShardAccess::new(&stores)).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        assert_eq!(index.len(), 3);
        let balanced = || {
            let loader = BalancedLoader::builder(planner(&index, 3, 1, 1, Tail::Short), 0);
            let loader = loader.decode(Decode::Raw).steps(1).build().unwrap();
            run(first_error(loader.stream())).map(|error| causes(&error))
        };
        assert_eq!(balanced(), None, "{read:?}");
        replace(&shard, &archive_of_skipped_members("c"));
        let error = balanced().expect("the stream fails");
        assert!(error.contains("it has changed since it was indexed"), "{read:?}: {error}");
    }
}
