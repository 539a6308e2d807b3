//! Tests that a plan keeps microbatches near each other in tokens, and records where a byte cap forbids that.

use std::sync::Arc;

use dflop_balancer::Caps;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::error::PlanError;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{Error, StepPlanner};
use dflop_tests::tar::TarBytes;

const LARGE_BYTES: usize = 100_000;

/// Plans three long texts, and a short text next to a large field, into two microbatches.
fn planner(bytes_max: Option<u64>) -> StepPlanner {
    let directory = tempfile::tempdir().unwrap();
    let mut tar = TarBytes::new();
    for key in ["a", "b", "c"] {
        tar = tar.file(&format!("{key}.txt"), "word ".repeat(500).as_bytes());
    }
    let tar = tar.file("d.bin", &vec![0; LARGE_BYTES]).file("d.txt", b"word");
    let shard = directory.path().join("texts.tar");
    std::fs::write(&shard, tar.finish()).unwrap();
    let shards = expand_shards(&[shard.to_str().unwrap()]).unwrap();
    let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
    let model = CostModel::new(ModelSpec::preset("omni-7b").unwrap(), DeviceRate::preset("h100").unwrap());
    let builder = StepPlanner::builder(index, model).global_batch(4).dp_size(1).microbatches(2);
    builder.caps(Caps { tokens_max: None, bytes_max }).work(200).build().unwrap()
}

#[test]
fn microbatches_stay_near_their_mean_in_tokens() {
    let plan = planner(None).plan(0).unwrap();
    assert!(!plan.is_near_mean_cap_dropped);
    let mut samples: Vec<usize> = plan.ranks[0].iter().map(Vec::len).collect();
    samples.sort_unstable();
    assert_eq!(samples, [2, 2]);
}

#[test]
fn a_plan_records_that_a_byte_cap_left_no_partition_near_the_mean() {
    // The large sample has room for nothing else, so all long texts are in the other microbatch.
    let plan = planner(Some(LARGE_BYTES as u64 + 10)).plan(0).unwrap();
    assert!(plan.is_near_mean_cap_dropped);
    let mut samples: Vec<usize> = plan.ranks[0].iter().map(Vec::len).collect();
    samples.sort_unstable();
    assert_eq!(samples, [1, 3]);
}

#[test]
fn caps_that_nothing_meets_are_an_error() {
    let error = planner(Some(LARGE_BYTES as u64 - 10)).plan(0).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Plan(PlanError::Unsolved { source: dflop_balancer::Error::CapItem { .. }, .. })
        ),
        "{error:?}"
    );
}
