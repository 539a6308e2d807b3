//! Streams WebDataset shards as decoded, cost-annotated and balanced microbatches.

pub mod balanced;
pub mod batch;
pub mod collate;
pub mod compression;
pub mod decode;
pub mod error;
pub mod group;
pub mod index;
pub mod loader;
pub mod measure;
pub mod order;
pub mod pack;
pub mod permutation;
pub mod plan;
mod pool;
mod prefetch;
pub mod probe;
pub mod progress;
pub mod read;
pub mod sample;
pub mod scan;
pub mod shard;
pub mod simulate;
pub mod skip;
mod source;
pub mod steps;
mod store;
pub mod tar;
pub mod tensor;
pub mod text;
pub mod write;

pub use error::{Error, Result};
