//! Prints model inputs: `cargo run -p dflop-loader --features processors --example model_inputs -- SHARDS…`
//!
//! Without an argument it creates a small shard first, and always builds a small tokenizer. Every step
//! arrives as microbatches of tensors: packed samples, and labels for target tokens.

use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, StepPlanner};
use dflop_processors::{PlainText, Preparer};
use futures::StreamExt;

#[path = "shared/small_data.rs"]
mod small_data;
#[path = "shared/small_tokenizer.rs"]
mod small_tokenizer;

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example prints")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (_directory, shards) = small_data::shards_or_small_data()?;
    let index = Arc::new(Index::open_or_build(expand_shards(&shards)?, &IndexOptions::default())?);
    let model = ModelSpec::preset("qwen2.5-vl-7b")?;
    let preparer = Preparer::builder(&model)
        .tokenizer(small_tokenizer::small_tokenizer()?)
        .plain_text(PlainText::Answer { question: "What do you see?".into() })
        .build()?;

    let costs = CostModel::new(model, DeviceRate::preset("h100")?);
    let planner = StepPlanner::builder(index, costs).global_batch(16).dp_size(2).microbatches(2).build()?;
    let loader = BalancedLoader::builder(planner, 0).steps(1).preparer(Arc::new(preparer.clone())).build()?;
    let mut steps = loader.stream();
    while let Some(step) = steps.next().await {
        for microbatch in step?.microbatches {
            let Some(inputs) = &microbatch.inputs else { continue };
            println!(
                "{} tokens, {} learned, samples at {:?}",
                inputs.tokens, inputs.target_tokens, inputs.cu_seqlens
            );
            for tensor in &inputs.tensors {
                println!("  {} {:?}", tensor.name, tensor.shape);
            }
        }
    }
    let report = loader.prepare_report();
    println!("{} tokens, {} planned", report.tokens, report.planned_tokens);
    Ok(())
}
