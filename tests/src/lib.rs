//! Creates fixtures for the end-to-end tests: small shards and media.

pub mod dataset;
pub mod fault_server;
pub mod fuzz;
pub mod loaders;
pub mod markdown;
pub mod media;
pub mod odd_server;
pub mod plan_cases;
pub mod tar;

use dflop_loader::shard::{Shard, ShardAccess, ShardItem, expand_shards_in, scan_shards};
use futures::StreamExt;

/// Reads all samples in the shards that match a pattern.
///
/// # Panics
/// If a shard cannot be opened.
#[must_use]
pub fn scan(pattern: &str) -> Vec<ShardItem> {
    run(scan_shards(expand_with_pipes(&[pattern])).map(|item| item.expect("the shard opens")).collect())
}

/// Expands patterns whose names may be commands.
///
/// # Panics
/// If a pattern is invalid.
#[must_use]
pub fn expand_with_pipes<S: AsRef<str>>(patterns: &[S]) -> Vec<Shard> {
    expand_shards_in(patterns, &ShardAccess::default().allow_pipe(true)).expect("the patterns are valid")
}

/// Runs a future on a small runtime.
///
/// # Panics
/// If the runtime cannot be started.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime starts").block_on(future)
}

/// Returns the directory with real media next to the checkout, if there is one: `DFLOP_SHARED`, or
/// `../shared`.
#[must_use]
pub fn shared_data() -> Option<std::path::PathBuf> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared");
    let root = std::env::var_os("DFLOP_SHARED").map_or_else(|| beside.into(), std::path::PathBuf::from);
    let data = root.join("data");
    data.is_dir().then_some(data)
}

/// Rust snippets in the documents, compiled as documentation tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/quickstart.md")]
    struct Quickstart;
    #[doc = include_str!("../../docs/streaming.md")]
    struct Streaming;
    #[doc = include_str!("../../docs/balanced-loader.md")]
    struct BalancedLoader;
    #[doc = include_str!("../../docs/remote-stores.md")]
    struct RemoteStores;
    #[doc = include_str!("../../docs/resume-and-mixtures.md")]
    struct ResumeAndMixtures;
    #[doc = include_str!("../../docs/model-families.md")]
    struct ModelFamilies;
}
