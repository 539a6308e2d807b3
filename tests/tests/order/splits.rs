//! Checks splits and validation order end to end.

use std::collections::BTreeSet;

use dflop_loader::{Dataset, Shuffle, Splits};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::{builder, stream_all_ranks};

const HALVES: &str = r#"{"splits": {
    "train": {"fraction": [0, 0.6]}, "held_out": {"fraction": [0.6, 1]},
    "second": {"shards": ["shard-{001..001}.tar"], "may_overlap": true},
    "gold": {"keys": ["sample-00003", "sample-00040"], "may_overlap": true},
    "listed": {"keys_file": "keys.txt", "may_overlap": true}
}}"#;

fn with_splits(data: &TempDataset) -> Splits {
    std::fs::write(data.directory().join("splits.json"), HALVES).unwrap();
    std::fs::write(data.directory().join("keys.txt"), "sample-00001\nsample-00002\n").unwrap();
    Splits::beside(&data.index()).unwrap()
}

fn keys(source: &Dataset) -> BTreeSet<String> {
    let key = |place| source.index().sample(source.sample_number(place)).key().to_owned();
    (0..source.len()).map(key).collect()
}

#[test]
fn splits_take_their_samples_and_a_sample_stays_when_shards_are_added() {
    let (small, large) =
        (TempDataset::new(2, 30, Compression::Plain), TempDataset::new(3, 30, Compression::Plain));
    let take = |data: &TempDataset, name: &str| {
        keys(&Dataset::from(data.index()).split(&with_splits(data), name).unwrap())
    };
    let (train, held_out) = (take(&small, "train"), take(&small, "held_out"));
    assert!(train.is_disjoint(&held_out) && train.len() + held_out.len() == 60);
    assert!(take(&large, "train").is_superset(&train) && take(&large, "held_out").is_superset(&held_out));
    assert_eq!(take(&large, "second"), large.keys[30..60].iter().cloned().collect());
    assert_eq!(take(&small, "gold"), ["sample-00003", "sample-00040"].map(String::from).into());
    assert_eq!(take(&small, "listed"), ["sample-00001", "sample-00002"].map(String::from).into());
}

#[test]
fn a_split_is_streamed_alone_and_whole_whatever_the_shuffle() {
    let data = TempDataset::new(3, 20, Compression::Plain);
    let splits = with_splits(&data);
    for name in ["train", "second"] {
        let source = Dataset::from(data.index()).split(&splits, name).unwrap();
        let blocks = Shuffle::Blocks { block_samples: 4, open_blocks: 2 };
        for shuffle in [Shuffle::Global, blocks, Shuffle::None] {
            let planner = builder(source.clone(), 8, 2).shuffle(shuffle).epochs(1).build().unwrap();
            let (batches, _) = stream_all_ranks(&planner, usize::MAX);
            let delivered: Vec<String> = batches.into_iter().flatten().map(|sample| sample.1).collect();
            assert_eq!(delivered.len() as u64, source.len());
            assert_eq!(delivered.into_iter().collect::<BTreeSet<_>>(), keys(&source), "{name}, {shuffle:?}");
        }
    }
}

#[test]
fn validation_delivers_every_sample_once_over_any_number_of_ranks() {
    for samples in [1, 7, 33] {
        let data = TempDataset::new(1, samples, Compression::Plain);
        for dp_size in [1, 2, 3, 8] {
            let planner = builder(data.index(), 16, dp_size).microbatches(2).validation().build().unwrap();
            let (batches, state) = stream_all_ranks(&planner, usize::MAX);
            assert_eq!(batches.len(), samples.div_ceil(16), "{samples} samples, {dp_size} ranks");
            assert_eq!(state.step as usize, batches.len());
            let delivered: Vec<String> = batches.into_iter().flatten().map(|sample| sample.1).collect();
            assert_eq!(delivered, data.keys, "{samples} samples, {dp_size} ranks");
        }
    }
}

const OF_ENERGON: &str = "split_parts:
  train:
  - s/shard-{000..001}.tar
  - s/shard-002.tar
  val:
  - s/shard-003.tar
exclude:
- s/shard-001.tar
- s/shard-002.tar/EXCLUDED
";

/// Creates a dataset whose root, where Energon writes the metadata files, is above the shards.
fn prepared_by_energon(yaml: &str) -> (tempfile::TempDir, TempDataset, Vec<dflop_loader::shard::Shard>) {
    let (root, data) = (tempfile::tempdir().unwrap(), TempDataset::new(4, 10, Compression::Plain));
    std::fs::create_dir_all(root.path().join("s")).unwrap();
    std::fs::create_dir_all(root.path().join(".nv-meta")).unwrap();
    for shard in 0..4 {
        let path = data.shard(shard);
        std::fs::copy(&path, root.path().join("s").join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(root.path().join(".nv-meta/split.yaml"), yaml).unwrap();
    let directory = root.path().join("s");
    let shards = dflop_loader::shard::expand_shards(&[directory.to_str().unwrap()]).unwrap();
    (root, data, shards)
}

fn build_index(shards: Vec<dflop_loader::shard::Shard>) -> std::sync::Arc<dflop_loader::index::Index> {
    let options = dflop_loader::index::IndexOptions::default();
    std::sync::Arc::new(dflop_loader::index::Index::open_or_build(shards, &options).unwrap())
}

#[test]
fn splits_of_energon_are_taken_where_there_is_no_file_of_ours() {
    let (root, data, shards) = prepared_by_energon(&OF_ENERGON.replace("EXCLUDED", "sample-00024"));
    let index = build_index(shards);
    let splits = Splits::beside(&index).unwrap();
    let take = |splits: &Splits, name: &str| keys(&Dataset::from(index.clone()).split(splits, name).unwrap());
    let all: BTreeSet<String> = data.keys.iter().cloned().collect();
    let expected = all.iter().enumerate().filter(|(at, _)| *at < 10 || (20..30).contains(at) && *at != 24);
    assert_eq!(take(&splits, "train"), expected.map(|(_, key)| key.clone()).collect());
    assert_eq!(take(&splits, "val"), data.keys[30..].iter().cloned().collect());
    std::fs::write(root.path().join("s/splits.json"), r#"{"splits": {"train": {"fraction": [0, 1]}}}"#)
        .unwrap();
    assert_eq!(take(&Splits::beside(&index).unwrap(), "train"), all, "our own file comes first");
}

#[test]
fn splits_of_energon_that_do_not_fit_are_refused() {
    let refused = |yaml: &str, shards_left_out: usize| {
        let (_root, _data, mut shards) = prepared_by_energon(yaml);
        shards.drain(..shards_left_out);
        let index = build_index(shards);
        let split =
            Splits::beside(&index).and_then(|splits| Dataset::from(index.clone()).split(&splits, "train"));
        split.unwrap_err().to_string()
    };
    let misspelt = refused(&OF_ENERGON.replace("EXCLUDED", "nobody"), 0);
    assert!(misspelt.contains("`nobody` of shard `s/shard-002.tar`"), "{misspelt}");
    let absent = refused(&OF_ENERGON.replace("EXCLUDED", "sample-00024"), 1);
    assert!(absent.contains("`s/shard-000.tar`, which the dataset does not have"), "{absent}");
    let overlapping = refused(&OF_ENERGON.replace("s/shard-003.tar", "s/shard-000.tar"), 0);
    assert!(
        overlapping.contains("`s/shard-000.tar`") && overlapping.contains("splits.json"),
        "{overlapping}"
    );
}

#[test]
fn splits_that_do_not_fit_are_refused_by_name() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let message = |splits: &Splits, name: &str| {
        Dataset::from(data.index()).split(splits, name).unwrap_err().to_string()
    };
    let unknown = message(&with_splits(&data), "tarin");
    assert!(
        unknown.contains("no split `tarin`") && unknown.contains("gold, held_out, listed, second, train"),
        "{unknown}"
    );
    let splits = r#"{"splits": {
        "absent": {"shards": ["shard-007.tar"]}, "ghost": {"shards": ["shard-000.tar"], "keys": ["nobody"]},
        "empty": {"fraction": [0, 0.000000001], "shards": ["shard-001.tar"]}
    }}"#;
    let splits = Splits::parse(splits).unwrap();
    assert!(message(&splits, "absent").contains("shard `shard-007.tar`"));
    assert!(message(&splits, "ghost").contains("key `nobody`"));
    assert!(message(&splits, "empty").contains("holds no good sample"));
}
