//! Checks the settings that both loaders share, and the seed from which all random choices draw.

use dflop_loader::decode::Batch;
use dflop_loader::media::augment::{Augment, AugmentBuilder};
use dflop_loader::sample::Sample;
use dflop_loader::shard::{FieldSelection, expand_shards};
use dflop_loader::{BalancedLoader, Loader, LoaderBuilder, LoaderSettings, ShuffleBuffer, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::run;
use futures::TryStreamExt;

fn augment() -> AugmentBuilder {
    Augment::builder().random_crop(0.2..=0.9, 0.75..=4.0 / 3.0).flip(0.5)
}

fn loader(data: &TempDataset) -> LoaderBuilder {
    Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(5)
}

fn batches(builder: LoaderBuilder) -> String {
    let batches: Vec<Batch> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    format!("{batches:?}")
}

#[test]
fn one_seed_is_the_seed_of_order_buffer_and_augmentation_and_an_own_seed_wins() {
    let data = TempDataset::new(3, 6, Compression::Plain);
    let shuffled = |buffer| loader(&data).shuffle_shards().shuffle(buffer);
    let own_buffer = ShuffleBuffer { seed: Some(5), ..ShuffleBuffer::new(4) };
    let apart = shuffled(own_buffer).augment(augment().seed(5).build().unwrap()).seed(5);
    let one =
        |seed: u64| batches(shuffled(ShuffleBuffer::new(4)).augment(augment().build().unwrap()).seed(seed));
    assert_eq!(one(5), batches(apart));
    assert_ne!(one(5), one(6));
    let without_a_seed = shuffled(ShuffleBuffer::new(4)).augment(augment().build().unwrap());
    assert_eq!(one(0), batches(without_a_seed), "the default is 0");
}

fn by_key(mut samples: Vec<Sample>) -> Vec<String> {
    samples.sort_by(|one, other| one.key.cmp(&other.key));
    samples.iter().map(|sample| format!("{} {:?}", sample.key, sample.fields)).collect()
}

#[test]
fn one_value_of_settings_serves_both_loaders_and_they_deliver_the_same_samples() {
    let data = TempDataset::new(2, 8, Compression::Plain);
    let settings = LoaderSettings::default()
        .workers(2)
        .fields(FieldSelection::new(["images", "text"]).unwrap())
        .augment(augment().build().unwrap())
        .buffered_bytes_max(1 << 20)
        .seed(9);
    let stream = loader(&data).settings(settings.clone()).build().unwrap();
    let streamed: Vec<Batch> = run(stream.stream().try_collect()).unwrap();
    let planner = planner(&data.index(), 16, 1, 2, Tail::Carry);
    let balanced = BalancedLoader::builder(planner, 0).settings(settings).steps(1).build().unwrap();
    let steps: Vec<_> = run(balanced.stream().try_collect()).unwrap();
    let microbatches = steps.into_iter().flat_map(|step| step.microbatches);
    let balanced = by_key(microbatches.flat_map(|microbatch| microbatch.samples).collect());
    assert_eq!(by_key(streamed.into_iter().flat_map(|batch| batch.samples).collect()), balanced);
    assert!(balanced.len() == 16 && balanced.iter().all(|sample| !sample.contains("wav")));
}

#[test]
fn a_balanced_loader_has_the_seed_of_its_planner() {
    let data = TempDataset::new(2, 8, Compression::Plain);
    let samples = |augment: Augment| {
        let planner = planner(&data.index(), 16, 1, 2, Tail::Carry);
        assert_eq!(planner.seed(), 7);
        let loader = BalancedLoader::builder(planner, 0).augment(augment).steps(1).build().unwrap();
        let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
        let microbatches = steps.into_iter().flat_map(|step| step.microbatches);
        by_key(microbatches.flat_map(|microbatch| microbatch.samples).collect())
    };
    assert_eq!(samples(augment().build().unwrap()), samples(augment().seed(7).build().unwrap()));
    assert_ne!(samples(augment().build().unwrap()), samples(augment().seed(8).build().unwrap()));
}
