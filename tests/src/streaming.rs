//! Joins the output of all ranks' loaders into complete global batches.

use dflop_loader::decode::Decode;
use dflop_loader::{BalancedLoader, LoaderState, Step, StepPlanner};
use futures::{StreamExt, TryStreamExt};

/// Identity of a delivered sample: shard, key and epoch.
pub type DeliveredId = (String, String, u64);

/// Streams every rank for at most `steps` steps.
///
/// Returns the samples in every global batch, sorted, and the common state of all ranks afterwards.
///
/// # Panics
/// If a rank fails, or if ranks differ in the number of steps or in the state.
#[must_use]
pub fn stream_all_ranks(planner: &StepPlanner, steps: usize) -> (Vec<Vec<DeliveredId>>, LoaderState) {
    let mut batches: Vec<Vec<DeliveredId>> = Vec::new();
    let mut states = Vec::new();
    for dp_rank in 0..planner.dp_size() {
        let loader = BalancedLoader::builder(planner.clone(), dp_rank).decode(Decode::Raw).workers(1).build();
        let loader = loader.expect("the settings fit");
        let delivered: Vec<Step> =
            crate::run(loader.stream().take(steps).try_collect()).expect("every step is delivered");
        if dp_rank == 0 {
            batches.resize(delivered.len(), Vec::new());
        }
        assert_eq!(delivered.len(), batches.len(), "rank {dp_rank} has another number of steps");
        for (batch, step) in batches.iter_mut().zip(delivered) {
            let samples = step.microbatches.into_iter().flat_map(|microbatch| microbatch.samples);
            batch.extend(samples.map(|sample| (sample.shard.to_string(), sample.key, sample.epoch)));
        }
        states.push(loader.state().expect("the run has the step"));
    }
    assert!(states.windows(2).all(|pair| pair[0] == pair[1]), "states differ between ranks");
    for batch in &mut batches {
        batch.sort_unstable();
    }
    (batches, states.remove(0))
}
