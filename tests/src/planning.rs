//! Builds planners over a small dataset.

use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::Index;
use dflop_loader::{Mixture, StepPlanner, StepPlannerBuilder, Tail};

/// Builds a planner with `global_batch` samples over `dp_size` ranks with `microbatches` each, for the model
/// with a vision and an audio encoder.
///
/// # Panics
/// If the settings contradict each other.
#[must_use]
pub fn planner(
    index: &Arc<Index>,
    global_batch: u64,
    dp_size: usize,
    microbatches: usize,
    tail: Tail,
) -> StepPlanner {
    let builder = builder(index.clone(), global_batch, dp_size).microbatches(microbatches);
    builder.tail(tail).work(2_000).build().expect("the settings fit")
}

/// Returns planner settings over any data, for the same model, with a small search.
///
/// # Panics
/// Never: the model is known.
#[must_use]
pub fn builder(data: impl Into<Mixture>, global_batch: u64, dp_size: usize) -> StepPlannerBuilder {
    let spec = ModelSpec::preset("omni-7b").expect("a known model");
    let model = CostModel::new(spec, DeviceRate::preset("h100").expect("a known device"));
    StepPlanner::builder(data, model).global_batch(global_batch).dp_size(dp_size).seed(7).work(200)
}
