//! Balanced microbatches for a single DP rank: `cargo run -p dflop-loader --example balanced -- SHARDS…`
//!
//! Without an argument it creates a small shard first.

use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, StepPlanner};
use futures::StreamExt;

#[path = "shared/small_data.rs"]
mod small_data;

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example prints")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (_directory, shards) = small_data::shards_or_small_data()?;
    let index = Arc::new(Index::open_or_build(expand_shards(&shards)?, &IndexOptions::default())?);
    let model = CostModel::new(ModelSpec::preset("qwen2.5-vl-7b")?, DeviceRate::preset("h100")?);
    let planner = StepPlanner::builder(index, model).global_batch(16).dp_size(2).microbatches(2).build()?;

    let loader = BalancedLoader::builder(planner, 0).steps(2).build()?;
    let mut steps = loader.stream();
    while let Some(step) = steps.next().await {
        let step = step?;
        println!("step {} plan {}", step.step, step.plan.digest);
        for microbatch in &step.microbatches {
            let (samples, scale) = (microbatch.samples.len(), microbatch.loss_scale);
            println!("  {samples} samples, {} tokens, loss scale {scale:.3}", microbatch.tokens);
        }
    }
    Ok(())
}
