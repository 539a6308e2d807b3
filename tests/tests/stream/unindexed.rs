//! Checks order, rank shares and memory of the plain loader, for any thread timing.

use std::num::NonZeroU32;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::shard::expand_shards;
use dflop_loader::{Loader, LoaderBuilder, ShuffleBuffer};
use dflop_tests::dataset::{Compression, MixedTexts};
use dflop_tests::media::jpeg;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;
use proptest::prelude::*;

fn builder(names: &[String]) -> LoaderBuilder {
    Loader::builder(expand_shards(names).unwrap()).error_budget(ErrorBudget::new(1.0).unwrap())
}

fn batches(builder: LoaderBuilder) -> Vec<Batch> {
    run(builder.build().unwrap().stream().try_collect()).unwrap()
}

fn keys(batches: &[Batch]) -> Vec<String> {
    batches.iter().flat_map(|batch| &batch.samples).map(|sample| sample.key.clone()).collect()
}

/// Writes a shard with these files.
fn write_shard(files: &[(String, Vec<u8>)]) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let tar = files.iter().fold(TarBytes::new(), |tar, (name, bytes)| tar.file(name, bytes));
    let path = directory.path().join("s.tar");
    std::fs::write(&path, tar.finish()).unwrap();
    let name = path.to_str().unwrap().to_owned();
    (directory, name)
}

#[test]
fn a_shuffled_epoch_is_a_permutation_and_every_epoch_another() {
    let texts = MixedTexts::new(&[30, 20, 25], Compression::Plain);
    let names = [texts.pattern()];
    let mut in_order = keys(&batches(builder(&names)));
    let order = |buffer| keys(&batches(builder(&names).shuffle(buffer).epochs(2).batch_size(4)));
    let two = order(ShuffleBuffer::new(20));
    let (first, second) = two.split_at(in_order.len());
    assert_ne!(first, second);
    assert_ne!(first, in_order);
    assert_eq!(two, order(ShuffleBuffer::new(20)), "equal seeds give equal orders");
    assert_ne!(two, order(ShuffleBuffer { seed: Some(1), ..ShuffleBuffer::new(20) }));
    in_order.sort();
    for epoch in [first, second] {
        let mut sorted = epoch.to_vec();
        sorted.sort();
        assert_eq!(sorted, in_order);
    }
}

#[test]
fn shards_are_read_in_another_order_in_every_epoch() {
    let texts = MixedTexts::new(&[2; 8], Compression::Plain);
    let all = keys(&batches(builder(&[texts.pattern()]).seed(3).shuffle_shards().epochs(2)));
    let (first, second) = all.split_at(all.len() / 2);
    assert_ne!(first, second);
    let sorted = |keys: &[String]| {
        let mut keys = keys.to_vec();
        keys.sort();
        keys
    };
    assert_eq!(sorted(first), sorted(second));
}

#[test]
fn ranks_share_the_shards_of_every_epoch() {
    let texts = MixedTexts::new(&[3, 5, 2, 7, 4, 6, 1], Compression::Plain);
    let names = [texts.pattern()];
    for seed in [None, Some(5)] {
        let share = |rank, world| {
            let builder = builder(&names).shards_of_rank(rank, world).epochs(2);
            let builder = if let Some(seed) = seed { builder.seed(seed).shuffle_shards() } else { builder };
            keys(&batches(builder))
        };
        let mut joined: Vec<String> = (0..3).flat_map(|rank| share(rank, 3)).collect();
        let mut whole = share(0, 1);
        joined.sort();
        whole.sort();
        assert_eq!(joined, whole, "{seed:?}");
    }
    let refused = builder(&names).shards_of_rank(0, 8).build().unwrap_err().to_string();
    assert!(refused.contains("7 shards") && refused.contains("8 ranks"), "{refused}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_number_of_workers_gives_the_same_batches(
        sides in prop::collection::vec(prop_oneof![Just(8u32), Just(64), Just(400)], 4..14),
        workers in 2usize..9,
        batch_size in 1usize..6,
        bytes_max in 1u64..40_000,
    ) {
        let files: Vec<_> =
            sides.iter().enumerate().map(|(n, &side)| (format!("k{n:03}.jpg"), jpeg(side, side, n as u32))).collect();
        let (_directory, name) = write_shard(&files);
        let decodes = [Decode::Raw, Decode::Media, Decode::Pixels { side: NonZeroU32::new(16).unwrap() }];
        for decode in decodes {
            let seen = |workers| {
                let builder = builder(std::slice::from_ref(&name)).decode(decode).batch_size(batch_size).workers(workers);
                let batches = batches(builder.buffered_bytes_max(bytes_max).decoded_bytes_max(bytes_max));
                let pixels = |batch: &Batch| batch.pixels.as_ref().map(|pixels| pixels.tensor.values().to_vec());
                batches.iter().map(|batch| (batch.samples.clone(), pixels(batch))).collect::<Vec<_>>()
            };
            prop_assert!(seen(1) == seen(workers), "{decode:?}");
        }
    }

    #[test]
    fn memory_stays_within_its_budgets_or_one_sample(
        sizes in prop::collection::vec(prop_oneof![0usize..50, 0usize..2_000, 0usize..30_000], 1..80),
        batch_size in 1usize..20,
        budget in 1u64..40_000,
        workers in 1usize..5,
    ) {
        let files: Vec<_> =
            sizes.iter().enumerate().map(|(n, &size)| (format!("k{n:03}.txt"), vec![b'a'; size])).collect();
        let (_directory, name) = write_shard(&files);
        let largest = sizes.iter().max().copied().unwrap_or(0) as u64;
        let batch = |sizes: &[usize]| sizes.iter().sum::<usize>() as u64;
        let largest_batch = sizes.chunks(batch_size).map(batch).max().unwrap_or(0);
        let most = |decode, buffer: Option<usize>| {
            let builder = builder(std::slice::from_ref(&name)).decode(decode).batch_size(batch_size).workers(workers);
            let mut builder = builder.buffered_bytes_max(budget).decoded_bytes_max(budget);
            if let Some(samples) = buffer {
                builder = builder.shuffle(ShuffleBuffer::new(samples));
            }
            let loader = builder.build().unwrap();
            let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
            assert_eq!(keys(&batches).len(), sizes.len());
            drop(batches);
            let metrics = loader.metrics();
            assert_eq!((metrics.undecoded_bytes, metrics.decoded_bytes), (0, 0), "all memory is released");
            (metrics.undecoded_bytes_max, metrics.decoded_bytes_max)
        };
        let half = (budget / 2).max(1);
        let (undecoded, decoded) = most(Decode::Media, None);
        prop_assert!(undecoded <= budget.max(largest), "{undecoded} of {budget}, largest {largest}");
        prop_assert!(decoded <= budget.max(largest_batch), "{decoded} of {budget}, batch {largest_batch}");
        // Shuffled batches differ; none is larger than all samples.
        let (undecoded, _) = most(Decode::Media, Some(7));
        prop_assert!(undecoded <= 2 * half.max(largest), "{undecoded} of {budget}, largest {largest}");
        let (undecoded, decoded) = most(Decode::Raw, None);
        // A sample is counted with the batch before the reader stops counting it.
        let bound = half.max(largest) + half.max(largest_batch);
        prop_assert!(undecoded <= bound, "{undecoded} over {bound}");
        prop_assert_eq!(decoded, 0);
    }
}
