//! Runs the training example on a small dataset.

#[path = "../examples/train.rs"]
#[allow(dead_code, reason = "the test calls what `main` does")]
mod train;

use dflop::executor::run::{GenerateTable, RunConfig};
use dflop::executor::train::EXAMPLE_CONFIG;

#[test]
fn a_small_model_learns_from_shards() {
    let directory = tempfile::tempdir().unwrap();
    let model = RunConfig::from_toml(EXAMPLE_CONFIG).unwrap().model;
    let table = GenerateTable { samples: 64, tiles: [1, 4], ..GenerateTable::default() };
    table.write(directory.path(), &model).unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let losses = train::train(&path("model"), &[path("shards")]).unwrap();
    assert_eq!(losses.len(), 4);
    assert!(losses.iter().all(|loss| loss.is_finite()) && losses[3] < losses[0], "{losses:?}");
}
