//! Feeds multimodal LLM training.
//!
//! One crate for the three uses: stream training data, balance global batches by predicted cost, train
//! through the executor. Everything here is re-exported; the crates [`loader`], [`import`], [`balancer`],
//! [`planner`], [`costmodel`] and `executor` (feature `train`) have the details.
//!
//! # Stream
//! Decodes images, audio and text of WebDataset shards:
//! ```no_run
//! use dflop::prelude::*;
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let loader = Loader::builder(expand_shards(&["shards/"])?).batch_size(8).build()?;
//! let mut batches = loader.stream();
//! while let Some(batch) = batches.next().await {
//!     println!("{} samples", batch?.samples.len());
//! }
//! # Ok(()) }
//! ```
//!
//! # Balance
//! Cuts every global batch into microbatches of equal predicted time, here for rank 0 of 8:
//! ```no_run
//! use std::sync::Arc;
//!
//! use dflop::prelude::*;
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let index = Index::open_or_build(expand_shards(&["shards/"])?, &IndexOptions::default())?;
//! let model = CostModel::new(ModelSpec::preset("qwen2.5-vl-7b")?, DeviceRate::preset("h100")?);
//! let planner = StepPlanner::builder(Arc::new(index), model)
//!     .global_batch(256)
//!     .dp_size(8)
//!     .microbatches(4)
//!     .build()?;
//! let loader = BalancedLoader::builder(planner, 0).build()?;
//! let mut steps = loader.stream();
//! while let Some(step) = steps.next().await {
//!     for microbatch in &step?.microbatches {
//!         println!("{} tokens", microbatch.tokens);
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! # Train
//! Runs encoder and LLM stages on this machine (feature `train`):
#![cfg_attr(feature = "train", doc = "```no_run")]
#![cfg_attr(not(feature = "train"), doc = "```ignore")]
//! use std::ops::ControlFlow;
//!
//! use dflop::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = ModelTable { directory: Some("model/".into()), ..ModelTable::default() };
//! let mut config = RunConfig::new(model);
//! config.data.shards = vec!["shards/".to_owned()];
//! Run::new(config, RunOptions::default()).start(&mut |step| {
//!     println!("step {}: loss {:.4}", step.step, step.loss);
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(()) }
//! ```

pub use dflop_balancer as balancer;
pub use dflop_costmodel as costmodel;
#[cfg(feature = "train")]
pub use dflop_executor as executor;
pub use dflop_import as import;
pub use dflop_loader as loader;
pub use dflop_planner as planner;

/// Names that most programs need.
pub mod prelude {
    pub use dflop_balancer::Strategy;
    pub use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
    #[cfg(feature = "train")]
    pub use dflop_executor::run::{ModelTable, Run, RunConfig, RunOptions};
    pub use dflop_loader::index::{Index, IndexOptions};
    pub use dflop_loader::shard::expand_shards;
    pub use dflop_loader::{BalancedLoader, Loader, StepPlanner};
    pub use futures::StreamExt;
}
