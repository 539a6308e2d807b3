//! Reads files that an earlier version wrote: states resume, and an old index is built again.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::decode::Decode;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::write::ShardWriter;
use dflop_loader::{
    BalancedLoader, Loader, LoaderBuilder, LoaderState, Mixture, ShuffleBuffer, StepPlanner,
    StepPlannerBuilder,
};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

/// Version 5 index for the shards below, and the file name.
const INDEX: (&str, &[u8]) = ("984e9dd0a70f8db1.arrow", include_bytes!("../index/recorded/version-5.arrow"));

/// State after three balanced loader steps.
const LOADER_STATE: &str = r#"{"version":1,"step":3,"seed":7,"global_batch":5,"tail":"carry","shuffle":"global",
"first_epoch":0,"mixture":{"weights":[{"step":0,"weights":[10000]}],"repeat":[null],"stop":"first_exhausted"},
"origin":{"step":0,"draws":[0],"phase":0},"data_sets":[{"fingerprint":"04fff0404540531404ad2e5aa19a726a",
"samples":12,"epoch":1,"offset":3,"shards":{"names":[{"before":"shard-","from":0,"count":2,"digits":6,
"after":".tar"}],"digests":"af305ad75e033826d13692c6741d184b"}}]}"#;

/// Keys in each step of that run.
const STEPS: [[&str; 5]; 4] = [
    ["kite-07", "kite-02", "kite-04", "kite-10", "kite-03"],
    ["kite-06", "kite-08", "kite-00", "kite-09", "kite-11"],
    ["kite-05", "kite-01", "kite-06", "kite-04", "kite-08"],
    ["kite-07", "kite-05", "kite-00", "kite-09", "kite-11"],
];

/// State after three plain loader batches.
const STREAM_STATE: &str = r#"{"version":2,"check":"d5c8a09520798135","shards":2,"names":"c6ccd14ff07078e8",
"order":{"seed":7,"rank":0,"world":1},"shuffle":{"samples_max":4,"bytes_max":268435456,"samples_initial":4,"seed":4},
"position":{"epoch":0,"place":1,"items":7},"drawn":9,"buffer":[{"shard":0,"item":5,"offset":5120},
{"shard":0,"item":4,"offset":4096},{"shard":0,"item":1,"offset":1024}],
"opened":{"0":{"bytes":8192,"header":"d95061b3b9ba23f1"}},"delivered":9,"skipped":0,"first_skipped":null}"#;

/// Keys in each batch of that stream.
const BATCHES: [[&str; 3]; 5] = [
    ["kite-08", "kite-11", "kite-00"],
    ["kite-09", "kite-07", "kite-03"],
    ["kite-10", "kite-02", "kite-06"],
    ["kite-04", "kite-01", "kite-05"],
    ["kite-00", "kite-04", "kite-01"],
];

/// Writes the shards for the recorded run, with the modification time that the index knows.
fn shards(directory: &Path) -> Vec<Shard> {
    let mut writer = ShardWriter::builder(directory).shard_bytes(8 << 10).index(false).build().unwrap();
    for key in 0..12 {
        let text = "a red kite ".repeat(key + 1);
        writer.write(&format!("kite-{key:02}"), &[("txt", text.as_bytes())]).unwrap();
    }
    writer.finish().unwrap();
    for shard in ["shard-000000.tar", "shard-000001.tar"] {
        let file = std::fs::File::options().write(true).open(directory.join(shard)).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
    }
    expand_shards(&[directory.to_str().unwrap()]).unwrap()
}

fn open(shards: &[Shard]) -> Arc<Index> {
    Arc::new(Index::open_or_build(shards.to_vec(), &IndexOptions::default()).unwrap())
}

#[test]
fn an_index_of_the_version_before_is_built_again_at_its_place_with_the_same_order() {
    let directory = tempfile::tempdir().unwrap();
    let shards = shards(directory.path());
    let place = directory.path().join(".dflop").join(INDEX.0);
    std::fs::create_dir(place.parent().unwrap()).unwrap();
    std::fs::write(&place, INDEX.1).unwrap();
    let index = open(&shards);
    assert_eq!(index.path(), Some(&*place), "shards, sizes and times are the recorded ones");
    assert_eq!(index.fingerprint(), "04fff0404540531404ad2e5aa19a726a");
    let built = std::fs::read(&place).unwrap();
    assert_ne!(built, INDEX.1);
    let modified = std::fs::metadata(&place).unwrap().modified().unwrap();
    open(&shards);
    assert_eq!(std::fs::metadata(&place).unwrap().modified().unwrap(), modified, "built once");
}

fn planner(shards: &[Shard]) -> StepPlannerBuilder {
    let device = DeviceRate::preset("h100").unwrap();
    let model = CostModel::new(ModelSpec::preset("qwen2-audio-7b").unwrap(), device);
    StepPlanner::builder(Mixture::new().dataset(open(shards), 1.0), model).global_batch(5).seed(7)
}

fn step_keys(planner: StepPlanner, steps: usize) -> Vec<Vec<String>> {
    let loader = BalancedLoader::builder(planner, 0).decode(Decode::Raw).build().unwrap();
    let steps: Vec<_> = run(loader.stream().take(steps).try_collect()).unwrap();
    let keys = |step: dflop_loader::Step| {
        let samples = step.microbatches.into_iter().flat_map(|microbatch| microbatch.samples);
        samples.map(|sample| sample.key).collect()
    };
    steps.into_iter().map(keys).collect()
}

#[test]
fn a_loader_state_of_the_version_before_goes_on_with_the_recorded_step() {
    let directory = tempfile::tempdir().unwrap();
    let shards = shards(directory.path());
    assert_eq!(step_keys(planner(&shards).build().unwrap(), 4), STEPS, "the order of the seed");
    let state = LoaderState::from_json(LOADER_STATE).unwrap();
    let resumed = planner(&shards).restore(state).build().unwrap();
    assert_eq!(resumed.first_step(), 3);
    assert_eq!(step_keys(resumed, 1), STEPS[3..]);
}

fn stream(shards: Vec<Shard>) -> LoaderBuilder {
    let buffer = ShuffleBuffer { seed: Some(4), ..ShuffleBuffer::new(4) };
    let builder = Loader::builder(shards).decode(Decode::Raw).batch_size(3).epochs(2);
    builder.shuffle(buffer).seed(7).shuffle_shards()
}

fn batch_keys(builder: LoaderBuilder, batches: usize) -> Vec<Vec<String>> {
    let loader = builder.build().unwrap();
    let batches: Vec<dflop_loader::decode::Batch> = run(loader.stream().take(batches).try_collect()).unwrap();
    batches.into_iter().map(|batch| batch.samples.into_iter().map(|sample| sample.key).collect()).collect()
}

#[test]
fn a_stream_state_of_the_version_before_goes_on_with_the_recorded_batch() {
    let directory = tempfile::tempdir().unwrap();
    let shards = shards(directory.path());
    assert_eq!(batch_keys(stream(shards.clone()), 5), BATCHES, "the order of the seed");
    let state = serde_json::from_str(STREAM_STATE).unwrap();
    assert_eq!(batch_keys(stream(shards).restore(state), 2), BATCHES[3..]);
}
