//! Streams WebDataset shards as decoded, cost-annotated and balanced microbatches.
//!
//! Two loaders share every stage below them. [`loader::Loader`] reads shards in order and needs nothing but
//! their names. [`balanced::BalancedLoader`] reads through an [`index::Index`]: it knows the shape of every
//! sample before it reads one, asks the cost model what each will cost, and gives every data-parallel rank its
//! share of each global batch as balanced microbatches. All ranks compute the same plan without talking.
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

pub mod augment;
pub mod balanced;
pub mod batch;
pub mod collate;
pub mod compression;
pub mod cost_table;
pub mod dataset;
pub mod decode;
pub mod error;
pub mod field_selection;
pub mod group;
pub mod hub_cache;
pub mod index;
pub mod loader;
pub mod measure;
pub mod metrics;
pub mod mix;
pub mod model_directory;
pub mod model_source;
pub mod order;
mod pace;
pub mod pack;
mod passes;
pub mod permutation;
pub mod plan;
mod pool;
mod prefetch;
pub mod prepare;
pub mod probe;
pub mod progress;
pub mod read;
pub mod sample;
pub mod sample_media;
pub mod scan;
mod selection;
pub mod shard;
pub mod shuffle;
pub mod shuffle_quality;
pub mod simulate;
pub mod skip;
mod source;
pub mod split;
pub mod state;
pub mod steps;
pub mod store;
pub mod tar;
pub mod tensor;
pub mod text;
pub mod transform;
pub mod watchdog;
pub mod write;

