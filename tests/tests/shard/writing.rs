//! Checks that the index created while shards are written equals the index created by reading them.

use std::path::{Path, PathBuf};

use dflop_loader::Error;
use dflop_loader::error::{OutputError, SelectionError};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::write::{ShardCompression, ShardWriter, ShardWriterBuilder, WrittenShards};
use dflop_tests::media::{jpeg, png, wav};
use proptest::prelude::*;

type Sample = (String, Vec<(&'static str, Vec<u8>)>);

fn write(builder: ShardWriterBuilder, samples: &[Sample]) -> WrittenShards {
    let mut writer = builder.build().unwrap();
    for (key, fields) in samples {
        let fields: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (*ext, &**payload)).collect();
        writer.write(key, &fields).unwrap();
    }
    writer.finish().unwrap()
}

/// Returns the index file bytes as written, and as rebuilt from the shards.
fn written_and_scanned(directory: &Path) -> (Vec<u8>, Vec<u8>) {
    let open = |is_rebuilt| {
        let shards = expand_shards(&[directory.to_str().unwrap()]).unwrap();
        let index = Index::open_or_build(shards, &IndexOptions { is_rebuilt, ..IndexOptions::default() });
        std::fs::read(index.unwrap().path().unwrap()).unwrap()
    };
    let written = index_files(directory);
    assert_eq!(written.len(), 1, "the writer wrote the index");
    let written = std::fs::read(&written[0]).unwrap();
    assert_eq!(open(false), written, "the index is used as it is");
    (written, open(true))
}

fn index_files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory.join(".dflop")).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "arrow")).collect()
}

/// Creates media, texts, empty fields, fields that make a sample bad, long and repeated keys.
fn mixed_samples() -> Vec<Sample> {
    let mut samples: Vec<Sample> = (0..40_u32)
        .map(|number| {
            let mut fields = vec![("txt", "a kite ".repeat(number as usize % 5).into_bytes())];
            match number % 4 {
                0 => fields.push(("jpg", jpeg(20 + number, 30, number))),
                1 => fields.push(("seg.png", png(9, 20 + number, number))),
                2 => fields.push(("wav", wav(100 + number, 8_000))),
                _ => fields.push(("json", br#"{"caption": "a red kite"}"#.to_vec())),
            }
            (format!("d.{}/{number:03}", number % 3), fields)
        })
        .collect();
    samples.push(("bad".into(), vec![("jpg", b"no image".to_vec())]));
    samples.push((
        "opaque".into(),
        vec![("npy", b"no array".to_vec()), ("mp4", vec![1; 700]), ("pt", vec![2; 9])],
    ));
    samples.push(("k".repeat(180), vec![("cls", b"7".to_vec()), ("", Vec::new())]));
    samples.push(("bad".into(), vec![("txt", b"caf\xe9".to_vec())]));
    samples.push(("\u{65e5}\u{672c}".into(), vec![("txt", "\u{65e5}".repeat(9).into())]));
    samples.push(("bad".into(), vec![("txt", b"the key again".to_vec())]));
    samples
}

#[test]
fn the_index_of_written_shards_is_that_of_a_scan_byte_for_byte() {
    for (compression, limit) in [
        (ShardCompression::None, 7),
        (ShardCompression::None, u64::MAX),
        (ShardCompression::Zstd { level: 1 }, 7),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let builder = ShardWriter::builder(directory.path()).shard_samples(limit).compression(compression);
        let written = write(builder, &mixed_samples());
        assert_eq!(written.shards.len() as u64, if limit == 7 { 7 } else { 1 });
        assert_eq!(written.index, index_files(directory.path()).pop());
        let (written, scanned) = written_and_scanned(directory.path());
        assert!(written == scanned, "{compression:?}, {limit} samples a shard");
    }
}

#[test]
fn appended_shards_are_indexed_together_with_those_before() {
    let directory = tempfile::tempdir().unwrap();
    let samples = mixed_samples();
    write(ShardWriter::builder(directory.path()).shard_samples(5), &samples[..12]);
    std::fs::remove_dir_all(directory.path().join(".dflop")).unwrap();
    write(ShardWriter::builder(directory.path()).append(true).shard_samples(50), &samples[12..]);
    let (written, scanned) = written_and_scanned(directory.path());
    assert!(written == scanned);
    let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
    let index = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
    assert_eq!((index.shards().len(), index.len() + index.skipped().len() as u64), (4, samples.len() as u64));
}

#[test]
fn without_an_index_nothing_but_shards_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let written = write(ShardWriter::builder(directory.path()).index(false), &mixed_samples());
    assert_eq!(written.index, None);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

/// Draws realistic keys, and payloads that are texts, images or noise.
fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let key = prop_oneof![
        "[a-c]",
        "[a-z]{1,8}/[0-9]{1,4}",
        "[\u{e0}-\u{17f}\u{4e00}-\u{4e20} ]{1,60}",
        "k{90,200}"
    ];
    let field = prop_oneof![
        Just(("txt", Vec::new())),
        "[ -~\u{e0}-\u{ff}]{0,600}".prop_map(|text| ("txt", text.into_bytes())),
        proptest::collection::vec(any::<u8>(), 0..1500).prop_map(|noise| ("bin", noise)),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(|noise| ("json", noise)),
        (1_u32..40, 1_u32..40).prop_map(|(width, height)| ("png", png(width, height, 1))),
        proptest::collection::vec(any::<u8>(), 0..60).prop_map(|noise| ("jpg", noise)),
    ];
    let fields = proptest::collection::vec(field, 1..4).prop_map(|mut fields| {
        fields.sort_by_key(|(extension, _)| *extension);
        fields.dedup_by_key(|(extension, _)| *extension);
        fields
    });
    proptest::collection::vec((key, fields), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rows_made_while_writing_are_rows_made_by_reading(samples in samples(), limit in 1_u64..9) {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::builder(directory.path()).shard_samples(limit).build().unwrap();
        let mut last = None;
        for (key, fields) in &samples {
            let fields: Vec<(&str, &[u8])> = fields.iter().map(|(ext, payload)| (*ext, &**payload)).collect();
            let written = writer.write(key, &fields);
            if last.as_ref() == Some(key) {
                prop_assert!(matches!(written, Err(Error::Output(OutputError::Write { .. }))), "a key directly after itself was accepted");
            } else {
                written.unwrap();
            }
            last = Some(key.clone());
        }
        writer.finish().unwrap();
        let written = std::fs::read(&index_files(directory.path())[0]).unwrap();
        let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
        let options = IndexOptions { is_rebuilt: true, ..IndexOptions::default() };
        match Index::open_or_build(shards, &options) {
            Ok(index) => prop_assert!(std::fs::read(index.path().unwrap()).unwrap() == written),
            Err(error) => prop_assert!(matches!(error, Error::Selection(SelectionError::NoSamples { .. })), "{error}"),
        }
        prop_assert!(std::fs::read(&index_files(directory.path())[0]).unwrap() == written);
    }
}
