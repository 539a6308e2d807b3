//! Streams WebDataset shards as decoded, cost-annotated and balanced microbatches.
//!
//! Two loaders share every stage below them. [`loader::Loader`] reads shards in order and needs nothing but
//! their names. [`balanced::BalancedLoader`] reads through an [`index::Index`]: it knows the shape of every
//! sample before it reads one, asks the cost model what each will cost, and gives every data-parallel rank
//! its share of each global batch as balanced microbatches. All ranks compute the same plan without talking.
//!
//! ```text
//! shard -> tar -> group -> samples                         loader: in order
//! shard -> index -> order -> steps -> plan -> ranged reads  balanced: planned ahead
//!                                      both -> decode pool -> batches, microbatches
//! ```
//!
//! Bad samples are no errors: they are left out and accounted for ([`skip`]) under an error budget.
//!
//! # Examples
//! ```
//! use dflop_loader::loader::Loader;
//! use dflop_loader::shard::expand_shards;
//! use futures::StreamExt;
//!
//! # #[tokio::main]
//! # async fn main() -> dflop_loader::Result<()> {
//! # let directory = tempfile::tempdir().unwrap();
//! # let directory = directory.path().join("shards");
//! # let mut writer = dflop_loader::write::ShardWriter::builder(&directory).build()?;
//! # writer.write("kite", &[("txt", b"a red kite")])?;
//! # writer.finish()?;
//! # let pattern = directory.to_str().unwrap();
//! let loader = Loader::builder(expand_shards(&[pattern])?).batch_size(32).build()?;
//! let mut batches = loader.stream();
//! while let Some(batch) = batches.next().await {
//!     for sample in batch?.samples {
//!         assert_eq!(sample.key, "kite");
//!     }
//! }
//! assert!(loader.skipped().is_empty());
//! # Ok(())
//! # }
//! ```

pub mod dataset;
pub mod decode;
pub mod error;
pub mod fetch;
pub mod flow;
pub mod import;
pub mod index;
pub mod loader;
pub mod media;
pub mod model;
pub mod order;
pub mod permutation;
pub mod plan;
pub mod prepare;
pub mod sample;
pub mod shard;
pub mod store;
pub mod write;

pub use error::{Error, Result};
