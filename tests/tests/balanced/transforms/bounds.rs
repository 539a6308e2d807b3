//! Checks bounds on user code: threads, samples per call, memory, and calls after the consumer is dropped.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use dflop_loader::decode::{Transform, TransformInput};
use dflop_loader::flow::LoaderStage;
use dflop_loader::shard::expand_shards;
use dflop_loader::{Error, Loader, LoaderBuilder};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::StreamExt;

use super::{balanced, calls, loader, one, samples};

/// Calls so far.
#[derive(Debug, Default)]
struct Called {
    now: AtomicUsize,
    most: AtomicUsize,
    /// Keys in each call.
    keys: Mutex<Vec<Vec<String>>>,
    threads: Mutex<BTreeSet<String>>,
}

impl Called {
    fn transform(self: &Arc<Self>) -> Arc<dyn Transform> {
        let called = self.clone();
        calls(move |fields: Vec<TransformInput>| {
            called.most.fetch_max(called.now.fetch_add(1, SeqCst) + 1, SeqCst);
            called.keys.lock().unwrap().push(fields.iter().map(|input| input.key.clone()).collect());
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            called.threads.lock().unwrap().insert(name);
            std::thread::sleep(Duration::from_millis(3));
            called.now.fetch_sub(1, SeqCst);
            Ok(fields.into_iter().map(|input| Ok(input.media)).collect())
        })
    }
}

#[test]
fn no_more_threads_run_user_code_than_were_asked_for() {
    let data = TempDataset::new(1, 40, Compression::Plain);
    for threads in [1, 3] {
        let called = Arc::new(Called::default());
        let transforms = one("txt", called.transform()).threads(threads).items_max(1);
        assert_eq!(samples(loader(&data).workers(4).transforms(transforms)).len(), 40);
        let (most, names) = (called.most.load(SeqCst), called.threads.lock().unwrap().clone());
        assert!((threads.min(2)..=threads).contains(&most), "{most} at a time of {threads}");
        assert!(names.iter().all(|name| name.starts_with("dflop-transform-")), "{names:?}");
        assert_eq!(called.keys.lock().unwrap().len(), 40);
    }
}

#[test]
fn a_call_has_fields_of_one_batch_or_microbatch_and_never_too_many() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let called = Arc::new(Called::default());
    samples(loader(&data).batch_size(10).transforms(one("txt", called.transform()).items_max(4)));
    let counts: Vec<usize> = called.keys.lock().unwrap().iter().map(Vec::len).collect();
    assert_eq!(counts, [4, 4, 2, 4, 4, 2, 4, 4, 2, 2]);

    let called = Arc::new(Called::default());
    let planned = balanced(&data).steps(2).transforms(one("txt", called.transform())).build().unwrap();
    let steps: Vec<_> = run(planned.stream().collect());
    let mut microbatches = BTreeSet::new();
    for microbatch in steps.into_iter().flat_map(|step| step.unwrap().microbatches) {
        microbatches.insert(microbatch.samples.into_iter().map(|sample| sample.key).collect::<Vec<_>>());
    }
    assert_eq!(called.keys.lock().unwrap().iter().cloned().collect::<BTreeSet<_>>(), microbatches);
}

/// Blocks all callers until it is opened.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    entered: AtomicUsize,
}

impl Gate {
    fn transform(self: &Arc<Self>) -> Arc<dyn Transform> {
        let gate = self.clone();
        calls(move |fields: Vec<TransformInput>| {
            gate.entered.fetch_add(fields.len(), SeqCst);
            drop(gate.opened.wait_while(gate.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
            Ok(fields.into_iter().map(|input| Ok(input.media)).collect())
        })
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// Opens the gate when a test ends, also by panic: a blocked thread would keep the program running.
struct Opens(Arc<Gate>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Writes many small texts, one per sample.
fn texts(directory: &std::path::Path, samples: usize) -> LoaderBuilder {
    let add = |tar: TarBytes, number| tar.file(&format!("s{number:05}.txt"), b"a kite");
    std::fs::write(directory.join("s.tar"), (0..samples).fold(TarBytes::new(), add).finish()).unwrap();
    Loader::builder(expand_shards(&[directory.to_str().unwrap()]).unwrap()).batch_size(4)
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(400)).await;
}

#[test]
fn a_slow_transform_stops_the_reader_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let opens = Opens(gate.clone());
    let loader = texts(directory.path(), 2_000).transforms(one("txt", gate.transform())).build().unwrap();
    let delivered = run(async {
        let mut stream = loader.stream();
        assert!(tokio::time::timeout(Duration::from_millis(400), stream.next()).await.is_err());
        let metrics = loader.metrics();
        // Two batches are ready, one waits for room, and one is awaited; 256 samples are read ahead.
        assert!(metrics.stage(LoaderStage::Decode).items <= 5 * 4, "{metrics:?}");
        assert!(metrics.stage(LoaderStage::Read).items <= 256 + 6 * 4, "{metrics:?}");
        assert_eq!(gate.entered.load(SeqCst), 4, "one thread is in one call");
        gate.open();
        let mut delivered = 0;
        while let Some(batch) = stream.next().await {
            delivered += batch.unwrap().samples.len();
        }
        delivered
    });
    assert_eq!(delivered, 2_000);
    drop(opens);
}

#[test]
fn transforms_run_before_they_are_asked_for_and_not_far_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    let loader = texts(directory.path(), 400).transforms(one("txt", gate.transform())).build().unwrap();
    run(async {
        let mut stream = loader.stream();
        assert_eq!(stream.next().await.unwrap().unwrap().samples.len(), 4);
        settle().await;
        let entered = gate.entered.load(SeqCst);
        assert!(
            (3 * 4..=5 * 4).contains(&entered),
            "{entered} fields were transformed ahead of the second batch"
        );
    });
}

#[test]
fn a_stream_that_is_dropped_makes_no_more_calls_and_does_not_wait() {
    let directory = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let opens = Opens(gate.clone());
    let loader = texts(directory.path(), 400).transforms(one("txt", gate.transform())).build().unwrap();
    run(async {
        let mut stream = loader.stream();
        assert!(tokio::time::timeout(Duration::from_millis(300), stream.next()).await.is_err());
        drop(stream);
        settle().await;
        drop(opens);
        settle().await;
        assert_eq!(gate.entered.load(SeqCst), 4, "only the call that was under way");
    });
}

#[test]
fn a_transform_that_takes_for_ever_is_a_stall_of_transforming() {
    let directory = tempfile::tempdir().unwrap();
    let gate = Arc::new(Gate::default());
    let opens = Opens(gate.clone());
    let builder = texts(directory.path(), 40).transforms(one("txt", gate.transform()));
    let loader = builder.stall_seconds_error(0.3).build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    assert!(matches!(items.last().unwrap(), Err(Error::Stalled { stage: "transform", .. })), "{items:?}");
    drop(opens);
}
