//! Checks that an index built in parts and merged equals the index over all shards at once.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_loader::error::{DataError, Error, Result, ShardFault};
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::processors::{Preparer, Tokenizer};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_tests::dataset::{Compression, TempDataset, compress};
use dflop_tests::tar::TarBytes;

/// Writes shards of all kinds: good ones, one compressed, one with a repeated key and a bad image, one that
/// cannot be read, one without samples.
fn mixed() -> TempDataset {
    let data = TempDataset::new(3, 6, Compression::Plain);
    let odd = TarBytes::new().file("a.txt", b"one").file("b.jpg", b"no image").file("b.txt", b"x");
    let odd = odd.file("a.npy", b"other").file("c.cls", b"3").finish();
    let write = |name: &str, bytes: &[u8]| std::fs::write(data.directory().join(name), bytes).unwrap();
    write("shard-003.tar", &odd);
    write("shard-004.tar", &TarBytes::new().file("nothing", b"here").finish());
    write(
        "shard-005.tar.zst",
        &compress(&TarBytes::new().file("z.txt", b"words here").finish(), Compression::Zstd),
    );
    write("shard-006.tar", b"BZh91AY&SY a shard that is packed by bzip2");
    data
}

fn shards(directory: &Path) -> Vec<Shard> {
    expand_shards(&[directory.to_str().unwrap()]).unwrap()
}

fn options(directory: &Path, token_counts: TokenCounts) -> IndexOptions {
    IndexOptions { directory: Some(directory.to_owned()), token_counts, ..IndexOptions::default() }
}

fn parts(shards: &[Shard], of_each: usize, options: &IndexOptions) -> Vec<Vec<u8>> {
    shards.chunks(of_each).map(|shards| Index::build_part(shards, options).unwrap()).collect()
}

fn file(index: &Index) -> (PathBuf, Vec<u8>) {
    let path = index.path().expect("it was written");
    (path.file_name().unwrap().into(), std::fs::read(path).unwrap())
}

fn counter() -> TokenCounts {
    let tokenizer = Tokenizer::open(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml"));
    let preparer =
        Preparer::builder(&ModelSpec::preset("qwen2.5-vl-7b").unwrap()).tokenizer(tokenizer.unwrap());
    TokenCounts::Of(Arc::new(preparer.build().unwrap().text_counter()))
}

#[test]
fn merged_parts_are_the_index_of_all_shards_byte_for_byte_in_any_order() {
    let data = mixed();
    let all = shards(data.directory());
    assert_eq!(all.len(), 7);
    for token_counts in [TokenCounts::Estimated, counter()] {
        let places = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [at_once, merged] = [0, 1].map(|at| options(places[at].path(), token_counts.clone()));
        let expected = Index::open_or_build(all.clone(), &at_once).unwrap();
        assert!(
            expected.skipped().len() >= 2 && !expected.warnings().is_empty(),
            "{:?}",
            expected.warnings()
        );
        for of_each in [1, 2, 7] {
            let mut parts = parts(&all, of_each, &merged);
            parts.reverse();
            let index = Index::merge_parts(all.clone(), parts, &merged).unwrap();
            assert_eq!(file(&index), file(&expected), "{of_each} shards in each part");
            assert_eq!(index.token_counts(), expected.token_counts());
        }
    }
}

#[test]
fn a_merged_index_is_found_where_it_is_looked_for() {
    let data = TempDataset::new(2, 4, Compression::Plain);
    let all = shards(data.directory());
    let parts = parts(&all, 1, &IndexOptions::default());
    let merged = Index::merge_parts(all, parts, &IndexOptions::default()).unwrap();
    let modified = |index: &Index| std::fs::metadata(index.path().unwrap()).unwrap().modified().unwrap();
    let found = data.index();
    assert_eq!((found.path(), modified(&found)), (merged.path(), modified(&merged)));
    assert_eq!(found.len(), 8);
}

/// Tasks may mount the directory under a different path.
#[test]
fn shards_are_found_by_their_names_where_paths_differ() {
    let data = mixed();
    let link = tempfile::tempdir().unwrap();
    let there = link.path().join("mounted");
    std::os::unix::fs::symlink(data.directory(), &there).unwrap();
    let place = tempfile::tempdir().unwrap();
    let options = options(place.path(), TokenCounts::Estimated);
    let parts = parts(&shards(&there), 2, &options);
    let index = Index::merge_parts(shards(data.directory()), parts, &options).unwrap();
    let other = tempfile::tempdir().unwrap();
    let at_once = IndexOptions { directory: Some(other.path().to_owned()), ..options };
    let expected = Index::open_or_build(shards(data.directory()), &at_once).unwrap();
    assert_eq!(file(&index), file(&expected));
}

#[test]
fn shards_that_are_not_covered_once_in_their_present_version_are_named() {
    let data = TempDataset::new(3, 4, Compression::Plain);
    let (all, options) = (shards(data.directory()), IndexOptions::default());
    let parts = parts(&all, 1, &options);
    let merge =
        |shards: &[Shard], parts: &[Vec<u8>]| Index::merge_parts(shards.to_vec(), parts.to_vec(), &options);
    let check = |result: Result<Index>, name: &str, expected| {
        let error = result.unwrap_err();
        let text = error.to_string();
        let Error::Data(DataError::IndexShard { shard, fault }) = error else { panic!("{text}") };
        assert!(shard.ends_with(name) && text.contains(name), "{text}");
        assert_eq!(fault, expected);
    };
    check(merge(&all, &parts[..2]), "shard-002.tar", ShardFault::Missing);
    let twice = [&parts[..], &parts[1..2]].concat();
    check(merge(&all, &twice), "shard-001.tar", ShardFault::Repeated);
    check(merge(&all[..2], &parts), "shard-002.tar", ShardFault::Unknown);
    let counted = IndexOptions { token_counts: counter(), ..IndexOptions::default() };
    let other = Index::build_part(&all[2..], &counted).unwrap();
    let mixed = [&parts[..2], &[other]].concat();
    check(merge(&all, &mixed), "shard-002.tar", ShardFault::OtherCounters);
    let uncounted = Index::merge_parts(all.clone(), parts.clone(), &counted);
    check(uncounted, "shard-000.tar", ShardFault::NotCounted);
    let changed = std::fs::File::options().write(true).open(data.shard(1)).unwrap();
    changed.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    check(merge(&all, &parts), "shard-001.tar", ShardFault::Changed);
    assert!(matches!(merge(&[], &parts), Err(Error::Config { .. })));
    assert!(matches!(Index::build_part(&[], &options), Err(Error::Config { .. })));
    assert!(!data.directory().join(".dflop").exists(), "nothing was written");
}

#[test]
fn no_damage_of_a_part_goes_unnoticed() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let (all, options) = (shards(data.directory()), IndexOptions::default());
    let part = Index::build_part(&all, &options).unwrap();
    let check = |damaged: Vec<u8>, note: &str| {
        let error = Index::merge_parts(all.clone(), [damaged], &options).unwrap_err();
        assert!(matches!(error, Error::Data(DataError::IndexPart { part: 0, .. })), "{note}: {error}");
    };
    for at in (0..part.len()).step_by(7).chain(0..64).chain(part.len() - 64..part.len()) {
        let mut damaged = part.clone();
        damaged[at] ^= 0x41;
        check(damaged, &format!("byte {at}"));
        check(part[..at].to_vec(), &format!("the first {at} bytes"));
    }
    check([&part[..], b"more"].concat(), "more");
    check(b"another file altogether, long enough to be one".to_vec(), "another file");
    let index = Index::open_or_build(all.clone(), &options).unwrap();
    check(std::fs::read(index.path().unwrap()).unwrap(), "an index file");
}

#[test]
fn shards_without_a_sample_make_parts_and_no_index() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("0.tar"), TarBytes::new().file("nothing", b"here").finish())
        .unwrap();
    let (all, options) = (shards(directory.path()), IndexOptions::default());
    let part = Index::build_part(&all, &options).unwrap();
    let [merged, at_once] = [
        Index::merge_parts(all.clone(), [part], &options).unwrap_err(),
        Index::open_or_build(all, &options).unwrap_err(),
    ];
    assert_eq!(merged.to_string(), at_once.to_string());
}
