//! Planners over a small data set.

use std::num::NonZeroU64;
use std::sync::Arc;

use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::Index;
use dflop_loader::order::Order;
use dflop_loader::plan::{PlanConfig, StepPlanner};
use dflop_loader::steps::{Steps, Tail};

/// A planner of `global_batch` samples over `dp_size` ranks with `microbatches` each, for the model with a
/// vision and an audio encoder.
///
/// # Panics
/// If the settings do not fit each other.
#[must_use]
pub fn planner(
    index: &Arc<Index>,
    global_batch: u64,
    dp_size: usize,
    microbatches: usize,
    tail: Tail,
) -> StepPlanner {
    let model = CostModel::new(
        ModelSpec::preset("omni-7b").expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    );
    let order = Order::new(index.shuffle_blocks(), index.fingerprint(), 7).expect("there are samples");
    let global_batch = NonZeroU64::new(global_batch).expect("a batch has samples");
    let steps = Steps::new(order, global_batch, tail, 0).expect("the batch fits");
    let config = PlanConfig {
        dp_size,
        microbatches,
        stages: vec![1; model.modules().len()],
        strategy: Strategy::Search,
        caps: Caps::default(),
        work: 2_000,
    };
    StepPlanner::new(index.clone(), steps, Arc::new(model), config).expect("the settings fit")
}
