//! Trains a model from shards: `cargo run -p dflop --features train --example train -- MODEL SHARDS…`

use std::ops::ControlFlow;

use dflop::prelude::*;

/// Trains from random weights for a few steps and returns the loss of each.
#[expect(clippy::print_stdout, reason = "an example prints")]
pub(crate) fn train(model: &str, shards: &[String]) -> Result<Vec<f64>, dflop::executor::Error> {
    let mut config = RunConfig::new(ModelTable { directory: Some(model.into()), ..ModelTable::default() });
    config.data.shards = shards.to_vec();
    config.data.global_batch_size = 16;
    config.parallel.microbatches = 4;
    config.steps = 4;
    let mut losses = Vec::new();
    Run::new(config, RunOptions::default()).start(&mut |step| {
        println!("step {}: {} tokens, loss {:.4}", step.step, step.tokens, step.loss);
        losses.push(step.loss);
        ControlFlow::Continue(())
    })?;
    Ok(losses)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [model, shards @ ..] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("usage: train MODEL SHARDS…".into());
    };
    train(model, shards)?;
    Ok(())
}
