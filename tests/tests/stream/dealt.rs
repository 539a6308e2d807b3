//! Checks samples that are dealt to ranks: equal numbers of batches, no sample left out, exact resume.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::error::{BudgetError, Error, Result, SelectionError};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::{Dataset, Loader, LoaderBuilder, ShuffleBuffer, Splits, StreamState};
use dflop_tests::dataset::{Compression, MixedTexts, TempDataset};
use dflop_tests::fault_server::{Behavior, FaultServer};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};
use proptest::prelude::*;

fn dataset(pattern: &str) -> Result<Dataset> {
    indexed(expand_shards(&[pattern])?, &IndexOptions::default())
}

fn indexed(shards: Vec<Shard>, options: &IndexOptions) -> Result<Dataset> {
    Ok(Dataset::from(Arc::new(Index::open_or_build(shards, options)?)))
}

fn dealt(dataset: &Dataset, rank: usize, world: usize) -> LoaderBuilder {
    let builder = Loader::builder(Vec::new()).samples_of_rank(dataset.clone(), rank, world).workers(2);
    builder.error_budget(ErrorBudget::new(1.0).unwrap())
}

fn keys(batches: &[Batch]) -> Vec<Vec<String>> {
    let keys = |batch: &Batch| batch.samples.iter().map(|sample| sample.key.clone()).collect();
    batches.iter().map(keys).collect()
}

/// Reads at most `most` batches; the state is written as JSON and read back.
fn part(builder: LoaderBuilder, most: usize) -> (Vec<Vec<String>>, StreamState) {
    let loader = builder.build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().take(most).try_collect()).unwrap();
    let text = serde_json::to_string(&loader.state().unwrap()).unwrap();
    (keys(&batches), serde_json::from_str(&text).unwrap())
}

fn all(builder: LoaderBuilder) -> Vec<Vec<String>> {
    part(builder, usize::MAX).0
}

fn lengths(batches: &[Vec<String>]) -> Vec<usize> {
    batches.iter().map(Vec::len).collect()
}

/// Checks that a loader continues from the state after `cut` batches.
fn check_cut(builder: &LoaderBuilder, cut: usize) {
    let whole = all(builder.clone());
    let (first, state) = part(builder.clone(), cut);
    let (rest, end) = part(builder.clone().restore(state), usize::MAX);
    let joined: Vec<_> = first.into_iter().chain(rest).collect();
    assert_eq!(joined, whole, "cut after {cut}");
    assert_eq!(end.delivered(), whole.iter().map(Vec::len).sum::<usize>() as u64);
    assert!(all(builder.clone().restore(end)).is_empty(), "nothing follows the end");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_have_the_same_batches_and_leave_out_no_sample(
        counts in prop::collection::vec(0usize..12, 1..7),
        world in 1usize..9,
        batch_size in 1usize..6,
        epochs in 1u64..3,
        shard_seed in prop::option::of(0u64..5),
        buffer in prop::option::of(1usize..9),
        is_split: bool,
        drops_last: bool,
        cut in 0usize..9,
        compression in prop_oneof![Just(Compression::Plain), Just(Compression::Gzip)],
    ) {
        prop_assume!(counts.iter().sum::<usize>() > 3);
        let texts = MixedTexts::new(&counts, compression);
        let mut data = dataset(&texts.pattern()).unwrap();
        if is_split {
            let splits = Splits::parse(r#"{"splits": {"most": {"fraction": [0, 0.7]}}}"#).unwrap();
            let Ok(split) = data.split(&splits, "most") else { return Ok(()) };
            data = split;
        }
        let expected: BTreeSet<String> = (0..data.len())
            .map(|place| data.index().sample(data.sample_number(place)).key().to_owned())
            .collect();
        let per_epoch = if drops_last { data.len() / world as u64 } else { data.len().div_ceil(world as u64) };
        let batches = if drops_last {
            per_epoch * epochs / batch_size as u64
        } else {
            (per_epoch * epochs).div_ceil(batch_size as u64)
        };
        let mut delivered: BTreeMap<String, u64> = BTreeMap::new();
        let mut shape = None;
        for rank in 0..world {
            let mut builder = dealt(&data, rank, world).batch_size(batch_size).epochs(epochs).drop_last(drops_last);
            if let Some(seed) = shard_seed {
                builder = builder.seed(seed).shuffle_shards();
            }
            if let Some(samples) = buffer {
                builder = builder.shuffle(ShuffleBuffer::new(samples));
            }
            if batches == 0 {
                let refused = builder.build().unwrap_err().to_string();
                prop_assert!(refused.contains("no full batch"), "{}", refused);
                continue;
            }
            prop_assert_eq!(builder.clone().build().unwrap().batches(), Some(batches));
            let whole = all(builder.clone());
            let lengths = lengths(&whole);
            prop_assert_eq!(lengths.len() as u64, batches);
            prop_assert!(lengths[..lengths.len() - 1].iter().all(|&length| length == batch_size));
            prop_assert!(!drops_last || lengths.iter().all(|&length| length == batch_size));
            prop_assert_eq!(shape.get_or_insert(lengths.clone()), &lengths);
            whole.into_iter().flatten().for_each(|key| *delivered.entry(key).or_default() += 1);
            if rank == world / 2 {
                check_cut(&builder, cut);
            }
        }
        prop_assert!(delivered.keys().all(|key| expected.contains(key)));
        if drops_last {
            prop_assert!(delivered.values().all(|&times| times <= epochs), "{:?}", delivered);
        } else {
            prop_assert_eq!(delivered.into_keys().collect::<BTreeSet<_>>(), expected);
        }
    }
}

#[test]
fn bad_samples_are_replaced_by_those_that_follow() {
    let data = TempDataset::new(3, 10, Compression::Plain);
    let broken = data.break_images(5);
    let set = dataset(&data.pattern()).unwrap();
    let pixels = Decode::Pixels { side: NonZeroU32::new(8).unwrap() };
    for (decode, buffer) in
        [(Decode::Media, None), (Decode::Media, Some(4)), (pixels, None), (pixels, Some(6))]
    {
        let mut seen = BTreeSet::new();
        for rank in 0..4 {
            let mut builder =
                dealt(&set, rank, 4).decode(decode).batch_size(3).seed(1).shuffle_shards().epochs(2);
            if let Some(samples) = buffer {
                builder = builder.shuffle(ShuffleBuffer::new(samples));
            }
            let whole = all(builder.clone());
            assert_eq!(lengths(&whole), [3, 3, 3, 3, 3, 1], "rank {rank}, {decode:?}");
            (0..=6).for_each(|cut| check_cut(&builder, cut));
            seen.extend(whole.into_iter().flatten());
        }
        let good: BTreeSet<String> = data.keys.iter().filter(|key| !broken.contains(key)).cloned().collect();
        assert_eq!(seen, good);
    }
}

#[test]
fn images_stay_with_their_samples_when_batches_are_filled_up() {
    let data = TempDataset::new(2, 12, Compression::Plain);
    assert_eq!(data.break_images(4).len(), 4);
    let set = dataset(&data.pattern()).unwrap();
    let decode = Decode::Pixels { side: NonZeroU32::new(8).unwrap() };
    let images = |builder: LoaderBuilder| {
        let loader = builder.decode(decode).build().unwrap();
        let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
        let mut images = BTreeMap::new();
        for batch in &batches {
            let pixels = batch.pixels.as_ref().unwrap();
            for (sample, rows) in batch.samples.iter().zip(&pixels.rows) {
                let values = &pixels.tensor.values()[rows.start * 192..rows.end * 192];
                images.insert(sample.key.clone(), values.to_vec());
            }
        }
        images
    };
    let shards = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(5);
    let expected = images(shards.error_budget(ErrorBudget::new(1.0).unwrap()));
    assert_eq!(images(dealt(&set, 0, 1).batch_size(5)), expected);
    assert_eq!(images(dealt(&set, 0, 1).batch_size(7).shuffle(ShuffleBuffer::new(9))), expected);
}

#[test]
fn one_rank_delivers_what_a_stream_of_whole_shards_delivers() {
    let texts = MixedTexts::new(&[9, 4, 7], Compression::Zstd);
    let shards = Loader::builder(expand_shards(&[texts.pattern()]).unwrap());
    let flat = |builder: LoaderBuilder| {
        let builder = builder.batch_size(4).epochs(2).error_budget(ErrorBudget::new(1.0).unwrap());
        all(builder.seed(3).shuffle_shards()).into_iter().flatten().collect::<Vec<_>>()
    };
    assert_eq!(flat(dealt(&dataset(&texts.pattern()).unwrap(), 0, 1)), flat(shards));
}

#[test]
fn a_limit_of_samples_is_one_of_the_whole_pass() {
    let texts = MixedTexts::new(&[20, 20], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    let builder = dealt(&set, 1, 2).batch_size(4).samples_max(10);
    assert_eq!(builder.clone().build().unwrap().batches(), Some(3));
    assert_eq!(lengths(&all(builder.clone())), [4, 4, 2]);
    (0..=3).for_each(|cut| check_cut(&builder, cut));
    assert_eq!(lengths(&all(builder.drop_last(true))), [4, 4]);
}

#[test]
fn a_dataset_without_a_decodable_sample_ends() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let splits = Splits::parse(r#"{"splits": {"bad": {"keys": ["sample-00001"]}}}"#).unwrap();
    let broken = data.break_images(4);
    assert!(broken.contains(&"sample-00001".to_owned()), "{broken:?}");
    let set = dataset(&data.pattern()).unwrap().split(&splits, "bad").unwrap();
    let loader = dealt(&set, 0, 2).build().unwrap();
    let error = run(loader.stream().try_collect::<Vec<_>>()).unwrap_err();
    assert!(matches!(error, Error::Selection(SelectionError::NoSamples { .. })), "{error}");
    let strict = dealt(&set, 0, 2).error_budget(ErrorBudget::default()).build().unwrap();
    let error = run(strict.stream().try_collect::<Vec<_>>()).unwrap_err();
    assert!(matches!(error, Error::ErrorBudget(BudgetError::Share { .. })), "{error}");
}

#[test]
fn a_state_of_another_share_is_refused() {
    let texts = MixedTexts::new(&[9, 4, 7], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    let state = |builder: LoaderBuilder| part(builder.batch_size(2), 2).1;
    let saved = state(dealt(&set, 0, 2));
    let splits = Splits::parse(r#"{"splits": {"most": {"fraction": [0, 0.7]}}}"#).unwrap();
    let split = set.clone().split(&splits, "most").unwrap();
    let shards = Loader::builder(expand_shards(&[texts.pattern()]).unwrap());
    let cases = [
        (dealt(&set, 1, 2), "dealt to rank 0 of 2, and are now dealt to rank 1 of 2"),
        (dealt(&set, 0, 3), "dealt to rank 0 of 2, and are now dealt to rank 0 of 3"),
        (dealt(&set, 0, 2).batch_size(2).drop_last(true), "`drop_last` false"),
        (dealt(&split, 0, 2), "other samples"),
        (shards.clone(), "now whole shards are read"),
    ];
    for (builder, expected) in cases {
        let refused = builder.restore(saved.clone()).build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let refused =
        dealt(&set, 0, 2).restore(state(shards.error_budget(ErrorBudget::new(1.0).unwrap()))).build();
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("it is of whole shards"), "{refused}");
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let texts = MixedTexts::new(&[9], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    for (rank, world, expected) in [(2, 2, "`rank`"), (0, 0, "`world`")] {
        let refused = dealt(&set, rank, world).build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn whole_shards_drop_a_short_last_batch_too() {
    let data = TempDataset::new(3, 7, Compression::Plain);
    let builder = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(4).drop_last(true);
    assert_eq!(lengths(&all(builder.clone())), [4; 5]);
    assert_eq!(lengths(&all(builder.epochs(4))), [4; 21]);
}

#[test]
fn a_rank_requests_the_bytes_of_its_share_alone() {
    let data = TempDataset::new(4, 25, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let names: Vec<String> = (0..4).map(|shard| server.url(&format!("shard-{shard:03}.tar"))).collect();
    let directory = Some(data.directory().join("index"));
    let options = IndexOptions { directory, ..IndexOptions::default() };
    let set = indexed(expand_shards(&names).unwrap(), &options).unwrap();
    let local = dataset(&data.pattern()).unwrap();
    for world in [1, 5] {
        let before = server.counts().body_bytes();
        for rank in 0..world {
            let read = all(dealt(&set, rank, world).seed(1).shuffle_shards());
            assert_eq!(read, all(dealt(&local, rank, world).seed(1).shuffle_shards()));
        }
        let (read, all) = (server.counts().body_bytes() - before, set.index().payload_bytes());
        assert!(read < all * 3 / 2, "{world} ranks read {read} of {all} bytes");
    }
}
