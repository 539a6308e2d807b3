//! Index options, and the files that they select: directories, name, and an owner who is trusted.
//!
//! The file name is derived from shard names and sizes, so different shard lists have different files. Names
//! are base names for local shards, whose directory may move, and URLs for remote shards, whose lengths and
//! versions may agree. The index is in `.dflop/` next to the first shard; in the user's cache directory if
//! that directory is not writable or the shard is remote; or in the directory that the user sets.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_samples::media::VideoSampling;
use sha2::{Digest, Sha256};

use super::file::hex;
use super::owner::refusal;
use super::text_counts::TokenCounts;
use crate::error::{Error, Result};
use crate::files::parent_directory;
use crate::flow::{NoProgress, Progress, cores};
use crate::shard::Shard;
use crate::store::Identity;

/// Directory next to the shards.
const DIRECTORY: &str = ".dflop";

/// Index location and build options.
#[derive(Debug, Clone)]
pub struct IndexOptions {
    /// Index directory; `None` means next to the shards, or the user's cache directory.
    pub directory: Option<PathBuf>,
    /// Rebuilds the index even if it is up to date.
    pub is_rebuilt: bool,
    /// Decodes every field, so that bad samples are found before the first epoch. Implies `is_rebuilt`.
    pub is_verified: bool,
    /// Sampling of video frames, with the feature `video`; a video index with different sampling is rebuilt.
    pub video_sampling: VideoSampling,
    /// Token counts that the index returns.
    pub token_counts: TokenCounts,
    /// Number of shards that are read in parallel.
    pub threads: usize,
    /// Listener that is notified of every shard.
    pub progress: Arc<dyn Progress>,
}

impl Default for IndexOptions {
    /// Next to the shards, built if needed, with one thread per core.
    fn default() -> Self {
        Self {
            directory: None,
            is_rebuilt: false,
            is_verified: false,
            video_sampling: VideoSampling::default(),
            token_counts: TokenCounts::default(),
            threads: cores(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// Rejects invalid options and an empty dataset.
pub(super) fn check_options(shards: &[Shard], options: &IndexOptions) -> Result<()> {
    if let Some(fault) = options.video_sampling.fault() {
        return Err(Error::Config { setting: "video_sampling", reason: fault.into() });
    }
    if shards.is_empty() {
        return Err(Error::Config {
            setting: "dataset",
            reason: "a dataset needs at least one shard".into(),
        });
    }
    Ok(())
}

/// Returns the index file name for shards, derived from shard names and sizes.
pub(super) fn file_name(shards: &[Shard], stats: &[Identity]) -> String {
    let mut hasher = Sha256::new();
    for (shard, Identity { bytes, .. }) in shards.iter().zip(stats) {
        let name = shard.unique_name();
        hasher.update((name.len() as u64).to_le_bytes());
        hasher.update(&*name);
        hasher.update(bytes.to_le_bytes());
    }
    format!("{}.arrow", hex(&hasher.finalize()[..8]))
}

/// Returns the directories for reading and writing, best first.
pub(super) fn directories(shards: &[Shard], options: &IndexOptions) -> Vec<PathBuf> {
    if let Some(directory) = &options.directory {
        return vec![directory.clone()];
    }
    let place = match shards[0].path().map(parent_directory) {
        Some(parent) => std::path::absolute(parent).unwrap_or_else(|_| parent.to_path_buf()),
        None => shards[0].url.rsplit_once('/').map_or("", |(parent, _)| parent).into(),
    };
    let place = hex(&Sha256::digest(place.as_os_str().as_encoded_bytes())[..8]);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let beside = beside(shards).filter(|directory| refusal(directory, shards).is_none());
    [beside, cache.map(|cache| cache.join("dflop").join(place))].into_iter().flatten().collect()
}

/// Returns the index directory next to the first shard; `None` for a remote shard.
pub(super) fn beside(shards: &[Shard]) -> Option<PathBuf> {
    Some(shards[0].path()?.parent().unwrap_or(Path::new("")).join(DIRECTORY))
}
