//! Checks broken and hostile files among good files: every good sample is delivered, every bad sample is
//! named.

use std::collections::BTreeSet;

use dflop_costmodel::AudioLength;
use dflop_loader::Loader;
use dflop_loader::decode::Batch;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::MediaShape;
use dflop_loader::shard::expand_shards;
use dflop_tests::dataset::{Compression, compress};
use dflop_tests::media::{jpeg, png, wav};
use dflop_tests::tar::TarBytes;
use dflop_tests::{run, shared_data};
use futures::TryStreamExt;

/// Files that no decoder can read, by name.
fn bad_files() -> Vec<(&'static str, Vec<u8>)> {
    let (image, page, clip) = (jpeg(64, 48, 1), png(64, 48, 1), wav(4_000, 16_000));
    let mut bad_crc = page.clone();
    let middle = bad_crc.len() / 2;
    bad_crc[middle] ^= 0xff;
    let mut giant = page.clone();
    giant[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
    vec![
        ("cut.jpg", image[..image.len() * 9 / 10].to_vec()),
        ("stub.jpg", image[..2].to_vec()),
        ("empty.jpg", Vec::new()),
        ("html.jpg", b"<html>not found</html>".to_vec()),
        ("crc.png", bad_crc),
        ("giant.png", giant),
        ("cut.png", page[..page.len() / 2].to_vec()),
        ("noise.wav", vec![7; 300]),
        ("stub.wav", clip[..20].to_vec()),
        ("latin1.txt", vec![b'a', 0xe9, b'b']),
        ("open.json", b"{\"a\": [1, 2".to_vec()),
        ("deep.json", vec![b'['; 100_000]),
        ("stub.npy", b"\x93NUMPY".to_vec()),
    ]
}

/// Writes a good sample before, between and after all bad ones.
fn damaged_shard(bad: &[(&str, Vec<u8>)]) -> (Vec<u8>, BTreeSet<String>, BTreeSet<String>) {
    let (mut good_keys, mut bad_keys) = (BTreeSet::new(), BTreeSet::new());
    let mut tar = TarBytes::new();
    for (number, (name, bytes)) in bad.iter().enumerate() {
        let good = format!("good-{number}");
        tar = tar.file(&format!("{good}.jpg"), &jpeg(40, 30, number as u32));
        good_keys.insert(good);
        let key = format!("bad-{number}");
        let extension = name.rsplit('.').next().unwrap_or_default();
        tar = tar.file(&format!("{key}.{extension}"), bytes);
        bad_keys.insert(key);
    }
    (tar.file("last.txt", b"the end").finish(), good_keys, bad_keys)
}

fn stream(pattern: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let shards = expand_shards(&[pattern]).unwrap();
    let loader = Loader::builder(shards).error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
    let delivered = batches.into_iter().flat_map(|batch| batch.samples).map(|sample| sample.key).collect();
    let skipped = loader.skipped().into_iter().map(|skipped| skipped.key.unwrap_or_default()).collect();
    (delivered, skipped)
}

#[test]
fn every_good_sample_is_delivered_and_every_bad_one_named() {
    let (tar, mut good, bad) = damaged_shard(&bad_files());
    good.insert("last".into());
    let directory = tempfile::tempdir().unwrap();
    for stored in [Compression::Plain, Compression::Gzip] {
        let path = directory.path().join("s.tar");
        std::fs::write(&path, compress(&tar, stored)).unwrap();
        assert_eq!(stream(path.to_str().unwrap()), (good.clone(), bad.clone()), "{stored:?}");
    }
}

#[test]
fn a_verified_index_knows_every_bad_sample_ahead() {
    let (tar, good, bad) = damaged_shard(&bad_files());
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("s.tar"), tar).unwrap();
    let shards = || expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
    let options = IndexOptions { is_verified: true, ..IndexOptions::default() };
    let index = Index::open_or_build(shards(), &options).unwrap();
    assert_eq!(index.len(), good.len() as u64 + 1);
    let skipped: BTreeSet<String> =
        index.skipped().iter().filter_map(|skipped| skipped.key.clone()).collect();
    assert_eq!(skipped, bad);
    let kept = Index::open_or_build(shards(), &IndexOptions::default()).unwrap();
    assert_eq!(kept.skipped(), index.skipped());
}

#[test]
fn a_field_over_the_limit_makes_its_sample_bad_without_being_held() {
    let directory = tempfile::tempdir().unwrap();
    let tar = TarBytes::new().file("a.bin", &vec![0; 50_000]).file("b.txt", b"ok").finish();
    for stored in [Compression::Plain, Compression::Gzip] {
        let path = directory.path().join("s.tar");
        std::fs::write(&path, compress(&tar, stored)).unwrap();
        let builder = Loader::builder(expand_shards(&[path.to_str().unwrap()]).unwrap());
        let budget = ErrorBudget::new(1.0).unwrap();
        let loader = builder.field_bytes_max(10_000).error_budget(budget).build().unwrap();
        let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
        assert_eq!(batches[0].samples[0].key, "b");
        assert!(loader.skipped()[0].reason.contains("50000 bytes"), "{:?}", loader.skipped());
    }
}

#[test]
fn an_index_without_one_good_sample_says_what_it_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar");
    for (bytes, expected) in
        [(Vec::new(), "the file is empty"), (TarBytes::new().file("README", b"x").finish(), "KEY.EXTENSION")]
    {
        std::fs::write(&path, bytes).unwrap();
        let shards = expand_shards(&[path.to_str().unwrap()]).unwrap();
        let error = Index::open_or_build(shards, &IndexOptions::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_damaged_index_file_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("s.tar"), TarBytes::new().file("a.txt", b"x").finish()).unwrap();
    let shards = || expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
    let first = Index::open_or_build(shards(), &IndexOptions::default()).unwrap();
    let path = first.path().unwrap().to_path_buf();
    let whole = std::fs::read(&path).unwrap();
    drop(first);
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let damaged = [0, 5, whole.len() / 2, whole.len() - 3].map(|length| whole[..length].to_vec());
    for bytes in damaged.into_iter().chain([flipped]) {
        // Replaced, not truncated: the file may be mapped.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(Index::open_or_build(shards(), &IndexOptions::default()).unwrap().len(), 1);
        assert_eq!(std::fs::read(&path).unwrap().len(), whole.len(), "it is complete again");
    }
}

#[test]
fn the_malformed_files_beside_the_checkout_break_nothing() {
    let Some(data) = shared_data() else { return };
    let mut tar = TarBytes::new();
    let (mut names, mut number) = (BTreeSet::new(), 0);
    for directory in ["made", "imagers_bad", "dali_fuzzing"] {
        for file in std::fs::read_dir(data.join("malformed").join(directory)).into_iter().flatten().flatten()
        {
            let extension = file.path().extension().map(|name| name.to_string_lossy().into_owned());
            let key = format!("bad-{number:03}");
            let name = format!("{key}.{}", extension.unwrap_or_else(|| "bin".into()));
            tar = tar.file(&format!("good-{number:03}.jpg"), &jpeg(20, 20, number));
            tar = tar.file(&name, &std::fs::read(file.path()).unwrap());
            names.insert(format!("good-{number:03}"));
            names.insert(key);
            number += 1;
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar");
    std::fs::write(&path, tar.finish()).unwrap();
    let (delivered, skipped) = stream(path.to_str().unwrap());
    assert!((0..number).all(|number| delivered.contains(&format!("good-{number:03}"))));
    assert_eq!(delivered.union(&skipped).cloned().collect::<BTreeSet<_>>(), names);
    assert!(delivered.is_disjoint(&skipped) && skipped.len() > 20, "{}", skipped.len());
}

/// A header may announce more frames than 32 bits can count: 36 bits in FLAC.
#[test]
fn a_clip_of_any_length_is_indexed_at_its_length() {
    let flac = |frames: u64| {
        // Blocks with 4,096 frames, 48 kHz, 1 channel, 16 bits.
        let format = 48_000_u64 << 44 | 15 << 36 | frames;
        let sizes = [0x10, 0, 0x10, 0, 0, 0, 0, 0, 0, 0];
        [b"fLaC", &[0x80, 0, 0, 34][..], &sizes, &format.to_be_bytes(), &[0; 16]].concat()
    };
    let tar = TarBytes::new().file("long.flac", &flac((1 << 36) - 1));
    let tar = tar.file("more.flac", &flac(1 << 32)).file("most.flac", &flac((1 << 32) - 1)).finish();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flac.tar");
    std::fs::write(&path, tar).unwrap();
    let shards = expand_shards(&[path.to_str().unwrap()]).unwrap();
    let index = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
    let shapes: Vec<_> =
        (0..index.len()).map(|sample| index.sample(sample).fields().next().unwrap().shape).collect();
    let clip = |frames| MediaShape::Audio(AudioLength { frames, sample_rate_hz: 48_000 });
    assert_eq!(shapes, [clip((1 << 36) - 1), clip(1 << 32), clip((1 << 32) - 1)]);
    assert!(index.skipped().is_empty());
}
