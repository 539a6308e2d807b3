//! Checks that a stalled loader reports the stall and the location.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dflop_loader::flow::LoaderStage;
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, Error, Loader, Stall, StallListener, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::media::jpeg;
use dflop_tests::tar::TarBytes;
use dflop_tests::{expand_with_pipes, run};
use futures::StreamExt;

#[derive(Debug, Default)]
struct Heard(Mutex<Vec<Stall>>);

impl StallListener for Heard {
    fn stalled(&self, stall: &Stall) {
        self.0.lock().unwrap().push(stall.clone());
    }
}

#[test]
fn a_command_that_hangs_is_a_stall_of_reading_its_shard() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let hanging = format!("pipe:head -c 4096 {}; exec sleep 600", data.shard(0).display());
    let heard = Arc::new(Heard::default());
    let shards = expand_with_pipes(&[data.shard(0).display().to_string(), hanging.clone()]);
    let builder = Loader::builder(shards).batch_size(4).stall_listener(heard.clone());
    let loader = builder.stall_seconds_max(0.2).stall_seconds_error(1.0).build().unwrap();
    let started = Instant::now();
    let items: Vec<_> = run(loader.stream().collect());
    // Dropping the stream kills the command; otherwise the runtime would wait for it.
    assert!(started.elapsed() < Duration::from_mins(1));
    assert_eq!(items.len(), 2, "earlier samples are delivered");
    let error = items[1].as_ref().unwrap_err();
    assert!(
        matches!(error, Error::Stalled { stage: "read", shard: Some(shard), .. } if *shard == hanging),
        "{error}"
    );
    let heard = heard.0.lock().unwrap();
    assert!(heard.len() >= 2, "it is reported again");
    assert!(
        heard
            .iter()
            .all(|stall| stall.stage == LoaderStage::Read && stall.shard.as_deref() == Some(&*hanging))
    );
    assert!(heard[0].seconds >= 0.2 && heard[0].metrics.stage(LoaderStage::Read).items >= 4);
}

#[test]
fn a_consumer_that_does_not_ask_is_no_stall() {
    let data = TempDataset::new(1, 60, Compression::Plain);
    let heard = Arc::new(Heard::default());
    let builder = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(2);
    let builder = builder.stall_listener(heard.clone()).stall_seconds_max(0.3).stall_seconds_error(0.3);
    let loader = builder.buffered_bytes_max(1).build().unwrap();
    let batches = run(async {
        let mut stream = loader.stream();
        let mut batches = 0;
        while let Some(batch) = stream.next().await {
            batch.unwrap();
            batches += 1;
            if batches == 2 {
                tokio::time::sleep(Duration::from_millis(900)).await;
            }
        }
        batches
    });
    assert_eq!((batches, heard.0.lock().unwrap().len()), (30, 0));
}

#[test]
fn a_decoder_that_takes_for_ever_is_a_stall_of_decoding() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar");
    std::fs::write(&path, TarBytes::new().file("huge.jpg", &jpeg(3_500, 3_500, 1)).finish()).unwrap();
    let heard = Arc::new(Heard::default());
    let shards = expand_shards(&[path.display().to_string()]).unwrap();
    let builder = Loader::builder(shards).stall_listener(heard.clone()).stall_seconds_max(0.02);
    let loader = builder.build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    assert!(items[0].is_ok());
    let heard = heard.0.lock().unwrap();
    let stall = heard.iter().find(|stall| stall.stage == LoaderStage::Decode).expect("decoding took long");
    assert_eq!((stall.shard.as_ref(), stall.metrics.stage(LoaderStage::Decode).depth), (None, 1));
}

#[test]
fn a_balanced_loader_is_watched_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.tar");
    let tar = TarBytes::new().file("huge.jpg", &jpeg(3_500, 3_500, 1)).file("a.txt", b"a kite");
    std::fs::write(&path, tar.finish()).unwrap();
    let options = dflop_loader::index::IndexOptions::default();
    let shards = expand_shards(&[path.display().to_string()]).unwrap();
    let index = Arc::new(dflop_loader::index::Index::open_or_build(shards, &options).unwrap());
    let planner = planner(&index, 2, 1, 1, Tail::Carry);
    let heard = Arc::new(Heard::default());
    let builder = BalancedLoader::builder(planner, 0).steps(1).stall_listener(heard.clone());
    let loader = builder.stall_seconds_max(0.02).build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    assert!(items.len() == 1 && items[0].is_ok());
    let stages: Vec<LoaderStage> = heard.0.lock().unwrap().iter().map(|stall| stall.stage).collect();
    assert!(stages.contains(&LoaderStage::Decode), "{stages:?}");
    assert_eq!(loader.metrics().stalls, stages.len() as u64);
}

#[test]
fn stall_times_that_make_no_sense_are_refused() {
    let data = TempDataset::new(1, 1, Compression::Plain);
    let builder = Loader::builder(expand_shards(&[data.pattern()]).unwrap());
    let error = builder.stall_seconds_max(f64::NAN).build().unwrap_err().to_string();
    assert!(error.contains("stall_seconds_max"), "{error}");
}
