//! Streams WebDataset shards as decoded, cost-annotated and balanced microbatches.
//!
//! Two loaders share every stage below them. [`Loader`] streams shards in order and requires only shard
//! names, or draws samples in a global order through indexes. [`BalancedLoader`] reads through an
//! [`index::Index`]: it knows every sample's shape before reading, predicts every sample's cost
//! ([`StepPlanner`]), and assigns every data-parallel rank a share of each global batch as balanced
//! microbatches. All ranks compute the same plan without communication.
//!
//! The modules of the crate follow a sample's path: [`store`], [`shard`], [`index`], then dataset, order,
//! plan and fetch, whose types are re-exported at the root, [`decode`] and the loaders; each module imports
//! only earlier modules. [`files`], [`flow`] and [`error`] are below all of them; [`write`](mod@write) and
//! [`model`] are beside this path, and [`settings`] has the names that users write. [`media`], [`sample`] and
//! [`inputs`] are the crate `dflop-samples`, usable without shards; the crate `dflop-import` packs files and
//! tables into shards. With the feature `processors`, `processors` is the crate
//! `dflop-processors`, which turns samples into model inputs.
//!
//! ```text
//! store -> shard -> decode -> batches                           Loader: in order
//! index -> order -> decode -> batches                           Loader: in a global order
//! index -> order -> plan -> fetch -> decode -> microbatches       BalancedLoader: planned ahead
//! ```
//!
//! Bad samples are not errors: they are skipped and accounted for in a [`flow::SkipLog`], under an error
//! budget.
//!
//! # Examples
//! ```
//! use dflop_loader::Loader;
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

mod dataset;
pub mod decode;
mod deliver;
pub mod error;
mod fetch;
pub mod files;
pub mod flow;
pub mod index;
pub mod model;
mod order;
mod plan;
pub mod settings;
pub mod shard;
pub mod store;
pub mod write;

pub use dflop_costmodel::random::Permutation;
#[cfg(feature = "processors")]
pub use dflop_processors as processors;
pub use dflop_samples::{inputs, media, sample};

pub use dataset::{Dataset, SPLITS_FILE, Splits, cost_table};
pub use deliver::{
    BalancedLoader, BalancedLoaderBuilder, BatchStream, EventStream, HELD_BYTES_MAX, Loader, LoaderBuilder,
    LoaderSettings, LogStalls, Microbatch, MicrobatchContext, RestoredInput, SliceGroup, SliceMedium, Stall,
    StallListener, Step, StepEvent, StepStream, StreamState,
};
pub use error::{Error, Result};
pub use fetch::{DpShare, SampleReader, Share, read_classes, read_samples};
pub use order::{
    EpochOrder, LoaderState, MixRules, Mixture, Order, Origin, RowLayout, RowRule, Shuffle, ShuffleBuffer,
    ShuffleQuality, StepSample, Steps, Stop, Tail, TokenSpan,
};
pub use plan::{
    BlankMedia, ContextGroups, ContextPlan, ContextSummary, CostFault, CostFunction, CostInput,
    ExchangedMedium, LayoutSummary, MediumPart, PadTo, RandomBatches, RankBalance, RankSummary, RankTraining,
    SampleMedium, SamplePlace, StepContext, StepPlan, StepPlanner, StepPlannerBuilder, StrategySummary,
    Synchronization, compare_context, compare_layouts, compare_ranks, compare_strategies,
    deal_random_batches, simulate_plan,
};
