//! Checks the stage metrics in both loaders.

use std::time::Duration;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::flow::{ErrorBudget, LoaderStage, MetricsSnapshot};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, Loader, Step, Tail};
use dflop_tests::dataset::{Compression, MixedTexts, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::{expand_with_pipes, run};
use futures::{StreamExt, TryStreamExt};

/// Checks that every queue is empty and every sample is accounted for once a stream has ended.
fn check_ended(metrics: &MetricsSnapshot) {
    for stage in &metrics.stages {
        assert_eq!(stage.depth, 0, "{stage:?}");
        assert!(stage.busy_seconds >= 0.0 && stage.input_wait_seconds >= 0.0, "{stage:?}");
    }
    assert_eq!((metrics.undecoded_bytes, metrics.decoded_bytes), (0, 0));
    let decode = metrics.stage(LoaderStage::Decode);
    assert!(decode.depth_max <= decode.workers as u64, "{decode:?}");
    assert!(metrics.consumer_wait_seconds <= metrics.seconds);
    assert!(metrics.bottleneck.is_some());
}

#[test]
fn a_plain_stream_counts_every_sample_at_every_stage() {
    let texts = MixedTexts::new(&[20, 30], Compression::Plain);
    let shards = expand_shards(&[texts.pattern()]).unwrap();
    let budget = ErrorBudget::new(1.0).unwrap();
    let loader = Loader::builder(shards).batch_size(8).workers(2).error_budget(budget).build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
    let metrics = loader.metrics();
    check_ended(&metrics);
    let unread = (0..50).filter(|number| number % 11 == 5).count() as u64;
    let undecoded = (0..50).filter(|number| number % 11 != 5 && number % 7 == 3).count() as u64;
    let (read, decode) = (metrics.stage(LoaderStage::Read), metrics.stage(LoaderStage::Decode));
    assert_eq!((read.items, read.errors), (50, unread));
    assert_eq!((decode.items, decode.errors), (50 - unread, undecoded));
    assert_eq!(metrics.stage(LoaderStage::DecodeQueue).items, 50 - unread);
    let deliver = metrics.stage(LoaderStage::Deliver);
    assert_eq!(deliver.items, 50 - unread - undecoded);
    let bytes: u64 = batches.iter().flat_map(|batch| &batch.samples).map(|sample| sample.bytes).sum();
    assert_eq!(deliver.bytes, bytes);
    assert_eq!(metrics.stage(LoaderStage::Plan).items, 0);
    assert!(decode.busy_seconds > 0.0 && read.busy_seconds > 0.0);
}

#[test]
fn a_consumer_that_takes_its_time_is_the_bottleneck() {
    let texts = MixedTexts::new(&[40], Compression::Plain);
    let shards = expand_shards(&[texts.pattern()]).unwrap();
    let budget = ErrorBudget::new(1.0).unwrap();
    let builder = Loader::builder(shards).decode(Decode::Raw).batch_size(4).error_budget(budget);
    let loader = builder.build().unwrap();
    run(loader.stream().for_each(|_| tokio::time::sleep(Duration::from_millis(100))));
    let metrics = loader.metrics();
    assert_eq!(metrics.bottleneck, Some(LoaderStage::Deliver), "{metrics:?}");
    assert!(metrics.stage(LoaderStage::Deliver).busy_seconds >= 0.7, "{metrics:?}");
}

#[test]
fn a_slow_command_is_the_bottleneck() {
    let texts = MixedTexts::new(&[20], Compression::Plain);
    let slow = format!("pipe:sleep 0.5; cat {}", texts.shard(0).display());
    let budget = ErrorBudget::new(1.0).unwrap();
    let builder = Loader::builder(expand_with_pipes(&[slow])).error_budget(budget);
    let loader = builder.build().unwrap();
    run(loader.stream().try_for_each(|_| async { Ok(()) })).unwrap();
    let metrics = loader.metrics();
    assert_eq!(metrics.bottleneck, Some(LoaderStage::Read), "{metrics:?}");
    assert!(metrics.consumer_wait_seconds >= 0.4 && metrics.stage(LoaderStage::Read).busy_seconds >= 0.4);
}

#[test]
fn a_balanced_stream_counts_plans_samples_and_steps() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let planner = planner(&data.index(), 16, 1, 2, Tail::Carry);
    let loader = BalancedLoader::builder(planner, 0).steps(3).workers(2).build().unwrap();
    let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
    assert_eq!(steps.len(), 3);
    let metrics = loader.metrics();
    check_ended(&metrics);
    let items = |stage| metrics.stage(stage).items;
    assert_eq!((items(LoaderStage::Plan), items(LoaderStage::Collate)), (3, 3));
    assert_eq!(
        (items(LoaderStage::Read), items(LoaderStage::Decode), items(LoaderStage::Deliver)),
        (48, 48, 48)
    );
    assert!(metrics.stage(LoaderStage::Plan).busy_seconds > 0.0);
    assert!(metrics.decoded_bytes_max > 0);
}

#[test]
fn a_balanced_stream_holds_its_budget_or_one_microbatch() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let planner = planner(&data.index(), 8, 1, 2, Tail::Carry);
    let held = |from, steps, budget| {
        let builder = BalancedLoader::builder(planner.clone(), 0).from_step(from).steps(steps);
        let loader = builder.buffered_bytes_max(budget).build().unwrap();
        run(loader.stream().try_for_each(|_| async { Ok(()) })).unwrap();
        loader.metrics().decoded_bytes_max
    };
    let largest = |budget| (0..6).map(|step| held(step, 1, budget)).max().unwrap();
    let (step, microbatch) = (largest(u64::MAX), largest(1));
    assert!(microbatch < step, "a microbatch is {microbatch} of the {step} bytes of a step");
    assert_eq!(held(0, 6, 1), microbatch, "every microbatch is alone");
    for budget in [2 * microbatch, 2 * step] {
        assert!(held(0, 6, budget) <= budget);
    }
}
