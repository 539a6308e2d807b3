//! Checks samples that ranks draw through indexes: equal batches, exact weights, every sample, exact resume.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::error::{BudgetError, Error, Result, SelectionError};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::write::ShardWriter;
use dflop_loader::{
    Dataset, Loader, LoaderBuilder, LoaderState, Mixture, Shuffle, ShuffleBuffer, Splits, Stop, Tail,
};
use dflop_tests::dataset::{Compression, MixedTexts, TempDataset};
use dflop_tests::fault_server::{Behavior, FaultServer};
use dflop_tests::loaders;
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};
use proptest::prelude::*;

fn dataset(pattern: &str) -> Result<Dataset> {
    indexed(expand_shards(&[pattern])?, &IndexOptions::default())
}

fn indexed(shards: Vec<Shard>, options: &IndexOptions) -> Result<Dataset> {
    Ok(Dataset::from(Arc::new(Index::open_or_build(shards, options)?)))
}

fn drawn(data: impl Into<Mixture>, rank: usize, world: usize) -> LoaderBuilder {
    let builder = Loader::builder(Vec::new()).samples_of_rank(data, rank, world).workers(2);
    builder.error_budget(ErrorBudget::new(1.0).unwrap())
}

fn keys(batches: &[Batch]) -> Vec<Vec<String>> {
    let keys = |batch: &Batch| batch.samples.iter().map(|sample| sample.key.clone()).collect();
    batches.iter().map(keys).collect()
}

/// Reads at most `most` batches; the state is written as JSON and read back.
fn part(builder: LoaderBuilder, most: usize) -> (Vec<Vec<String>>, LoaderState) {
    let loader = builder.build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().take(most).try_collect()).unwrap();
    (keys(&batches), LoaderState::from_json(&loader.run_state().unwrap().to_json()).unwrap())
}

fn all(builder: LoaderBuilder) -> Vec<Vec<String>> {
    part(builder, usize::MAX).0
}

fn lengths(batches: &[Vec<String>]) -> Vec<usize> {
    batches.iter().map(Vec::len).collect()
}

/// Joins the batches of all ranks, step by step.
fn steps(ranks: &[Vec<Vec<String>>]) -> Vec<Vec<String>> {
    (0..ranks[0].len()).map(|step| ranks.iter().flat_map(|rank| rank[step].clone()).collect()).collect()
}

/// Checks that a loader continues from the state after `cut` batches.
fn check_cut(builder: &LoaderBuilder, whole: &[Vec<String>], cut: usize) {
    let (first, state) = part(builder.clone(), cut);
    let (rest, end) = part(builder.clone().restore_run(state), usize::MAX);
    let joined: Vec<_> = first.into_iter().chain(rest).collect();
    assert_eq!(joined, whole, "cut after {cut}");
    assert!(all(builder.clone().restore_run(end)).is_empty(), "nothing follows the end");
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Carry,
    Short,
    Drop,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_have_the_same_batches_and_leave_out_no_sample(
        counts in prop::collection::vec(0usize..12, 1..7),
        world in 1usize..9,
        batch_size in 1usize..6,
        epochs in 1u64..3,
        shuffle in prop_oneof![
            Just(Shuffle::None),
            Just(Shuffle::Global),
            Just(Shuffle::Blocks { block_samples: 3, open_blocks: 2 }),
        ],
        end in prop_oneof![Just(End::Carry), Just(End::Short), Just(End::Drop)],
        is_split: bool,
        cut in 0usize..9,
        other_world in 1usize..9,
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
        let global = (batch_size * world) as u64;
        let count = match end {
            End::Carry => (data.len() * epochs).div_ceil(global),
            End::Short => data.len().div_ceil(global) * epochs,
            End::Drop => data.len() / global * epochs,
        };
        let loader = |rank: usize, world: usize, batch_size: usize| {
            let builder = drawn(data.clone(), rank, world).order(shuffle).seed(5);
            let builder = builder.batch_size(batch_size).epochs(epochs).drop_last(end == End::Drop);
            if end == End::Short { builder.tail(Tail::Short) } else { builder }
        };
        if count == 0 {
            let refused = loader(0, world, batch_size).build().unwrap_err().to_string();
            prop_assert!(refused.contains("no full batch"), "{}", refused);
            return Ok(());
        }
        let ranks: Vec<_> = (0..world).map(|rank| all(loader(rank, world, batch_size))).collect();
        for rank in &ranks {
            prop_assert_eq!(lengths(rank), lengths(&ranks[0]));
            prop_assert_eq!(rank.len() as u64, count);
            let is_full = lengths(rank).iter().all(|&length| length == batch_size);
            prop_assert!(end != End::Drop || is_full);
            let is_full_before_last = lengths(rank)[..rank.len() - 1].iter().all(|&length| length == batch_size);
            prop_assert!(end != End::Carry || is_full_before_last);
        }
        prop_assert_eq!(loader(0, world, batch_size).build().unwrap().batches(), Some(count));
        let mut delivered: BTreeMap<&String, u64> = BTreeMap::new();
        ranks.iter().flatten().flatten().for_each(|key| *delivered.entry(key).or_default() += 1);
        prop_assert!(delivered.keys().all(|key| expected.contains(*key)));
        if end == End::Drop {
            prop_assert!(delivered.values().all(|&times| times <= epochs), "{:?}", delivered);
        } else {
            prop_assert!(expected.iter().all(|key| delivered[key] >= epochs), "{:?}", delivered);
            let repeated = delivered.values().sum::<u64>() - data.len() * epochs;
            let short_steps = if end == End::Short { epochs } else { 1 };
            prop_assert!(repeated < world as u64 * short_steps, "{} repeated", repeated);
        }
        let cut = cut.min(count as usize);
        check_cut(&loader(world / 2, world, batch_size), &ranks[world / 2], cut);
        // The same global batch over another number of ranks.
        if (global as usize).is_multiple_of(other_world) {
            let batch_size = global as usize / other_world;
            let state = part(loader(0, world, global as usize / world), cut).1;
            let others: Vec<_> = (0..other_world)
                .map(|rank| all(loader(rank, other_world, batch_size).restore_run(state.clone())))
                .collect();
            let distinct = |steps: Vec<Vec<String>>| -> Vec<BTreeSet<String>> {
                steps.into_iter().map(BTreeSet::from_iter).collect()
            };
            prop_assert_eq!(distinct(steps(&others)), distinct(steps(&ranks).split_off(cut)));
        }
    }
}

/// Writes a shard per class, in directories that a class names.
fn animals(directory: &std::path::Path, counts: &[usize]) -> Vec<Dataset> {
    let class = |(class, count): (usize, &usize)| {
        let shards = directory.join(format!("class-{class}"));
        let mut writer = ShardWriter::builder(&shards).build().unwrap();
        for number in 0..*count {
            writer.write(&format!("{class}-{number:03}"), &[("txt", b"an animal".as_slice())]).unwrap();
        }
        writer.finish().unwrap();
        dataset(shards.to_str().unwrap()).unwrap()
    };
    counts.iter().enumerate().map(class).collect()
}

/// Counts the samples per class, the first character of a key.
fn classes<'a>(keys: impl IntoIterator<Item = &'a String>) -> BTreeMap<&'a str, usize> {
    keys.into_iter().fold(BTreeMap::new(), |mut counts, key| {
        *counts.entry(&key[..1]).or_default() += 1;
        counts
    })
}

#[test]
fn three_ranks_over_directories_by_class_see_all_classes() {
    let directory = tempfile::tempdir().unwrap();
    animals(directory.path(), &[60, 60, 60]);
    let patterns =
        [0, 1, 2].map(|class| directory.path().join(format!("class-{class}")).display().to_string());
    let set = indexed(expand_shards(&patterns).unwrap(), &IndexOptions::default()).unwrap();
    for rank in 0..3 {
        // In index order, a rank sees one class after the other; shuffled, all classes in every batch.
        let in_order = all(drawn(set.clone(), rank, 3).batch_size(20));
        assert_eq!(classes(in_order.iter().flatten()), BTreeMap::from([("0", 20), ("1", 20), ("2", 20)]));
        let shuffled = all(drawn(set.clone(), rank, 3).batch_size(20).order(Shuffle::Global));
        assert!(shuffled.iter().all(|batch| classes(batch).len() == 3), "rank {rank}: {shuffled:?}");
    }
}

#[test]
fn a_mixture_meets_the_weights_exactly_and_names_every_sample() {
    let directory = tempfile::tempdir().unwrap();
    let sets = animals(directory.path(), &[40, 40]);
    let mixture = || {
        let mixture = Mixture::new().dataset(sets[0].clone().named("kites"), 0.75);
        mixture.dataset(sets[1].clone().named("crows"), 0.25).stop(Stop::FirstExhausted)
    };
    for world in 1..=8 {
        let builders = (0..world).map(|rank| {
            drawn(mixture(), rank, world)
                .batch_size(4)
                .order(Shuffle::Global)
                .epochs(u64::MAX)
                .samples_max(32)
        });
        let ranks: Vec<_> = builders.clone().map(all).collect();
        // Four draws are a period: every rank's batches and every step meet the weights.
        for step in steps(&ranks) {
            assert_eq!(classes(&step), BTreeMap::from([("0", 3 * world), ("1", world)]), "{world} ranks");
        }
        for (rank, builder) in builders.enumerate() {
            (0..=8).step_by(4).for_each(|cut| check_cut(&builder, &ranks[rank], cut));
            let loader = builder.build().unwrap();
            let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
            for batch in batches {
                let names: Vec<&str> = batch.sources.iter().map(|name| &**name).collect();
                let expected = batch
                    .samples
                    .iter()
                    .map(|sample| ["kites", "crows"][usize::from(&sample.key[..1] == "1")]);
                assert_eq!(names, expected.collect::<Vec<_>>());
            }
            let delivered = loader.metrics().sources;
            let delivered: Vec<_> = delivered.iter().map(|of| (of.source.as_str(), of.samples)).collect();
            assert_eq!(delivered.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["kites", "crows"]);
            assert_eq!(delivered.iter().map(|(_, samples)| samples).sum::<u64>(), 32);
        }
    }
}

#[test]
fn classes_are_drawn_by_weight_over_any_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    animals(directory.path(), &[50, 10, 5]);
    let patterns =
        [0, 1, 2].map(|class| directory.path().join(format!("class-{class}")).display().to_string());
    let set = indexed(expand_shards(&patterns).unwrap(), &IndexOptions::default()).unwrap();
    let class = |numbers: &[u64]| {
        Ok(numbers.iter().map(|&number| set.index().sample(number).key()[..1].to_owned()).collect())
    };
    let mixture = Mixture::by_class(set.clone(), class, None).unwrap();
    for world in [1, 2, 5] {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let builder = drawn(mixture.clone(), rank, world).order(Shuffle::Global);
                all(builder.batch_size(30 / world).epochs(u64::MAX).samples_max(150 / world as u64))
            })
            .collect();
        let everything: Vec<String> = steps(&ranks).into_iter().flatten().collect();
        assert_eq!(classes(&everything), BTreeMap::from([("0", 50), ("1", 50), ("2", 50)]), "{world} ranks");
        // Samples in a class are drawn equally often.
        let mut times: BTreeMap<&String, u64> = BTreeMap::new();
        for key in &everything {
            *times.entry(key).or_default() += 1;
        }
        assert!(times.iter().all(|(key, times)| [1, 5, 10][key[..1].parse::<usize>().unwrap()] == *times));
    }
}

#[test]
fn the_samples_of_a_step_are_those_of_the_balanced_loader() {
    let data = TempDataset::new(3, 20, Compression::Plain);
    let planner = loaders::planner(&data.index(), 12, 2, 1, Tail::Carry);
    let ranks = [0, 1].map(|rank| {
        let builder = drawn(data.index(), rank, 2).order(Shuffle::Global).seed(planner.seed());
        all(builder.batch_size(6).decode(Decode::Raw))
    });
    for (step, keys) in steps(&ranks).into_iter().enumerate() {
        let plan = planner.plan(step as u64).unwrap();
        let planned = plan.samples.iter().map(|sample| planner.row(*sample).key().to_owned());
        assert_eq!(keys, planned.collect::<Vec<_>>());
    }
}

#[test]
fn bad_samples_are_replaced_alike_on_any_number_of_ranks() {
    let data = TempDataset::new(3, 10, Compression::Plain);
    let broken = data.break_images(5);
    let set = dataset(&data.pattern()).unwrap();
    let pixels = Decode::Pixels { side: NonZeroU32::new(8).unwrap() };
    for decode in [Decode::Media, pixels] {
        let loader = |rank, world| {
            drawn(set.clone(), rank, world)
                .decode(decode)
                .batch_size(12 / world)
                .order(Shuffle::Global)
                .epochs(2)
        };
        let whole = all(loader(0, 1));
        assert_eq!(lengths(&whole), [12; 5]);
        let good: BTreeSet<&String> = data.keys.iter().filter(|key| !broken.contains(key)).collect();
        assert_eq!(whole.iter().flatten().collect::<BTreeSet<_>>(), good, "{decode:?}");
        for world in [2, 3, 4] {
            let ranks: Vec<_> = (0..world).map(|rank| all(loader(rank, world))).collect();
            assert_eq!(steps(&ranks), whole, "{world} ranks, {decode:?}");
            (0..=5).for_each(|cut| check_cut(&loader(1, world), &ranks[1], cut));
        }
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
            assert_eq!(batch.samples.len(), pixels.rows.len());
            for (sample, rows) in batch.samples.iter().zip(&pixels.rows) {
                let values = &pixels.tensor.values()[rows.start * 192..rows.end * 192];
                images.insert(sample.key.clone(), values.to_vec());
            }
        }
        images
    };
    let shards = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(5);
    let expected = images(shards.error_budget(ErrorBudget::new(1.0).unwrap()));
    assert_eq!(images(drawn(set.clone(), 0, 1).batch_size(5)), expected);
    assert_eq!(images(drawn(set, 0, 1).batch_size(7).order(Shuffle::Global)), expected);
}

#[test]
fn one_rank_in_index_order_delivers_what_a_stream_of_whole_shards_delivers() {
    let texts = MixedTexts::new(&[9, 4, 7], Compression::Zstd);
    let shards = Loader::builder(expand_shards(&[texts.pattern()]).unwrap());
    let shards = shards.batch_size(4).epochs(2).error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
    let streamed: Vec<Batch> = run(shards.stream().try_collect()).unwrap();
    let drawn = all(drawn(dataset(&texts.pattern()).unwrap(), 0, 1).batch_size(4).epochs(2));
    let flat = |batches: Vec<Vec<String>>| batches.into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(flat(drawn), flat(keys(&streamed)));
}

#[test]
fn a_limit_of_samples_is_one_of_the_whole_pass() {
    let texts = MixedTexts::new(&[20, 20], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    let builder = drawn(set, 1, 2).batch_size(4).samples_max(10);
    assert_eq!(builder.clone().build().unwrap().batches(), Some(3));
    let whole = all(builder.clone());
    assert_eq!(lengths(&whole), [4, 4, 2]);
    (0..=3).for_each(|cut| check_cut(&builder, &whole, cut));
    assert_eq!(lengths(&all(builder.drop_last(true))), [4, 4]);
}

#[test]
fn a_dataset_without_a_decodable_sample_ends() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let splits = Splits::parse(r#"{"splits": {"bad": {"keys": ["sample-00001"]}}}"#).unwrap();
    let broken = data.break_images(4);
    assert!(broken.contains(&"sample-00001".to_owned()), "{broken:?}");
    let set = dataset(&data.pattern()).unwrap().split(&splits, "bad").unwrap();
    let loader = drawn(set.clone(), 0, 2).build().unwrap();
    let error = run(loader.stream().try_collect::<Vec<_>>()).unwrap_err();
    assert!(matches!(error, Error::Selection(SelectionError::NoSamples { .. })), "{error}");
    let strict = drawn(set, 0, 2).error_budget(ErrorBudget::default()).build().unwrap();
    let error = run(strict.stream().try_collect::<Vec<_>>()).unwrap_err();
    assert!(matches!(error, Error::ErrorBudget(BudgetError::Share { .. })), "{error}");
}

#[test]
fn a_state_of_another_run_is_refused() {
    let texts = MixedTexts::new(&[9, 4, 7], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    let saved = part(drawn(set.clone(), 0, 2).batch_size(2), 2).1;
    let splits = Splits::parse(r#"{"splits": {"most": {"fraction": [0, 0.7]}}}"#).unwrap();
    let split = set.clone().split(&splits, "most").unwrap();
    let shards = Loader::builder(expand_shards(&[texts.pattern()]).unwrap());
    let cases = [
        (drawn(set.clone(), 1, 2).seed(1), "seed 0, and this run has 1"),
        (drawn(set.clone(), 0, 3).order(Shuffle::Global), "has a shuffle of nothing"),
        (drawn(set.clone(), 0, 2).batch_size(2).drop_last(true), "tail `carry`"),
        (drawn(split, 0, 2), "split `most` now"),
        (shards.clone(), "whole shards are read"),
    ];
    for (builder, expected) in cases {
        let refused = builder.restore_run(saved.clone()).build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let shards = shards.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
    assert!(shards.run_state().unwrap_err().to_string().contains("use `state`"));
    let refused = drawn(set.clone(), 0, 1).restore(shards.state().unwrap()).build().unwrap_err().to_string();
    assert!(refused.contains("it is of whole shards"), "{refused}");
    let loader = drawn(set, 0, 1).build().unwrap();
    assert!(loader.state().unwrap_err().to_string().contains("use `run_state`"));
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let texts = MixedTexts::new(&[9], Compression::Plain);
    let set = dataset(&texts.pattern()).unwrap();
    let set = |rank, world| drawn(set.clone(), rank, world);
    let shards = Loader::builder(expand_shards(&[texts.pattern()]).unwrap());
    let cases = [
        (set(2, 2), "`rank`"),
        (set(0, 0), "`world`"),
        (set(0, 2).shuffle_shards(), "`shuffle_shards`: samples that are drawn through an index"),
        (set(0, 2).shuffle(ShuffleBuffer::new(4)), "`shuffle_buffer`: samples that are drawn"),
        (set(0, 1).tail(Tail::Short).drop_last(true), "`drop_last`"),
        (shards.order(Shuffle::Global), "`order`: whole shards are read"),
    ];
    for (builder, expected) in cases {
        let refused = builder.build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn whole_shards_drop_a_short_last_batch_too() {
    let data = TempDataset::new(3, 7, Compression::Plain);
    let builder = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(4).drop_last(true);
    let lengths = |builder: LoaderBuilder| {
        let batches: Vec<Batch> = run(builder.build().unwrap().stream().try_collect()).unwrap();
        lengths(&keys(&batches))
    };
    assert_eq!(lengths(builder.clone()), [4; 5]);
    assert_eq!(lengths(builder.epochs(4)), [4; 21]);
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
            let read = |set: &Dataset| all(drawn(set.clone(), rank, world).batch_size(100 / world));
            assert_eq!(read(&set), read(&local));
        }
        let (read, all) = (server.counts().body_bytes() - before, set.index().payload_bytes());
        assert!(read < all * 3 / 2, "{world} ranks read {read} of {all} bytes");
    }
}
