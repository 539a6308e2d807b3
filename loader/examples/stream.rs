//! Streams decoded batches from shards: `cargo run -p dflop-loader --example stream -- SHARDS…`
//!
//! Without an argument it creates a small shard first.

use dflop_loader::Loader;
use dflop_loader::shard::expand_shards;
use futures::StreamExt;

#[path = "shared/small_data.rs"]
mod small_data;

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example prints")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (_directory, shards) = small_data::shards_or_small_data()?;
    let loader = Loader::builder(expand_shards(&shards)?).batch_size(8).build()?;
    let mut batches = loader.stream();
    while let Some(batch) = batches.next().await {
        let batch = batch?;
        println!("{} samples, the first is {}", batch.samples.len(), batch.samples[0].key);
    }
    println!("{} skipped", loader.skipped().len());
    Ok(())
}
